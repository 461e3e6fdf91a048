"""One trace of this process: subscribes to the events of the length sync, and knows the encoders that it records.

On the training thread: one enqueue for each record and, once per encoder, a walk through its modules. The rest is the
writer's thread's.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from nemo_patches.channel import process_hooks
from nemo_patches.channel.process_hooks import InForkedChild
from nemo_patches.stall.job_stall import EXIT_CODE, JobStalled, StallExits
from nemo_patches.stall.missing_rank import MissingRank, StallReported
from nemo_patches.sync import length_sync
from nemo_patches.sync.events import CallLeft, Grown, bus
from nemo_patches.sync.rank_log import raised_by_signal_handler, report
from nemo_patches.sync.settings import Settings
from nemo_patches.text import first_line
from nemo_patches.tracing import records
from nemo_patches.tracing.checks import EncoderChecks, FindingError, say_once
from nemo_patches.tracing.encoder_facts import positions
from nemo_patches.tracing.encoder_state import EncoderState
from nemo_patches.tracing.exception_hooks import ExceptionHooks, exit_in_flight
from nemo_patches.tracing.lengths_copy import LengthsCopies
from nemo_patches.tracing.records import End, Grow, Lengths, Memory, Missing, Record, Stalled, Stopped
from nemo_patches.tracing.settings import TraceSettings
from nemo_patches.tracing.trace_header import make_header
from nemo_patches.tracing.writer import TraceWriter

MEMORY_EVERY_CALLS = 50
_CLOSE_LIMIT = timedelta(seconds=2)


class Tracing:
    """Of this process: one trace at a time, or none."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def start(self, settings: TraceSettings) -> None:
        """Trace from the next encoder call on."""
        self.stop()
        self.recorder = Recorder(settings)
        bus.subscribe("tracing", self.recorder.handlers())

    def stop(self) -> None:
        """End the trace, if there is one."""
        ending, self.recorder = self.recorder, None
        if ending is not None:
            bus.unsubscribe("tracing")
            ending.close("revert(), or apply() with another trace")

    def length_sync_changed(self, settings: Settings) -> None:
        """The length sync has other settings from now on; the headers of later parts have them."""
        if self.recorder is not None and (writer := self.recorder.writer) is not None:
            writer.output.header = make_header(self.recorder.settings, settings, writer.output.header.started)

    def where(self) -> str:
        """The file that is being written, or why there is none; empty where nothing is traced."""
        return self.recorder.where() if self.recorder is not None else ""


