"""Records this process's encoder calls while a trace is on: what stands in for a target's `forward`, and the observer.

On the training thread: a few small objects for each call, one enqueue for each record, once per encoder a walk through
its modules, the text of an exception, and what the user has asked for with checks. The rest is the writer's thread's.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import multiprocessing.util
import os
import platform
import socket
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import torch

from nemo_patches.stall.heartbeats import MissingRank
from nemo_patches.sync import __version__, length_sync
from nemo_patches.sync import events as activity
from nemo_patches.sync.events import Synced
from nemo_patches.sync.rank_log import raised_by_signal_handler, report
from nemo_patches.sync.settings import Settings
from nemo_patches.tracing import records
from nemo_patches.tracing.checks import EncoderChecks, FindingError, Found, Inputs, say_once
from nemo_patches.tracing.encoder_facts import active_ddp, facts, first_layer
from nemo_patches.tracing.records import Enter, FirstLayer, Grow, Header, Leave, Memory, PreEncoded, Raised
from nemo_patches.tracing.settings import RAISE, TRACE, TRACE_CHECKS, TRACE_SIZE, TraceSettings
from nemo_patches.tracing.writer import TraceWriter

MEMORY_EVERY = 50  # calls
_LONGEST_MESSAGE, _LONGEST_TRACEBACK = 2_000, 8_000  # characters
_CLOSE_LIMIT = timedelta(seconds=2)
_SIGNALS, _LENGTHS = ("audio_signal", "features"), ("length", "features_length")


def start(settings: TraceSettings) -> None:
    """Trace from the next encoder call on; one trace at a time."""
    global _recorder
    stop()
    activity.observer = _recorder = Recorder(settings)


def stop() -> None:
    """End the trace, if there is one."""
    global _recorder
    ending, _recorder = _recorder, None
    if ending is not None:
        if activity.observer is ending:
            activity.observer = None
        ending.close("revert(), or apply() with another trace")


def length_sync_changed(settings: Settings) -> None:
    """The length sync has other settings from now on; the headers of later parts have them."""
    if _recorder is not None and (writer := _recorder.writer) is not None:
        writer.header = _header(_recorder.settings, settings, writer.header.started)


def settings_in_force() -> TraceSettings:
    return _recorder.settings if _recorder is not None else TraceSettings()


def where() -> str:
    """The file that is being written, or why there is none; empty where nothing is traced."""
    return _recorder.where() if _recorder is not None else ""


def recorded(original: Any) -> tuple[str, Callable[..., Any]]:
    """`forward` of a target class, recorded; it gives what `original` gives and raises what it raises.

    original: as it is in the class: a function, or NeMo's decorated one. The class must have it under the name that is
    returned, too: only so does torch.compile take it as it takes stock's. Without a trace, and where torch compiles,
    exports or traces, nothing else runs.
    """
    own_name = f"_nemo_patches_forward_{next(_numbers)}"  # ours may be inside somebody's wrapper, and that inside ours
    names = list(inspect.signature(original).parameters)
    signal_at, lengths_at = _place_of(_SIGNALS, names), _place_of(_LENGTHS, names)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _said_while_compiling()
            return getattr(self, own_name)(*args, **kwargs)
        if _compiles_frames() or torch.jit.is_tracing():  # type: ignore[no-untyped-call]
            _say_not_recorded()
            return getattr(self, own_name)(*args, **kwargs)
        recorder = _recorder
        call = recorder.begin(self) if recorder is not None else None
        if call is None:
            return getattr(self, own_name)(*args, **kwargs)
        with call:
            call.enter(_argument(signal_at, args, kwargs), _argument(lengths_at, args, kwargs), kwargs)
            output = getattr(self, own_name)(*args, **kwargs)
            call.leave(output)
        return output

    # Dynamo begins with what `forward` calls, as it would in stock; and it still looks through it from further out.
    _skip_frame(forward.__code__)  # type: ignore[attr-defined]  # wraps() gives it another type
    return own_name, forward


class Recorder:
    """One trace of this process: its writer, from the first encoder call on, and what it knows of the encoders."""

    def __init__(self, settings: TraceSettings) -> None:
        self.settings = settings
        self.guard = _Guard(self)
        self.writer: TraceWriter | None = None
        self._over = ""  # why nothing is recorded any more
        self._group: weakref.ref[Any] | None = None  # the process group that the file's header tells of
        self._encoders: weakref.WeakKeyDictionary[torch.nn.Module, _EncoderState] = weakref.WeakKeyDictionary()
        self._seen: Counter[str] = Counter()
        self._calls = 0

    def begin(self, encoder: torch.nn.Module) -> _Call | None:
        """The recording of a call that begins; None where it is not recorded, or is part of one that is."""
        state = None
        with self.guard:
            state = self._state_of(encoder)
            if state is not None and state.call is None:
                state.call = _Call(self, encoder, state)
                return state.call
        return None

    def where(self) -> str:
        if self._over or self.writer is None:
            return self._over or "not begun: no encoder call yet"
        return f"ended: {self.writer.folder}" if self.writer.ended else str(self.writer.file or self.writer.folder)

    def close(self, stopped: str = "") -> None:
        if self.writer is not None:
            self.writer.close(_CLOSE_LIMIT, stopped)

    def end(self, level: int, why: str) -> None:
        """Record nothing any more, and say why."""
        if not self._over:
            self._over = why
            report(level, f"tracing has ended: {why}")
            self.close(why)

    def count_call(self, device: torch.device | None) -> None:
        if self._calls % MEMORY_EVERY == 0 and (writer := self.writer) is not None:
            t = writer.now()  # of the call: the file's records are in the order of their times
            writer.put_later(lambda: _memory(t, device))
        self._calls += 1

    # The observer's side: the length sync's news, and the stall monitor's, from its thread.

    def length_synced(self, encoder: torch.nn.Module, title: str, synced: Synced) -> None:
        with self.guard:
            self._length_synced(encoder, title, synced)

    def grown(self, encoder: torch.nn.Module, old: int, new: int) -> None:
        with self.guard:
            self._grown(encoder, old, new)

    def stalled(self, title: str, call: int, missing: tuple[MissingRank, ...], unknown: str) -> None:
        with self.guard:
            if (writer := self.writer) is not None:
                ranks, kinds, where = ([getattr(one, name) for one in missing] for name in ("rank", "kind", "where"))
                writer.put(records.Missing(writer.now(), title, call, ranks, kinds, where, unknown))

    def _length_synced(self, encoder: torch.nn.Module, title: str, synced: Synced) -> None:
        state = self._state_of(encoder)
        if state is None or (writer := self.writer) is None:
            return
        if state.call is None:  # a compiled call, or a class whose forward does not call its parent's
            state.number += 1
        if state.name != title:
            state.name = title
            self._describe(encoder, state)
        writer.put(records.Sync(writer.now(), state.e, state.number, *synced._replace(waited=round(synced.waited, 6))))

    def _grown(self, encoder: torch.nn.Module, old: int, new: int) -> None:
        state = self._state_of(encoder)
        if state is None or (writer := self.writer) is None:
            return
        state.positions = new
        writer.put(Grow(writer.now(), state.e, state.number, old, new))
        self._describe(encoder, state)

    def _state_of(self, encoder: torch.nn.Module) -> _EncoderState | None:
        if self._over or (self.writer is not None and self.writer.ended):
            return None
        group = torch.distributed.group.WORLD if torch.distributed.is_available() else None
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

    def _first_call(self, encoder: torch.nn.Module) -> _EncoderState:
        sync = length_sync.sync_of(encoder)
        name = type(encoder).__name__
        self._seen[name] += 1
        title = sync.title if sync else name if self._seen[name] == 1 else f"{name} #{self._seen[name]}"
        state = _EncoderState(self._seen.total(), title, _positions(encoder))
        state.is_now_inside_ddp(encoder)
        if self.settings.checks:
            state.checks = EncoderChecks(self.settings.checks, encoder)
        self._encoders[encoder] = state
        self._describe(encoder, state)
        return state

    def _describe(self, encoder: torch.nn.Module, state: _EncoderState) -> None:
        if (writer := self.writer) is not None:
            writer.put(facts(encoder, writer.now(), state.e, state.name, state.ddp))

    def _open(self, group: Any) -> bool:
        """Begin a file, or another one where the process group has made this another rank."""
        if torch.utils.data.get_worker_info() is not None:
            self.end(logging.INFO, "a data loader's worker is not recorded")
            return False
        header = _header(self.settings, length_sync.current(), round(time.time(), 6))
        self._group = weakref.ref(group) if group is not None else None
        if self.writer is not None:
            if (self.writer.header.rank, self.writer.header.world_size) == (header.rank, header.world_size):
                return True
            self.close(f"this process is rank {header.rank} of {header.world_size} from now on")
            self._encoders.clear()
            self._seen.clear()
        assert self.settings.folder is not None
        self.writer = TraceWriter(self.settings.folder, header)
        # Not atexit: a process that multiprocessing has forked leaves without it. At an interpreter's exit this comes
        # after the stall monitor's last words, since torch imports multiprocessing before there is a stall monitor.
        multiprocessing.util.Finalize(None, _close, exitpriority=0)
        return True


class _EncoderState:
    """What the recorder knows of one encoder."""

    __slots__ = ("call", "checks", "ddp", "e", "name", "number", "positions", "searched")

    def __init__(self, e: int, name: str, positions: int) -> None:
        self.e, self.name, self.positions = e, name, positions
        self.number = 0  # of the last call
        self.call: _Call | None = None  # the one that runs
        self.checks: EncoderChecks | None = None
        self.ddp = False
        self.searched: weakref.ref[torch.nn.Module] | None = None

    def is_now_inside_ddp(self, encoder: torch.nn.Module) -> bool:
        """Whether this is the first call seen within a DistributedDataParallel's forward. Each is searched once."""
        active = active_ddp()
        if self.ddp or active is None or (self.searched is not None and self.searched() is active):
            return False
        self.searched = weakref.ref(active)
        self.ddp = any(module is encoder for module in active.modules())
        return self.ddp


