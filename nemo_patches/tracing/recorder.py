"""One trace of this process:
is told what the length sync does, and knows the encoders that it records.

On the training thread: one enqueue for each record. The rest is the writer's thread's.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from nemo_patches.channel import process_hooks
from nemo_patches.channel.process_hooks import InForkedChild
from nemo_patches.sync import length_sync
from nemo_patches.sync.encoder_rounds import CallLeft, Tracer, listeners
from nemo_patches.sync.rank_log import raised_by_signal_handler, report
from nemo_patches.sync.settings import Settings
from nemo_patches.text import first_line
from nemo_patches.tracing import records
from nemo_patches.tracing.checks import EncoderChecks
from nemo_patches.tracing.exception_hook import ExceptionHook, exit_in_flight
from nemo_patches.tracing.records import MOST_GROUPS, End, Grow, Stalled, Sync, Timed
from nemo_patches.tracing.trace_header import make_header
from nemo_patches.tracing.writer import TraceWriter

if TYPE_CHECKING:
    from nemo_patches.judging.missing_rank import MissingRank
    from nemo_patches.judging.rank_groups import RankGroup

_CLOSE_LIMIT = timedelta(seconds=2)


class Tracing:
    """Of this process: one trace at a time, or none."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def use(self, settings: Settings) -> None:
        """Trace with these settings; a trace of the same folder and checks goes on."""
        before = Settings() if self.recorder is None else self.recorder.settings
        if (before.trace, before.trace_checks) != (
            settings.trace,
            settings.trace_checks,
        ):
            self.start(settings)

    def start(self, settings: Settings) -> None:
        """Trace from the next encoder call on."""
        self.stop()
        self.recorder = Recorder(settings)
        listeners.tracer = self.recorder

    def stop(self) -> None:
        """End the trace, if there is one."""
        ending, self.recorder = self.recorder, None
        if ending is not None:
            listeners.tracer = Tracer()
            ending.close("revert(), or apply() with another trace")

    def where(self) -> str:
        """The file that is being written, or why there is none; empty where nothing is traced."""
        return self.recorder.where() if self.recorder is not None else ""


class EncoderState:
    """What a trace knows about an encoder. Written on the training thread."""

    def __init__(self, name: str, checks: EncoderChecks | None) -> None:
        self.name = name
        self.checks = checks
        self.number = 0  # of the last call
        self.running = False  # a recorded call is


