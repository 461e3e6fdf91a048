"""What stands in for an encoder's methods: the bounded sync for the reduce, and growth for this process only.

NeMo registers positional encodings and the like as buffers, and replaces them by larger ones. DDP collects buffers anew
at every forward and broadcasts rank 0's (pytorch issue 63916): unequal sizes overwrite other rows and other buffers. So
what has grown is kept beside the module's buffers, which keep the shape they had, and a property of its class reads it.
Not a plain attribute: torch.export takes none that has the name of a buffer.

Plain functions: torch.compile traces through them, and breaks the graph at an object that it does not know (wrapt's).
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copyreg
import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch

from .events import Grown, GrowthBegan, bus
from .length_sync import synced_length
from .rank_log import is_distributed, report

Method = Callable[..., None]
_Value = TypeVar("_Value")
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.7 and later
METHODS = ("__setattr__", "__delattr__", "register_buffer", "_save_to_state_dict", "_load_from_state_dict")
PRIVATE = "_nemo_patches_private"  # in a module's __dict__: what has grown privately, by name
LENGTH_SIZED = ("pe", "seq_range")  # buffers of Conformer and its likes; of Squeezeformer, ConvASR, punctuation


class Growth(NamedTuple):
    """What has grown privately in this process."""

    names: dict[type, set[str]]  # of the private tensors in the modules of a class
    same_shape: set[str]  # buffers that a growth has given other values alone: said


growth = Growth({}, set())


def bounded(original: Method, grow: Method, in_force: Callable[[], bool]) -> Method:
    """`update_max_seq_length(self, seq_length, device)` with the bounded sync in place of the reduce.

    original: NeMo's own method, which runs where there is no process group. grow: the same without its reduce, which
    runs where the agreed length is more than the encoder's `max_audio_length`. in_force: false after a revert.
    """

    @functools.wraps(original)
    def update(self: Any, seq_length: int, device: torch.device) -> None:
        if in_force() and is_exporting() and (growth.names or is_distributed()):
            if seq_length > self.max_audio_length:  # what is exported talks to nobody, nor does one rank that exports
                _run_privately(self, grow, seq_length, device)
        elif in_force() and is_distributed():
            _sync_and_grow(self, grow, seq_length, device)
        elif growth.names:  # the process group is gone, or hidden for a while: what is private must stay so
            _run_privately(self, original, seq_length, device)
        elif in_force():
            _outside_inference_mode(original, self, seq_length, device)
        else:
            original(self, seq_length, device)

    return update


def private_setter(original: Method, in_force: Callable[[], bool]) -> Method:
    """`set_max_audio_length(self, max_audio_length)`, which others than the sync call too, with private growth."""

    @functools.wraps(original)
    def set_max_audio_length(self: Any, max_audio_length: int) -> None:
        if growth.names or (in_force() and is_distributed()):
            _run_privately(self, original, max_audio_length, register_new=True)
        elif in_force():
            _outside_inference_mode(original, self, max_audio_length)
        else:
            original(self, max_audio_length)

    return set_max_audio_length


def following_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Module._apply(self, fn, ...)`, behind .to(), .half() and the like, with the private tensors taken along."""

    @functools.wraps(original)
    def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        result = original(self, fn, *args, **kwargs)
        if private := private_tensors(self):
            self.__dict__[PRIVATE] = {name: _outside_inference_mode(fn, tensor) for name, tensor in private.items()}
        return result

    return _apply