class _Call:
    """One encoder call: `enter`, the encoder, `leave`; as a context manager it sees exceptions and cleans up."""

    __slots__ = ("_began", "_encoder", "_hooks", "_inputs", "_recorder", "_state", "_writer")

    def __init__(self, recorder: Recorder, encoder: torch.nn.Module, state: _EncoderState) -> None:
        self._recorder, self._encoder, self._state = recorder, encoder, state
        assert recorder.writer is not None  # there is a state
        self._writer = recorder.writer
        self._began = 0.0
        self._hooks: list[Any] = []
        self._inputs = Inputs(None, None, None)

    def enter(self, signal: Any, lengths: Any, keywords: dict[str, Any]) -> None:
        state, put, now = self._state, self._writer.put, self._writer.now
        with self._recorder.guard:
            state.number += 1
            signal = signal if isinstance(signal, torch.Tensor) else None
            lengths = lengths if isinstance(lengths, torch.Tensor) else None
            put(
                Enter(
                    t=now(),
                    e=state.e,
                    n=state.number,
                    training=self._encoder.training,
                    grad=torch.is_grad_enabled(),
                    shape=[] if signal is None else list(signal.shape),
                    dtype="" if signal is None else str(signal.dtype).removeprefix("torch."),
                    device="" if signal is None else str(signal.device),
                    lengths=_shortest_and_longest(lengths),
                )
            )
            self._recorder.count_call(None if signal is None else signal.device)
            if state.checks is not None:
                axis = 1 if keywords.get("bypass_pre_encode") else -1
                frames = signal.shape[axis] if signal is not None and signal.ndim > 1 else None
                self._inputs = Inputs(signal, lengths, frames)
                self._act_on(state.checks.before(self._inputs))
            self._hook(self._encoder._modules.get("pre_encode"), PreEncoded)
            self._hook(first_layer(self._encoder), FirstLayer)
            self._began = now()

    def leave(self, output: Any) -> None:
        with self._recorder.guard:
            if self._state.checks is not None:
                self._act_on(self._state.checks.after(self._inputs))
            first = output[0] if isinstance(output, tuple | list) and output else output
            shape = list(first.shape) if isinstance(first, torch.Tensor) else []
            self._note_growth()
            t = self._writer.now()
            took = round(t - self._began, 6)
            self._writer.put(Leave(t, self._state.e, self._state.number, shape, took))

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state.call = None
        with self._recorder.guard:
            for hook in self._hooks:
                hook.remove()
            if error is not None:
                text = "".join(traceback.format_exception(kind, error, trace))
                self._writer.put(
                    Raised(
                        t=self._writer.now(),
                        e=self._state.e,
                        n=self._state.number,
                        type=type(error).__name__,
                        message=str(error)[:_LONGEST_MESSAGE],
                        traceback=text[-_LONGEST_TRACEBACK:],
                    )
                )

    def _hook(self, module: torch.nn.Module | None, kind: type[PreEncoded] | type[FirstLayer]) -> None:
        if module is None:
            return
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            what = "pre_encode" if kind is PreEncoded else "the first layer"
            say_once(f"trace: when {what} is done is not recorded: it is compiled, and would be compiled anew for that")
            return

        def reached(*_: object) -> None:
            with self._recorder.guard:
                self._note_growth()
                self._writer.put(kind(self._writer.now(), self._state.e, self._state.number))

        self._hooks.append(module.register_forward_hook(reached))

    def _note_growth(self) -> None:
        """Growth that the length sync did not tell of: without a process group, or from elsewhere."""
        positions = _positions(self._encoder)
        if positions != self._state.positions:
            self._recorder.grown(self._encoder, self._state.positions, positions)

    def _act_on(self, findings: list[Found]) -> None:
        for found in findings:
            finding = records.Finding(self._writer.now(), self._state.e, self._state.number, found.check, found.text)
            self._writer.put(finding)
            assert self._state.checks is not None
            self._state.checks.say(self._state.name, self._state.number, found)
        if findings and self._recorder.settings.on_finding == RAISE:
            raise FindingError(
                f"{self._state.name}: call {self._state.number}: "
                + "; ".join(f"check {found.check}: {found.text}" for found in findings)
            )


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


