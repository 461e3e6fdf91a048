"""The replacement of a target's `forward` while a trace is on: a recorded encoder call.

On the training thread: a few small objects for each call, one enqueue for each record, the text of
an exception, and what the user has asked for with checks.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any

import torch

from nemo_patches.sync.rank_log import report
from nemo_patches.tracing import records
from nemo_patches.tracing.checks import EncoderInputs
from nemo_patches.tracing.recorder import EncoderState, Recorder, tracing
from nemo_patches.tracing.records import Enter, Leave

_SIGNALS = ("audio_signal", "features")
_LENGTHS = ("length", "features_length")
# torch.utils.checkpoint raises it through a forward that has recomputed all that backward needs.
_RECOMPUTED = "_StopRecomputationError"
_numbers = itertools.count()


def record_forward(original: Any) -> tuple[str, Callable[..., Any]]:
    """`forward` of a target class, recorded; it gives what `original` gives and raises what it
    raises.

    original: as it is in the class: a function, or NeMo's decorated one. The class must have it
    under the name that is returned, too: only so does torch.compile take it as it takes stock's.
    Without a trace, and where torch compiles, exports or traces, nothing else runs.
    """
    # Ours may be inside somebody's wrapper, and that inside ours
    own_name = f"_nemo_patches_forward_{next(_numbers)}"
    names = list(inspect.signature(original).parameters)
    signal_at = _place_of(_SIGNALS, names)
    lengths_at = _place_of(_LENGTHS, names)

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
        with _Call(recorder, state) as call:
            signal = _argument(signal_at, args, kwargs)
            lengths = _argument(lengths_at, args, kwargs)
            call.enter(
                self.training, signal, lengths, bool(kwargs.get("bypass_pre_encode"))
            )
            output = getattr(self, own_name)(*args, **kwargs)
            call.leave(output)
        return output

    # Dynamo begins with what `forward` calls, as it would in stock; and it still looks through it
    # from further out.
    _skip_frame(forward.__code__)  # type: ignore[attr-defined]  # wraps() gives it another type
    return own_name, forward


class _Call:
    """One encoder call: `enter`, the encoder, `leave`; as a context manager it sees exceptions and
    cleans up.
    """

    __slots__ = ("_inputs", "_recorder", "_state")

    def __init__(self, recorder: Recorder, state: EncoderState) -> None:
        self._recorder = recorder
        self._state = state
        self._inputs = EncoderInputs(None, None, None)

    def enter(self, training: bool, signal: Any, lengths: Any, bypasses: bool) -> None:
        """bypasses: the signal is what pre_encode would give, with its frames in the middle."""
        state = self._state
        with self._recorder.guard:
            state.number += 1
            signal = signal if isinstance(signal, torch.Tensor) else None
            self._recorder.put(
                Enter(
                    t=self._recorder.now(),
                    e=state.name,
                    n=state.number,
                    training=training,
                    shape=[] if signal is None else list(signal.shape),
                    dtype=""
                    if signal is None
                    else str(signal.dtype).removeprefix("torch."),
                    device="" if signal is None else str(signal.device),
                )
            )
            if state.checks is not None:
                lengths = lengths if isinstance(lengths, torch.Tensor) else None
                has_frames = signal is not None and signal.ndim > 1
                frames = signal.shape[1 if bypasses else -1] if has_frames else None
                self._inputs = EncoderInputs(signal, lengths, frames)
                state.checks.before(self._inputs, state.number)

    def leave(self, output: Any) -> None:
        with self._recorder.guard:
            if self._state.checks is not None:
                self._state.checks.after(self._inputs, self._state.number)
            first = output[0] if isinstance(output, tuple | list) and output else output
            self._put_leave(
                list(first.shape) if isinstance(first, torch.Tensor) else []
            )

    def __enter__(self) -> _Call:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        state = self._state
        state.running = False
        if error is None:
            return
        with self._recorder.guard:
            if type(error).__name__ == _RECOMPUTED:
                self._put_leave([])
            else:
                self._recorder.put(
                    records.raised_by(
                        self._recorder.now(), state.name, state.number, error
                    )
                )

    def _put_leave(self, shape: list[int]) -> None:
        self._recorder.put(
            Leave(self._recorder.now(), self._state.name, self._state.number, shape)
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # run when torch compiles, not compiled
def _said_while_compiling() -> bool:
    _say_not_recorded()
    return True


@torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo would compile its frames
def _say_not_recorded() -> None:
    if tracing.recorder is not None and not tracing.recorder.said_of_compilation:
        tracing.recorder.said_of_compilation = True
        what = "an encoder call that torch compiles, exports or traces"
        report(logging.INFO, f"trace: {what} is not recorded, but for its length sync")


# In neither torch's documentation nor its public names, so a torch without them must do: then a
# compiled encoder's graphs are cut at `forward`.
_skip_frame: Callable[[CodeType], object] = getattr(
    torch._dynamo.eval_frame, "skip_code", lambda code: None
)
_callback: Callable[[], object] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None
)


def _compiles_frames() -> bool:
    """Whether Dynamo takes the Python frames of this thread, although not this one."""
    return _callback() is not None


def _place_of(known: tuple[str, ...], names: list[str]) -> tuple[str, int]:
    """The name of an argument, and its position after `self`; -1 where forward has none of the
    known.
    """
    return next(
        ((name, names.index(name) - 1) for name in known if name in names),
        (known[0], -1),
    )


def _argument(
    place: tuple[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    name, position = place
    return kwargs.get(name, args[position] if 0 <= position < len(args) else None)