class Recorder:
    """One trace of this process: its writer, from the first encoder call on, and what it knows of the encoders.

    The length sync's events come on the training thread, a stall report on its monitor's.
    """

    def __init__(self, settings: TraceSettings) -> None:
        self.settings = settings
        self.failed = ""  # the exception that ends this process, in a line, unless an encoder is called again
        self.guard = _Guard(self)
        self.writer: TraceWriter | None = None
        self._over = ""  # why nothing is recorded any more
        self._group: weakref.ref[Any] | None = None  # the process group that the file's header tells of
        self._encoders: weakref.WeakKeyDictionary[torch.nn.Module, EncoderState] = weakref.WeakKeyDictionary()
        self._seen: Counter[str] = Counter()
        self._calls = 0
        self._device: torch.device | None = None  # of the last call's signal
        self._copies = LengthsCopies()
        self._hooks: ExceptionHooks | None = None
        self._uncaught = False  # what ends this process came to the interpreter: then the exit code is known

    def begin(self, encoder: torch.nn.Module) -> EncoderState | None:
        """A call begins; None where it is not recorded, or is part of one that is."""
        with self.guard:
            state = self._state_of(encoder)
            if state is not None and not state.running:
                state.running = True
                self.failed = ""
                return state
        return None

    def now(self) -> float:
        return self.writer.now() if self.writer is not None else 0.0

    def put(self, record: Record) -> None:
        if self.writer is not None:
            self.writer.put(record)

    def where(self) -> str:
        if self._over or self.writer is None:
            return self._over or "not begun: no encoder call yet"
        folder = self.writer.folder
        return f"ended: {folder}" if self.writer.ended else str(self.writer.output.file or folder)

    def close(self, stopped: str) -> None:
        """The process goes on without a trace."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        for state in self._encoders.values():
            state.leave_ddp()
        if self.writer is not None:
            self.writer.close(_CLOSE_LIMIT, Stopped(self.writer.now(), stopped))

    def process_ends(self, exit_code: int | None = None) -> None:
        if (writer := self.writer) is not None and not writer.ended:
            error, code = exit_in_flight()
            if error is not None:
                self.note_failed(error)
            if self._uncaught and exit_code is None:
                exit_code = code or 1
            writer.close(_CLOSE_LIMIT, End(writer.now(), self.failed, code if exit_code is None else exit_code))

    def trainer_failed(self, error: BaseException) -> None:
        """An exception has come out of Lightning's trainer, perhaps before the first encoder call."""
        with self.guard:
            if self.writer is None and not self._over:
                self._open(_process_group())
            self.note_failed(error)

    def note_failed(self, error: BaseException, thread: str = "") -> None:
        """An exception that nobody catches in this thread; without a name: it ends the process, as far as is known."""
        said = first_line(error)
        if not thread:
            if said == self.failed:
                return  # the trainer's callback has told of it, and now the interpreter does
            self.failed = said
        self.put(records.failed(self.now(), thread, error))

    def end(self, level: int, why: str) -> None:
        """Record nothing any more, and say why."""
        if not self._over:
            self._over = why
            report(level, f"tracing has ended: {why}")
            self.close(why)

    def count_call(self, device: torch.device | None) -> None:
        self._device = device
        if self._calls % MEMORY_EVERY_CALLS == 0:
            self._put_memory()
        self._calls += 1

    def put_lengths(self, lengths: torch.Tensor | None, state: EncoderState, t: float) -> None:
        if (writer := self.writer) is None or (read := self._copies.begin(lengths)) is None:
            return
        e, n = state.e, state.number

        def record() -> Lengths | None:
            found = read()
            return Lengths(t, e, n, *found) if found is not None else None

        writer.put_later(record)

    def _put_memory(self) -> None:
        if (writer := self.writer) is not None:
            t, device = writer.now(), self._device  # now: the file's records are in the order of their times
            writer.put_later(lambda: _memory(t, device))

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """For the event bus; our errors end the trace."""
        handlers: dict[type, Callable[[Any], None]] = {
            CallLeft: self.call_left,
            Grown: self.grown,
            StallReported: self.stall_reported,
            JobStalled: self.job_stalled,
            StallExits: lambda _: self.process_ends(EXIT_CODE),
        }
        return {kind: self._guarded(handle) for kind, handle in handlers.items()}

    def _guarded(self, handle: Callable[[Any], None]) -> Callable[[Any], None]:
        def guarded(event: object) -> None:
            with self.guard:
                handle(event)

        return guarded

    def _guarded_failed(self, error: BaseException, thread: str) -> None:
        with self.guard:
            self._uncaught |= not thread
            self.note_failed(error, thread)

    def stall_reported(self, event: StallReported) -> None:
        ranks, kinds, where = _of_each(event.missing)
        collectives = [rank.collective for rank in event.missing]
        self.put(Missing(self.now(), event.encoder, event.call, ranks, kinds, where, event.unknown, collectives))

    def job_stalled(self, event: JobStalled) -> None:
        waited = event.level >= logging.WARNING
        self.put(Stalled(self.now(), *_of_each(event.missing if waited else ()), event.text, waited))
        self._put_memory()  # a GPU that waits in a collective is busy, one that nobody gives work is not

    def call_left(self, event: CallLeft) -> None:
        state = self._state_of(event.encoder)
        if not event.outcome or state is None:
            return
        if not state.running:  # a compiled call, or a class whose forward does not call its parent's
            state.number += 1
        if state.name != event.sync.title:  # it counts the encoders of this process group
            state.name = event.sync.title
            self._describe(event.encoder, state)
        self.put(
            records.Sync(
                t=self.now(),
                e=state.e,
                n=state.number,
                outcome=event.outcome,
                round=event.round,
                waited=round(event.waited.total_seconds(), 6),
                local=event.local,
                result=event.result,
            )
        )

    def grown(self, event: Grown) -> None:
        state = self._state_of(event.encoder)
        if state is not None:
            state.positions = event.new
            self.put(Grow(self.now(), state.e, state.number, event.old, event.new))
            self._describe(event.encoder, state)

    def _state_of(self, encoder: torch.nn.Module) -> EncoderState | None:
        if self._over or (self.writer is not None and self.writer.ended):
            return None
        group = _process_group()
        is_new = group is not None and (self._group is None or self._group() is not group)
        if (self.writer is None or is_new) and not self._open(group):
            return None
        state = self._encoders.get(encoder)
        if state is None:
            if vars(encoder).get("_is_replica"):
                self.end(logging.WARNING, "nn.DataParallel's replicas are not recorded")
                return None
            state = self._first_call(encoder)
        elif state.is_now_inside_ddp(encoder):
            self._describe(encoder, state)
        return state

    def _first_call(self, encoder: torch.nn.Module) -> EncoderState:
        name = type(encoder).__name__
        self._seen[name] += 1
        title = name if self._seen[name] == 1 else f"{name} #{self._seen[name]}"
        state = EncoderState(self._seen.total(), title, positions(encoder))
        state.is_now_inside_ddp(encoder)
        if self.settings.checks:
            state.checks = EncoderChecks(self.settings.checks, encoder)
        self._encoders[encoder] = state
        self._describe(encoder, state)
        return state

    def _describe(self, encoder: torch.nn.Module, state: EncoderState) -> None:
        self.put(state.facts(encoder, self.now()))

    def _open(self, group: Any) -> bool:
        """Begin a file, or another one where the process group has made this another rank."""
        if torch.utils.data.get_worker_info() is not None:
            self.end(logging.INFO, "a data loader's worker is not recorded")
            return False
        header = make_header(self.settings, length_sync.current(), round(time.time(), 6))
        self._group = weakref.ref(group) if group is not None else None
        if self.writer is not None:
            before = self.writer.output.header
            if (before.rank, before.world_size) == (header.rank, header.world_size):
                return True
            self.close(f"this process is rank {header.rank} of {header.world_size} from now on")
            self._encoders.clear()
            self._seen.clear()
        assert self.settings.folder is not None
        self.writer = TraceWriter(self.settings.folder, header)
        if self._hooks is None:
            self._hooks = ExceptionHooks(self._guarded_failed, threads=True)
        process_hooks.at_last(_close)
        return True