_recorder: Recorder | None = None
_numbers = itertools.count()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # run when torch compiles, not compiled
def _said_while_compiling() -> bool:
    _say_not_recorded()
    return True


@torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo would compile its frames
def _say_not_recorded() -> None:
    global _said
    if _recorder is not None and not _said:
        _said = True
        report(
            logging.INFO,
            "trace: an encoder call that torch compiles, exports or traces is not recorded, but for its length sync",
        )


_said = False

# In neither torch's documentation nor its public names, so a torch without them must do: then a compiled encoder's
# graphs are cut at `forward`.
_skip_frame: Callable[[CodeType], object] = getattr(torch._dynamo.eval_frame, "skip_code", lambda code: None)
_callback: Callable[[], object] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


def _compiles_frames() -> bool:
    """Whether Dynamo takes the Python frames of this thread, although not this one."""
    return _callback() is not None


def _place_of(known: tuple[str, ...], names: list[str]) -> tuple[str, int]:
    """The name of an argument, and its position after `self`; -1 where forward has none of the known."""
    return next(((name, names.index(name) - 1) for name in known if name in names), (known[0], -1))


def _argument(place: tuple[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name, position = place
    return kwargs.get(name, args[position] if 0 <= position < len(args) else None)


def _shortest_and_longest(lengths: torch.Tensor | None) -> list[int] | None:
    # A subclass may have no values at all (FakeTensor).
    if lengths is None or type(lengths) is not torch.Tensor or lengths.device.type != "cpu" or not lengths.numel():
        return None
    values = lengths.flatten().tolist()
    return [int(min(values)), int(max(values))]


def _positions(encoder: torch.nn.Module) -> int:
    return int(getattr(encoder, "max_audio_length", 0))


def _memory(t: float, device: torch.device | None) -> Memory:
    allocated = reserved = None
    if device is not None and device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return Memory(t, _resident(), allocated, reserved)


def _resident() -> int:
    """Bytes; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _header(trace: TraceSettings, settings: Settings, started: float) -> Header:
    rank, size = _rank_and_size()
    return Header(
        format=records.FORMAT,
        rank=rank,
        world_size=size,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=started,
        part=0,
        restart=_number("TORCHELASTIC_RESTART_COUNT") or 0,
        bound=trace.bound,
        versions=_versions(),
        # Of the trace's settings, the size and the checks have fields of their own.
        settings={
            setting.name: setting.text(value)
            for setting, value in (*settings.items(), *trace.items())
            if setting not in (TRACE, TRACE_SIZE, TRACE_CHECKS)
        },
        checks=list(trace.checks),
    )


def _rank_and_size() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank = next((found for name in ("RANK", "SLURM_PROCID") if (found := _number(name)) is not None), 0)
    size = next((found for name in ("WORLD_SIZE", "SLURM_NTASKS") if (found := _number(name)) is not None), 1)
    return rank, size


def _number(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else None


def _versions() -> dict[str, str]:
    found = {"nemo_patches": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in ("nemo", "lightning"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "?"))
    return found


def _close() -> None:
    if _recorder is not None:
        _recorder.close()


def _in_forked_child() -> None:
    """The file is the parent's. A child that is a rank itself begins its own; a data loader's worker none."""
    if _recorder is not None:
        if _recorder.writer is not None:
            _recorder.writer.abandon()
        start(_recorder.settings)


os.register_at_fork(after_in_child=_in_forked_child)
