"""What stands in for an encoder's methods: the bounded sync for the reduce, and growth for this process only.

NeMo registers positional encodings and the like as buffers, and replaces them by larger ones. DDP collects buffers anew
at every forward and broadcasts rank 0's (pytorch issue 63916): unequal sizes overwrite other rows and other buffers. So
what has grown goes into the module's `__dict__`, which Python reads before its buffers; they keep the shape they had.

Plain functions: torch.compile traces through them, and breaks the graph at an object that it does not know (wrapt's).
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copyreg
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch

from .events import Grown, GrowthBegan, bus
from .length_sync import synced_length
from .rank_log import is_distributed, report

Method = Callable[..., None]

LENGTH_SIZED = ("pe", "seq_range")  # buffers of Conformer and its likes; of Squeezeformer, ConvASR, punctuation


class Growth:
    """What has grown privately in this process."""

    def __init__(self) -> None:
        self.happened = False  # whether any buffer has
        self.names = set(LENGTH_SIZED)  # of buffers that are private where they have grown; by their shape, others'
        self.same_shape: set[str] = set()  # buffers that a growth has given other values alone: said
        self.unregistered: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # NeMo would have registered theirs
        self.growing: set[int] = set()  # encoders inside _run_privately, by id


growth = Growth()


def bounded(original: Method, grow: Method, in_force: Callable[[], bool]) -> Method:
    """`update_max_seq_length(self, seq_length, device)` with the bounded sync in place of the reduce.

    original: NeMo's own method, which runs where there is no process group. grow: the same without its reduce, which
    runs where the agreed length is more than the encoder's `max_audio_length`. in_force: false after a revert.
    """

    @functools.wraps(original)
    def update(self: Any, seq_length: int, device: torch.device) -> None:
        if in_force() and is_distributed():
            _sync_and_grow(self, grow, seq_length, device)
        elif growth.happened:  # the process group is gone, or hidden for a while: what is private must stay so
            _run_privately(self, original, seq_length, device)
        else:
            original(self, seq_length, device)

    return update


def private_setter(original: Method, in_force: Callable[[], bool]) -> Method:
    """`set_max_audio_length(self, max_audio_length)`, which others than the sync call too, with private growth."""

    @functools.wraps(original)
    def set_max_audio_length(self: Any, max_audio_length: int) -> None:
        if growth.happened or (in_force() and is_distributed()):
            _run_privately(self, original, max_audio_length, register_new=True)
        else:
            original(self, max_audio_length)

    return set_max_audio_length


def following_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Module._apply(self, fn, ...)`, behind .to(), .half() and the like, with the private tensors taken along."""

    @functools.wraps(original)
    def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        recursive = kwargs.get("recurse", args[0] if args else True)  # to_empty() may leave the children alone
        modules = self.modules() if recursive else [self]
        grown = [(module, name, vars(module)[name]) for module, name in _places(modules) if name in vars(module)]
        result = original(self, fn, *args, **kwargs)
        for module, name, tensor in grown:
            if module.__dict__.get(name) is tensor and isinstance(tensor, torch.Tensor):  # not done by a nested encoder
                module.__dict__[name] = fn(tensor)
        return result

    return _apply


def reduce_as_registered(module: torch.nn.Module) -> tuple[Any, ...]:
    """How a module with a private tensor is pickled: with that tensor in the buffer, as stock's would be.

    A process without nemo_patches, which may load it, grows the buffer and would go on reading a private tensor. A
    copy (copy.deepcopy comes here too) stays in this process, and keeps its buffer's shape like the original.
    """
    function, arguments, state, *rest = cast("tuple[Any, ...]", module.__reduce_ex__(4))
    if sys._getframe(1).f_globals.get("__name__") == "copy":
        return (function, arguments, state, *rest)
    state = {**state, "_buffers": dict(state["_buffers"])}
    for name in growth.names:
        if name in state and name in state["_buffers"]:
            state["_buffers"][name] = state.pop(name)
    return (function, arguments, state, *rest)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile runs it as it is, like stock's reduce
def _sync_and_grow(encoder: Any, grow: Method, seq_length: int, device: torch.device) -> None:
    length, before = synced_length(encoder, seq_length), encoder.max_audio_length
    if length > before:
        bus.publish(GrowthBegan(encoder))
        _run_privately(encoder, grow, length, device)
        bus.publish(Grown(encoder, before, encoder.max_audio_length))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_privately(encoder: Any, method: Method, *arguments: Any, register_new: bool = False) -> None:
    """Let NeMo's own code grow the encoder's length-sized buffers, and see them as in stock; then make that private.

    So is a buffer that was registered just now, at the encoder's first call, unless `register_new`: an encoder that is
    being built registers as in stock.
    """
    if id(encoder) in growth.growing:  # set_max_audio_length within update_max_seq_length
        method(encoder, *arguments)
        return
    growth.growing.add(id(encoder))
    registered = {(module, name): module._buffers.get(name) for module, name in _places(encoder.modules())}
    for (module, name), buffer in registered.items():
        if buffer is not None and name in module.__dict__:
            module._buffers[name] = module.__dict__.pop(name)
    try:
        method(encoder, *arguments)
    finally:
        growth.growing.discard(id(encoder))
        for module, name in list(_places(encoder.modules())):
            buffer, grown = registered.get((module, name)), module._buffers.get(name)
            if grown is buffer or (buffer is None and register_new):
                continue
            if name not in growth.names and getattr(buffer, "shape", None) == getattr(grown, "shape", None):
                _say_same_shape(f"{type(module).__name__}.{name}")  # its values are NeMo's and DDP's affair
                continue
            growth.names.add(name)
            if buffer is None:
                del module._buffers[name]
                module._non_persistent_buffers_set.discard(name)
                growth.unregistered.add(module)
            else:
                module._buffers[name] = buffer
            module.__dict__[name] = grown
            copyreg.dispatch_table.setdefault(type(module), reduce_as_registered)
            growth.happened = True


def _say_same_shape(buffer: str) -> None:
    if buffer not in growth.same_shape:
        growth.same_shape.add(buffer)
        text = "has other values since its encoder has grown, and the same shape: DDP broadcasts rank 0's"
        report(logging.WARNING, f"buffer {buffer} {text}")


def _places(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str]]:
    for module in modules:
        buffers = vars(module).get("_buffers")
        if isinstance(buffers, dict):  # a scripted module's buffers are not Python's
            yield from ((module, name) for name in {*buffers, *growth.names})
