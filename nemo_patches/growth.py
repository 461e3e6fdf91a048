"""Why a local length is safe: a tensor that grows in one process only is kept beside its module's buffers.

NeMo registers positional encodings and the like as buffers, and replaces them by larger ones. DDP collects buffers anew
at every forward and broadcasts rank 0's (pytorch issue 63916): unequal sizes overwrite other rows and other buffers. So
the buffers keep the shape they had, and a property of the module's class reads what has grown.
Not a plain attribute: torch.export takes none that has the name of a buffer.

Plain functions: torch.compile traces through them, and breaks the graph at an object that it does not know (wrapt's).
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copyreg
import functools
import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch

_Value = TypeVar("_Value")
_METHODS = ("__setattr__", "__delattr__", "register_buffer", "_save_to_state_dict", "_load_from_state_dict")
_PRIVATE = "_nemo_patches_private"  # in a module's __dict__: privately grown tensors, by name
LENGTH_SIZED = ("pe", "seq_range")  # buffers of Conformer and its likes; of Squeezeformer, ConvASR, punctuation


class Growth(NamedTuple):
    """What has grown privately in this process."""

    names: dict[type, set[str]]  # of the private tensors in a class's modules
    same_shape: dict[str, bool]  # buffers that got other values of the same shape, and whether this was logged


growth = Growth({}, {})


def grow_privately(encoder: Any, method: Callable[..., None], *arguments: Any, register_new: bool = False) -> None:
    """Let NeMo's own `method` grow the encoder's length-sized buffers; make private those with a new shape, or new.

    register_new: new buffers stay registered, as in stock: the encoder may still be under construction.
    """
    before = _buffers(encoder)
    private = {(id(part._buffers), name) for part in encoder.modules() for name in private_tensors(part)}
    try:
        outside_inference_mode(method, encoder, *arguments)
    finally:
        for key, (module, now) in _buffers(encoder).items():
            (_, name), (_, buffer), was_private = key, before.get(key, (None, None)), key in private
            if now is buffer or (buffer is None and register_new and not was_private):
                continue
            if was_private or name in LENGTH_SIZED or buffer is None or buffer.shape != now.shape:
                _make_private(module, name, buffer)
            else:
                growth.same_shape.setdefault(f"{type(module).__name__}.{name}", False)


def outside_inference_mode(function: Callable[..., _Value], *arguments: Any) -> _Value:
    """Inference tensors can be neither saved for backward nor broadcast by DDP, and growth may happen in a validation.

    Gradients stay as off as they were. torch.compile cannot trace the question, and has its own mode in its graphs.
    """
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return function(*arguments)
    with torch.inference_mode(False), torch.no_grad():
        return function(*arguments)


def _make_private(module: Any, name: str, buffer: torch.Tensor | None) -> None:
    """Replace a tensor in the module's buffers by `buffer`, if any; their order stays the same."""
    module.__dict__[_PRIVATE] = {**private_tensors(module), name: module._buffers[name]}
    if buffer is None:
        del module._buffers[name]
    else:
        module._buffers[name] = buffer
    owner: Any = type(module)
    if not any(base in growth.names for base in owner.__mro__):
        owner._apply = _following_apply(owner._apply)
        for method in _METHODS:
            setattr(owner, method, _with_private(getattr(owner, method)))
    if name not in growth.names.setdefault(owner, set()):
        growth.names[owner].add(name)
        setattr(owner, name, _reader(name))
    copyreg.dispatch_table.setdefault(owner, _reduce_as_registered)


def _reader(name: str) -> property:
    """A property for a class whose modules may have this tensor privately; otherwise it reads as in stock."""

    @torch.jit.unused  # torch.jit.script compiles a class's properties, and would not take this one
    def read(self: Any) -> Any:
        for place in (self.__dict__.get(_PRIVATE, {}), self.__dict__):
            if name in place:
                return place[name]
        return self.__getattr__(name)  # torch.nn.Module's: parameters, buffers, modules

    def write(self: Any, value: object) -> None:
        self.__dict__[name] = value

    def delete(self: Any) -> None:
        if self.__dict__.pop(name, write) is write:
            raise AttributeError(name)

    return property(read, write, delete)


def _following_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Module._apply(self, fn, ...)`, called by .to(), .half() and the like, applied to the private tensors, too."""

    @functools.wraps(original)
    def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        result = original(self, fn, *args, **kwargs)
        if private := private_tensors(self):
            self.__dict__[_PRIVATE] = {name: outside_inference_mode(fn, tensor) for name, tensor in private.items()}
        return result

    return _apply


def _with_private(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method on a module's buffers that includes the private tensors; one that it replaces is no longer private."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        private = {name: (tensor, self._buffers.get(name)) for name, tensor in private_tensors(self).items()}
        self.__dict__.pop(_PRIVATE, None)
        for name, (tensor, _) in private.items():
            self._buffers[name] = tensor
        try:
            return original(self, *args, **kwargs)
        finally:
            for name, (tensor, buffer) in private.items():
                if self._buffers.get(name) is tensor:
                    _make_private(self, name, buffer)

    return method


def _reduce_as_registered(module: torch.nn.Module) -> tuple[Any, ...]:
    """Pickle a module with a private tensor as stock would: with that tensor in the buffer.

    A process without nemo_patches, which may load it, grows the buffer and would go on reading a private tensor. A
    copy (copy.deepcopy comes here too) stays in this process, and keeps its buffer's shape like the original.
    """
    function, arguments, state, *rest = cast("tuple[Any, ...]", module.__reduce_ex__(4))
    if sys._getframe(1).f_globals.get("__name__") != "copy":
        state = {**state, "_buffers": dict(state["_buffers"])}
        state["_buffers"].update(state.pop(_PRIVATE, {}))
    return (function, arguments, state, *rest)


def private_tensors(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """The privately grown tensors of a module, by name."""
    return cast("Mapping[str, torch.Tensor]", vars(module).get(_PRIVATE, {}))


def _buffers(encoder: torch.nn.Module) -> dict[tuple[int, str], tuple[torch.nn.Module, torch.Tensor]]:
    """By the dict that each is in: to torch.export's tracing every look gives the modules in other proxies."""
    plain = (module for module in encoder.modules() if isinstance(vars(module).get("_buffers"), dict))  # not scripted
    each = ((part, name, now) for part in plain for name, now in part._buffers.items())
    return {(id(part._buffers), name): (part, now) for part, name, now in each if now is not None}


def give_back_all() -> None:
    """For revert(): turn every privately grown tensor back into its module's buffer, as in stock NeMo."""
    if not growth.names:
        return
    # We never saw copies of an encoder; only the garbage collector knows them all.
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.nn.Module) and type(thing) in growth.names:  # a scripted one has other buffers
            thing._buffers.update(thing.__dict__.pop(_PRIVATE, {}))
    for owner, names in reversed(growth.names.items()):
        if copyreg.dispatch_table.get(owner) is _reduce_as_registered:
            del copyreg.dispatch_table[owner]
        for name in ("_apply", *_METHODS):
            _restore(owner, name)
        for name in names:
            if isinstance(vars(owner).get(name), property):
                delattr(owner, name)
    growth.names.clear()


def _restore(owner: type, name: str) -> None:
    """Undo `_make_private` in a class. Inside a user's wrapper our method stays, and finds nothing private."""
    ours = vars(owner).get(name)
    if getattr(ours, "__globals__", None) is globals():
        original = ours.__wrapped__  # type: ignore[union-attr]
        delattr(owner, name)
        if getattr(owner, name) is not original:  # else it was inherited
            setattr(owner, name, original)
