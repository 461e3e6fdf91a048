"""The replacement of a target's `forward` while NeMo is patched: a recorded encoder call, if a trace is on.

On the training thread: a few small objects for each call, one enqueue for each record, the text of an exception, and
what the user has asked for with checks.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any

import torch

from nemo_patches.sync.events import Grown
from nemo_patches.sync.rank_log import is_distributed
from nemo_patches.tracing import records
from nemo_patches.tracing.checks import FindingError, Found, Inputs, say_once
from nemo_patches.tracing.encoder_facts import first_layer, positions
from nemo_patches.tracing.encoder_state import EncoderState
from nemo_patches.tracing.recorder import Recorder, tracing
from nemo_patches.tracing.records import (
    BYPASS,
    PRE_ENCODE,
    Backward,
    BackwardEnded,
    Enter,
    FirstLayer,
    Leave,
    PreEncoded,
)
from nemo_patches.tracing.settings import RAISE
from nemo_patches.tracing.writer import TraceWriter

_SIGNALS, _LENGTHS = ("audio_signal", "features"), ("length", "features_length")
_numbers = itertools.count()


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
        recorder = tracing.recorder
        state = recorder.begin(self) if recorder is not None else None
        if recorder is None or state is None:
            return getattr(self, own_name)(*args, **kwargs)
        with _Call(recorder, self, state) as call:
            call.enter(_argument(signal_at, args, kwargs), _argument(lengths_at, args, kwargs), kwargs)
            output = getattr(self, own_name)(*args, **kwargs)
            call.leave(output)
        return output

    # Dynamo begins with what `forward` calls, as it would in stock; and it still looks through it from further out.
    _skip_frame(forward.__code__)  # type: ignore[attr-defined]  # wraps() gives it another type
    return own_name, forward


class _Call:
    """One encoder call: `enter`, the encoder, `leave`; as a context manager it sees exceptions and cleans up."""

    __slots__ = ("_began", "_encoder", "_hooks", "_inputs", "_recorder", "_state", "_writer")

    def __init__(self, recorder: Recorder, encoder: torch.nn.Module, state: EncoderState) -> None:
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
            t = now()
            put(
                Enter(
                    t=t,
                    e=state.e,
                    n=state.number,
                    training=self._encoder.training,
                    grad=torch.is_grad_enabled(),
                    shape=[] if signal is None else list(signal.shape),
                    dtype="" if signal is None else str(signal.dtype).removeprefix("torch."),
                    device="" if signal is None else str(signal.device),
                    in_ddp=state.in_ddp(),
                    lengths_shape=None if lengths is None else list(lengths.shape),
                    path=_path(self._encoder, keywords),
                    group=is_distributed(),
                    backwards=state.backwards,
                )
            )
            self._recorder.put_lengths(lengths, state, t)
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
            self._note_growth()
            self._put_leave(first if isinstance(first, torch.Tensor) else None)

    def _put_leave(self, output: torch.Tensor | None) -> None:
        node = output.grad_fn if output is not None and _is_watched(output) else None
        shape = list(output.shape) if output is not None else []
        t = self._writer.now()
        took = round(t - self._began, 6)
        self._writer.put(Leave(t, self._state.e, self._state.number, shape, took, graph=node is not None))
        if node is not None:
            node.register_prehook(_BackwardHook(self._recorder, self._writer, self._state).begun)

    def __enter__(self) -> _Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state.running = False
        with self._recorder.guard:
            for hook in self._hooks:
                hook.remove()
            if type(error).__name__ == _RECOMPUTED:
                self._put_leave(None)
            elif error is not None:
                self._writer.put(records.raised(self._writer.now(), self._state.e, self._state.number, error))

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
        now = positions(self._encoder)
        if now != self._state.positions:
            self._recorder.grown(Grown(self._encoder, self._state.positions, now))

    def _act_on(self, findings: list[Found]) -> None:
        for found in findings:
            finding = records.CheckFinding(
                self._writer.now(), self._state.e, self._state.number, found.check, found.text
            )
            self._writer.put(finding)
            assert self._state.checks is not None
            self._state.checks.say(self._state.name, self._state.number, found)
        if findings and self._recorder.settings.on_finding == RAISE:
            raise FindingError(
                f"{self._state.name}: call {self._state.number}: "
                + "; ".join(f"check {found.check}: {found.text}" for found in findings)
            )


class _BackwardHook:
    """On the graph's node that made a call's output. It holds no tensor, and changes no gradient."""

    __slots__ = ("_n", "_recorder", "_state", "_writer")

    def __init__(self, recorder: Recorder, writer: TraceWriter, state: EncoderState) -> None:
        self._recorder, self._writer, self._state, self._n = recorder, writer, state, state.number

    def begun(self, gradients: object) -> None:
        if torch.compiler.is_compiling():  # compiled autograd takes the hook into its graph
            return
        with self._recorder.guard:
            self._state.backwards += 1
            self._writer.put(Backward(self._writer.now(), self._state.e, self._n))
            self._queue(self._graph_done)

    def _graph_done(self) -> None:
        with self._recorder.guard:
            self._queue(self._ended)  # so it comes after those of DDP and FSDP, which wait for the other ranks there

    def _queue(self, callback: Callable[[], None]) -> None:
        """As DDP and FSDP learn of a backward's end; not called if the backward raises."""
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _ended(self) -> None:
        with self._recorder.guard:
            self._writer.put(BackwardEnded(self._writer.now(), self._state.e, self._n))


# torch.utils.checkpoint raises it through a forward that has recomputed all that backward needs.
_RECOMPUTED = "_StopRecomputationError"
_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def _is_watched(output: torch.Tensor) -> bool:
    """Whether a backward through this output would be seen. One within a backward is a checkpoint's, recomputed."""
    if output.grad_fn is None or _graph_task() != -1:
        return False
    if getattr(torch._dynamo.config, "compiled_autograd", False):  # not in torch before 2.4
        say_once("trace: backward is not recorded where torch compiles it")
        return False
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # run when torch compiles, not compiled
def _said_while_compiling() -> bool:
    _say_not_recorded()
    return True


@torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo would compile its frames
def _say_not_recorded() -> None:
    if tracing.recorder is not None:
        say_once(
            "trace: an encoder call that torch compiles, exports or traces is not recorded, but for its length sync"
        )


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


def _path(encoder: torch.nn.Module, keywords: dict[str, Any]) -> str:
    if encoder._modules.get("pre_encode") is None:
        return ""
    return BYPASS if keywords.get("bypass_pre_encode") else PRE_ENCODE


def _argument(place: tuple[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name, position = place
    return kwargs.get(name, args[position] if 0 <= position < len(args) else None)