def with_private(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a module's buffers, with the private tensors among them; what it replaces is private no more."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        private = {name: (tensor, self._buffers.get(name)) for name, tensor in private_tensors(self).items()}
        self.__dict__.pop(PRIVATE, None)
        for name, (tensor, _) in private.items():
            self._buffers[name] = tensor
        try:
            return original(self, *args, **kwargs)
        finally:
            for name, (tensor, buffer) in private.items():
                if self._buffers.get(name) is tensor:
                    _make_private(self, name, buffer)

    return method


def reduce_as_registered(module: torch.nn.Module) -> tuple[Any, ...]:
    """How a module with a private tensor is pickled: with that tensor in the buffer, as stock's would be.

    A process without nemo_patches, which may load it, grows the buffer and would go on reading a private tensor. A
    copy (copy.deepcopy comes here too) stays in this process, and keeps its buffer's shape like the original.
    """
    function, arguments, state, *rest = cast("tuple[Any, ...]", module.__reduce_ex__(4))
    if sys._getframe(1).f_globals.get("__name__") != "copy":
        state = {**state, "_buffers": dict(state["_buffers"])}
        state["_buffers"].update(state.pop(PRIVATE, {}))
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
    """Let NeMo's own code grow the encoder's length-sized buffers; make private what has another shape, or is new.

    register_new: what is new stays registered, as in stock: the encoder may be only just being built.
    """
    before = _buffers(encoder)
    private = {(id(part._buffers), name) for part in encoder.modules() for name in private_tensors(part)}
    try:
        _outside_inference_mode(method, encoder, *arguments)
    finally:
        for key, (module, now) in _buffers(encoder).items():
            (_, name), (_, buffer), was_private = key, before.get(key, (None, None)), key in private
            if now is buffer or (buffer is None and register_new and not was_private):
                continue
            if was_private or name in LENGTH_SIZED or buffer is None or buffer.shape != now.shape:
                _make_private(module, name, buffer)
            elif (title := f"{type(module).__name__}.{name}") not in growth.same_shape:
                growth.same_shape.add(title)
                text = "has other values since its encoder has grown, and the same shape: DDP broadcasts rank 0's"
                report(logging.WARNING, f"buffer {title} {text}")


def _outside_inference_mode(function: Callable[..., _Value], *arguments: Any) -> _Value:
    """An inference tensor cannot be saved for backward, nor broadcast by DDP; a validation may well be what grows.

    Gradients stay as off as they were. torch.compile cannot trace the question, and has its own mode in its graphs.
    """
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return function(*arguments)
    with torch.inference_mode(False), torch.no_grad():
        return function(*arguments)


def _make_private(module: Any, name: str, buffer: torch.Tensor | None) -> None:
    """Take a tensor out of the module's buffers, with `buffer`, if any, in its place: their order is the same."""
    module.__dict__[PRIVATE] = {**private_tensors(module), name: module._buffers[name]}
    if buffer is None:
        del module._buffers[name]
    else:
        module._buffers[name] = buffer
    owner: Any = type(module)
    if not any(base in growth.names for base in owner.__mro__):
        owner._apply = following_apply(owner._apply)
        for method in METHODS:
            setattr(owner, method, with_private(getattr(owner, method)))
    if name not in growth.names.setdefault(owner, set()):
        growth.names[owner].add(name)
        setattr(owner, name, _reader(name))
    copyreg.dispatch_table.setdefault(owner, reduce_as_registered)


def _reader(name: str) -> property:
    """The attribute of that name in a class whose modules may have it privately; else it is what it is in stock."""

    @torch.jit.unused  # torch.jit.script compiles a class's properties, and would not take this one
    def read(self: Any) -> Any:
        for place in (self.__dict__.get(PRIVATE, {}), self.__dict__):
            if name in place:
                return place[name]
        return self.__getattr__(name)  # torch.nn.Module's: parameters, buffers, modules

    def write(self: Any, value: object) -> None:
        self.__dict__[name] = value

    def delete(self: Any) -> None:
        if self.__dict__.pop(name, write) is write:
            raise AttributeError(name)

    return property(read, write, delete)


def private_tensors(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    return cast("Mapping[str, torch.Tensor]", vars(module).get(PRIVATE, {}))


def _buffers(encoder: torch.nn.Module) -> dict[tuple[int, str], tuple[torch.nn.Module, torch.Tensor]]:
    """By the dict that each is in: to torch.export's tracing every look gives the modules in other proxies."""
    plain = (module for module in encoder.modules() if isinstance(vars(module).get("_buffers"), dict))  # not scripted
    each = ((part, name, now) for part in plain for name, now in part._buffers.items())
    return {(id(part._buffers), name): (part, now) for part, name, now in each if now is not None}