class Recorder(Tracer):
    """One trace: its writer, from the first encoder call on, and its encoders.

    The length sync tells on the training thread, the watch on its own.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.guard = _Guard(self)
        self.writer: TraceWriter | None = None
        self.said_of_compilation = False
        self._over = ""  # why nothing is recorded any more
        # The process group that the header tells of.
        self._group: weakref.ref[Any] | None = None
        self._encoders: weakref.WeakKeyDictionary[torch.nn.Module, EncoderState] = (
            weakref.WeakKeyDictionary()
        )
        self._seen: Counter[str] = Counter()  # encoders without other ranks, by class
        self._hook: ExceptionHook | None = None
        # The exception that ends this process, unless an encoder is called again
        self._failed = ""
        # It came to the interpreter: then the exit code is known.
        self._uncaught = False

    def begin(self, encoder: torch.nn.Module) -> EncoderState | None:
        """A call begins; None where it is not recorded, or is part of one that is."""
        with self.guard:
            state = self._state_of(encoder)
            if state is not None and not state.running:
                state.running = True
                self._failed = ""
                return state
        return None

    def now(self) -> float:
        return self.writer.now() if self.writer is not None else 0.0

    def put(self, record: Timed) -> None:
        if self.writer is not None:
            self.writer.put(record)

    def where(self) -> str:
        if self._over or self.writer is None:
            return self._over or "not begun: no encoder call yet"
        folder = self.writer.folder
        return (
            f"ended: {folder}"
            if self.writer.ended
            else str(self.writer.output.file or folder)
        )

    def close(self, reason: str) -> None:
        """The process goes on without a trace."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self.writer is not None:
            self.writer.close(_CLOSE_LIMIT, End(self.now(), reason))

    def end(self, level: int, why: str) -> None:
        """Record nothing any more, and say why."""
        if not self._over:
            self._over = why
            report(level, f"tracing has ended: {why}")
            self.close(why)

    def process_ends(self, exit_code: int | None = None) -> None:
        writer = self.writer
        if writer is None or writer.ended:
            return
        error, code = exit_in_flight()
        if error is not None:
            self._note_failed(error)
        if self._uncaught:
            code = code or 1
        if exit_code is not None:
            code = exit_code
        writer.close(
            _CLOSE_LIMIT, End(writer.now(), error=self._failed, exit_code=code)
        )

    def trainer_failed(self, error: BaseException) -> None:
        """An exception has come out of Lightning's trainer, perhaps before the first encoder
        call.
        """
        with self.guard:
            if self.writer is None and not self._over:
                self._open(_process_group())
            self._note_failed(error)

    def _process_failed(self, error: BaseException) -> None:
        """Nobody catches it, and the process ends by it."""
        with self.guard:
            self._uncaught = True
            self._note_failed(error)

    def _note_failed(self, error: BaseException) -> None:
        said = first_line(error)
        # Else the trainer's callback has told of it, and now the interpreter does.
        if said != self._failed:
            self._failed = said
            self.put(records.raised_by(self.now(), "", 0, error))

    # What follows is told by the length sync, and by the watch.

    def call_left(self, call: CallLeft) -> None:
        with self.guard:
            state = self._state_of(call.encoder)
            if not call.outcome or state is None:
                return
            if not state.running:
                # A compiled call, or a class whose forward does not call its parent's.
                state.number += 1
            self.put(
                Sync(
                    t=self.now(),
                    e=state.name,
                    n=state.number,
                    outcome=call.outcome,
                    round=call.round,
                    waited=round(call.waited.total_seconds(), 6),
                    local=call.local,
                    result=call.result,
                )
            )

    def encoder_grew(self, encoder: torch.nn.Module, old: int, new: int) -> None:
        with self.guard:
            state = self._state_of(encoder)
            if state is not None:
                self.put(Grow(self.now(), state.name, state.number, old, new))

    def stall_reported(
        self,
        missing: tuple[MissingRank, ...],
        text: str,
        encoder: str = "",
        call: int = 0,
        waited: bool = False,
        groups: tuple[RankGroup, ...] = (),
    ) -> None:
        with self.guard:
            if len(groups) > MOST_GROUPS:
                groups = ()  # else the record is longer than what reads it takes
            stalled = Stalled(
                t=self.now(),
                e=encoder,
                n=call,
                ranks=[rank.rank for rank in missing],
                kinds=[rank.kind for rank in missing],
                where=[rank.where for rank in missing],
                collectives=[rank.collective for rank in missing],
                text=text,
                waited=waited,
                groups=[group.to_json() for group in groups],
            )
            self.put(stalled)

    def process_exits(self, code: int) -> None:
        with self.guard:
            self.process_ends(code)

    def _state_of(self, encoder: torch.nn.Module) -> EncoderState | None:
        if self._over or (self.writer is not None and self.writer.ended):
            return None
        group = _process_group()
        is_new = group is not None and (
            self._group is None or self._group() is not group
        )
        if (self.writer is None or is_new) and not self._open(group):
            return None
        state = self._encoders.get(encoder)
        if state is not None:
            return state
        if vars(encoder).get("_is_replica"):
            self.end(logging.WARNING, "nn.DataParallel's replicas are not recorded")
            return None
        title = self._title(encoder)
        words = self.settings.trace_checks
        state = EncoderState(
            title, EncoderChecks(words, encoder, title) if words else None
        )
        self._encoders[encoder] = state
        return state

    def _title(self, encoder: torch.nn.Module) -> str:
        """As stall reports name it, and all ranks do; this call is about to ask for its sync
        anyway.
        """
        if (sync := length_sync.sync_of(encoder)) is not None:
            return sync.title
        name = type(encoder).__name__
        self._seen[name] += 1
        return name if self._seen[name] == 1 else f"{name} #{self._seen[name]}"

    def _open(self, group: Any) -> bool:
        """Begin a file, or another one where the process group has made this another rank."""
        if torch.utils.data.get_worker_info() is not None:
            self.end(logging.INFO, "a data loader's worker is not recorded")
            return False
        header = make_header(
            length_sync.current(), self.settings.trace_checks, round(time.time(), 6)
        )
        self._group = weakref.ref(group) if group is not None else None
        if self.writer is not None:
            before = self.writer.output.header
            if (before.rank, before.world_size) == (header.rank, header.world_size):
                return True
            self.close(
                f"this process is rank {header.rank} of {header.world_size} from now on"
            )
            self._encoders.clear()
            self._seen.clear()
        assert self.settings.trace is not None
        self.writer = TraceWriter(self.settings.trace, header)
        if self._hook is None:
            self._hook = ExceptionHook(self._process_failed)
        process_hooks.at_last(_close)
        return True


def _process_group() -> Any:
    return torch.distributed.group.WORLD if torch.distributed.is_available() else None


class _Guard:
    """Around our own code on the training thread: its errors end the trace; others' pass."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = weakref.proxy(recorder)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception) or raised_by_signal_handler(error):
            return False
        self._recorder.end(
            logging.ERROR, f"an error of its own, please report it: {error!r}"
        )
        return True


def _close() -> None:
    if tracing.recorder is not None:
        tracing.recorder.process_ends()


def _in_forked_child() -> None:
    """The file is the parent's. A child that is a rank itself begins its own; a data loader's
    worker none.
    """
    recorder = tracing.recorder
    if recorder is not None:
        if recorder.writer is not None:
            recorder.writer.abandon()
        tracing.start(recorder.settings)


tracing = Tracing()
process_hooks.run(InForkedChild.TRACE, _in_forked_child)