def _of_each(missing: tuple[MissingRank, ...]) -> tuple[list[int], list[str], list[str]]:
    return [rank.rank for rank in missing], [rank.kind for rank in missing], [rank.where for rank in missing]


def _process_group() -> Any:
    return torch.distributed.group.WORLD if torch.distributed.is_available() else None


class _Guard:
    """Around our own code on the training thread: its errors end the trace; others' pass."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = weakref.proxy(recorder)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, FindingError) or raised_by_signal_handler(error):
            return False
        self._recorder.end(logging.ERROR, f"an error of its own, please report it: {error!r}")
        return True


def _memory(t: float, device: torch.device | None) -> Memory:
    if device is None or device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return Memory(t, _resident(), None, None)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return Memory(t, _resident(), allocated, reserved, *_by_nvml(device))


def _by_nvml(device: torch.device) -> tuple[int | None, int | None]:
    """Bytes in use on a GPU, and its utilisation in percent; nvidia-ml-py need not be there."""
    try:
        return torch.cuda.device_memory_used(device), torch.cuda.utilization(device)
    except Exception as error:  # no nvidia-ml-py, no driver, a torch before 2.6, a container without NVML
        say_once(f"trace: GPU utilisation and all processes' GPU memory are not recorded: {first_line(error)}")
        return None, None


def _resident() -> int:
    """Bytes; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _close() -> None:
    if tracing.recorder is not None:
        tracing.recorder.process_ends()


def _in_forked_child() -> None:
    """The file is the parent's. A child that is a rank itself begins its own; a data loader's worker none."""
    recorder = tracing.recorder
    if recorder is not None:
        if recorder.writer is not None:
            recorder.writer.abandon()
        tracing.start(recorder.settings)


tracing = Tracing()
process_hooks.run(InForkedChild.TRACE, _in_forked_child)
