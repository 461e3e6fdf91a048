"""Length-sized buffers that grow for this process only, so that DDP always collects the same shapes on every rank.

NeMo registers positional encodings and the like as buffers, and replaces them by larger ones. DDP collects buffers anew
at every forward and broadcasts rank 0's (pytorch issue 63916): unequal sizes overwrite other rows and other buffers. So
what has grown goes into the module's `__dict__`, which Python reads before its buffers; they keep the shape they had.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copyreg
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

LENGTH_SIZED = ("pe", "seq_range")  # buffers of Conformer and its likes; of Squeezeformer, ConvASR, punctuation


class Growth:
    """What has grown privately in this process."""

    def __init__(self) -> None:
        self.happened = False  # whether any buffer has
        self.unregistered: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # NeMo would have registered theirs
        self.growing: set[int] = set()  # encoders inside grown_privately, by id


growth = Growth()


@contextmanager
def grown_privately(encoder: torch.nn.Module, register_new: bool = False) -> Iterator[None]:
    """Within it NeMo's own code may grow the encoder's length-sized buffers, and sees them as in stock.

    Afterwards what has grown is private, and so is a buffer that was registered just now, at the encoder's first call,
    unless `register_new`: an encoder that is being built registers as in stock.
    """
    if id(encoder) in growth.growing:  # set_max_audio_length within update_max_seq_length
        yield
        return
    growth.growing.add(id(encoder))
    registered = {(module, name): module._buffers.get(name) for module, name in _places(encoder)}
    for (module, name), buffer in registered.items():
        if buffer is not None and name in module.__dict__:
            module._buffers[name] = module.__dict__.pop(name)
    try:
        yield
    finally:
        growth.growing.discard(id(encoder))
        for (module, name), buffer in registered.items():
            grown = module._buffers.get(name)
            if grown is buffer or (buffer is None and register_new):
                continue
            if buffer is None:
                del module._buffers[name]
                module._non_persistent_buffers_set.discard(name)
                growth.unregistered.add(module)
            else:
                module._buffers[name] = buffer
            module.__dict__[name] = grown
            copyreg.dispatch_table.setdefault(type(module), reduce_as_registered)
            growth.happened = True


def following_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Module._apply(self, fn, ...)`, behind .to(), .half() and the like, with the private tensors taken along."""

    @functools.wraps(original)
    def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        grown = [(module, name, module.__dict__[name]) for module, name in _places(self) if name in module.__dict__]
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
    for name in LENGTH_SIZED:
        if name in state and name in state["_buffers"]:
            state["_buffers"][name] = state.pop(name)
    return (function, arguments, state, *rest)


def _places(encoder: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    for module in encoder.modules():
        if isinstance(vars(module).get("_buffers"), dict):  # a scripted module's buffers are not Python's
            for name in LENGTH_SIZED:
                yield module, name
