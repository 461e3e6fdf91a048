"""Why a local length is safe: what grows in one process only is kept beside its module's buffers.

NeMo registers positional encodings and the like as buffers, and replaces them by larger ones. DDP
collects buffers anew at every forward and broadcasts rank 0's (pytorch issue 63916): unequal sizes
overwrite other rows and other buffers. So the buffers keep the shape they had, and a property of
the module's class reads what has grown. Not a plain attribute: torch.export takes none that has the
name of a buffer.

Any thread may read, save or grow: a private tensor is there before anything else changes, and the
buffers do not have it meanwhile. Plain functions: torch.compile traces through them, and breaks the
graph at an object that it does not know (wrapt's).
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import copyreg
import functools
import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch

_Value = TypeVar("_Value")
_PRIVATE = "_nemo_patches_private"  # in a module's __dict__, replaced as a whole
# Buffers of Conformer and its likes; of Squeezeformer, ConvASR and the punctuation model.
LENGTH_SIZED = ("pe", "seq_range")


class Private(NamedTuple):
    """A tensor that has grown in this process, and what its buffer was then, which it follows."""

    tensor: torch.Tensor
    dtype: torch.dtype | None  # None: there is no buffer
    device: torch.device | None


class Growth:
    """What has grown privately in this process."""

    def __init__(self) -> None:
        # Of the private tensors in a class's modules.
        self.names: dict[type, set[str]] = {}
        # Buffers that got other values of the same shape, and whether this was logged.
        self.same_shape: dict[str, bool] = {}
        self.threads: set[int] = set()  # in which an encoder grows now


growth = Growth()


def grow_privately(
    encoder: Any,
    method: Callable[..., None],
    *arguments: Any,
    register_new: bool = False,
) -> None:
    """Let NeMo's `method` grow the encoder; make those buffers private that are new or longer.

    register_new: new ones stay registered, as in stock: the encoder may be under construction.
    """
    before = _buffers(encoder)
    for (_, name), (module, _) in before.items():
        if name in LENGTH_SIZED:
            _prepare(type(module))  # what is assigned to it is private at once
    thread = threading.get_ident()
    is_inner = thread in growth.threads  # NeMo's method has called another one of these
    growth.threads.add(thread)
    try:
        outside_inference_mode(method, encoder, *arguments)
    finally:
        if not is_inner:
            growth.threads.discard(thread)
        for key, (module, now) in _buffers(encoder).items():
            name = key[1]
            _, buffer = before.get(key, (None, None))
            if now is buffer or (buffer is None and register_new):
                continue
            if name in LENGTH_SIZED or buffer is None or buffer.shape != now.shape:
                _make_private(module, name, now, buffer)
            else:
                growth.same_shape.setdefault(f"{type(module).__name__}.{name}", False)


def outside_inference_mode(function: Callable[..., _Value], *arguments: Any) -> _Value:
    """Growth may happen in a validation, and inference tensors can be neither saved for backward
    nor broadcast by DDP.

    Gradients stay as off as they were. torch.compile cannot trace the question, and has its own
    mode in its graphs.
    """
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return function(*arguments)
    with torch.inference_mode(False), torch.no_grad():
        return function(*arguments)


def private_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The privately grown tensors of a module, by name."""
    return {name: _followed(module, name) for name in _privates(module)}


def give_back_all() -> None:
    """For revert(): turn every private tensor back into its module's buffer, as in stock NeMo."""
    if not growth.names:
        return
    # We never saw copies of an encoder; only the garbage collector knows them all.
    for thing in gc.get_objects():
        # A scripted module is of another class, and has other buffers.
        if issubclass(type(thing), torch.nn.Module) and type(thing) in growth.names:
            thing._buffers.update(private_tensors(thing))
            thing.__dict__.pop(_PRIVATE, None)
    for owner, names in reversed(growth.names.items()):
        if copyreg.dispatch_table.get(owner) is _reduce_as_registered:
            del copyreg.dispatch_table[owner]
        for method in _METHODS:
            _restore(owner, method)
        for name in names:
            if isinstance(vars(owner).get(name), property):
                delattr(owner, name)
    growth.names.clear()


_Buffers = dict[tuple[int, str], tuple[torch.nn.Module, torch.Tensor]]


def _buffers(encoder: torch.nn.Module) -> _Buffers:
    """By the dict that each is in: torch.export's tracing gives modules in ever new proxies."""
    found: _Buffers = {}
    for module in encoder.modules():
        buffers = vars(module).get("_buffers")
        if isinstance(buffers, dict):  # a scripted module has no such thing
            for name, now in buffers.items():
                if now is not None:
                    found[id(buffers), name] = (module, now)
    return found


def _privates(module: Any) -> dict[str, Private]:
    return cast("dict[str, Private]", module.__dict__.get(_PRIVATE, {}))


def _set_private(
    module: Any, name: str, tensor: torch.Tensor, buffer: torch.Tensor | None
) -> None:
    private = Private(tensor, None, None)
    if buffer is not None:
        private = Private(tensor, buffer.dtype, buffer.device)
    module.__dict__[_PRIVATE] = {**_privates(module), name: private}


def _make_private(
    module: Any, name: str, tensor: torch.Tensor, buffer: torch.Tensor | None
) -> None:
    """In the module's buffers, whose order stays the same, `buffer` takes its place, or nothing."""
    _prepare(type(module), name)
    _set_private(module, name, tensor, buffer)
    if buffer is None:
        module._buffers.pop(name, None)
    else:
        module._buffers[name] = buffer


def _followed(module: Any, name: str) -> torch.Tensor:
    """A private tensor, in its buffer's dtype and on its device where these have changed: FSDP
    casts buffers one by one, by their `data`."""
    private = _privates(module)[name]
    buffer = module._buffers.get(name)
    if buffer is None or private.dtype is None or private.tensor.is_meta:
        return private.tensor
    if buffer.dtype == private.dtype and buffer.device == private.device:
        return private.tensor
    tensor = outside_inference_mode(private.tensor.to, buffer.device, buffer.dtype)
    if not torch.compiler.is_compiling():
        _set_private(module, name, tensor, buffer)
    return tensor


@contextlib.contextmanager
def _as_buffers(module: Any, names: Collection[str]) -> Iterator[None]:
    """These private tensors are buffers meanwhile, as in stock. One that is replaced stays one."""
    private = {
        name: each for name, each in private_tensors(module).items() if name in names
    }
    registered = {name: module._buffers.get(name) for name in private}
    module._buffers.update(private)
    try:
        yield
    finally:
        for name, tensor in private.items():
            if module._buffers.get(name) is tensor:
                _make_private(module, name, tensor, registered[name])
            else:
                others = {
                    other: each
                    for other, each in _privates(module).items()
                    if other != name
                }
                module.__dict__[_PRIVATE] = others


# What a class with private tensors gets: a property for each, and methods that regard them.


def _prepare(owner: Any, *names: str) -> None:
    if not any(base in growth.names for base in owner.__mro__):
        for method, made in _METHODS.items():
            setattr(owner, method, made(getattr(owner, method)))
    known = growth.names.setdefault(owner, set())
    for name in names:
        if name not in known:
            known.add(name)
            setattr(owner, name, _reader(name))
    copyreg.dispatch_table.setdefault(owner, _reduce_as_registered)


def _restore(owner: type, name: str) -> None:
    """Undo `_prepare`. Inside a user's wrapper our method stays, and finds nothing private."""
    ours = vars(owner).get(name)
    if getattr(ours, "__globals__", None) is globals():
        original = ours.__wrapped__  # type: ignore[union-attr]
        delattr(owner, name)
        if getattr(owner, name) is not original:  # else it was inherited
            setattr(owner, name, original)


def _reader(name: str) -> property:
    """For a class whose modules may have this tensor privately; otherwise it reads as in stock."""

    @torch.jit.unused  # torch.jit.script compiles a class's properties, and would not take this one
    def read(self: Any) -> Any:
        if name in _privates(self):
            return _followed(self, name)
        if name in self.__dict__:
            return self.__dict__[name]
        return self.__getattr__(name)  # torch.nn.Module's: parameters, buffers, modules

    def write(self: Any, value: object) -> None:
        self.__dict__[name] = value

    def delete(self: Any) -> None:
        if self.__dict__.pop(name, write) is write:
            raise AttributeError(name)

    return property(read, write, delete)


def _applying(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_apply(self, fn, ...)`, which .to(), .half() and the like call: to private tensors, too."""

    @functools.wraps(original)
    def method(
        self: Any, fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        before = _privates(self)
        result = original(self, fn, *args, **kwargs)
        for name, private in before.items():
            tensor = outside_inference_mode(fn, private.tensor)
            _set_private(self, name, tensor, self._buffers.get(name))
        return result

    return method


def _naming(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that sets or deletes one attribute or buffer: what a growth sets is private, and
    everything else is as in stock."""

    @functools.wraps(original)
    def method(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        is_private = name in _privates(self)
        if threading.get_ident() in growth.threads:
            buffer = self.__dict__.get("_buffers", {}).get(name)
            is_sized = is_private or (buffer is not None and name in LENGTH_SIZED)
            tensor = args[0] if args else kwargs.get("tensor")
            if is_sized and isinstance(tensor, torch.Tensor):
                _make_private(self, name, tensor, buffer)
                return
        if is_private:
            with _as_buffers(self, [name]):
                original(self, name, *args, **kwargs)
        else:
            original(self, name, *args, **kwargs)

    return method


def _persisting(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that saves or loads a state dict: of persistent buffers, which none of NeMo's is."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        with _as_buffers(
            self, _privates(self).keys() - self._non_persistent_buffers_set
        ):
            original(self, *args, **kwargs)

    return method


_METHODS = {
    "_apply": _applying,
    "__setattr__": _naming,
    "__delattr__": _naming,
    "register_buffer": _naming,
    "_save_to_state_dict": _persisting,
    "_load_from_state_dict": _persisting,
}


def _reduce_as_registered(module: torch.nn.Module) -> tuple[Any, ...]:
    """Pickle a module with a private tensor as stock would: with that tensor in the buffer.

    A process without nemo_patches, which may load it, grows the buffer and would go on reading a
    private tensor. A copy (copy.deepcopy comes here too) stays in this process, and keeps its
    buffer's shape like the original.
    """
    function, arguments, state, *rest = cast("tuple[Any, ...]", module.__reduce_ex__(4))
    if sys._getframe(1).f_globals.get("__name__") != "copy":
        state = {**state, "_buffers": {**state["_buffers"], **private_tensors(module)}}
        state.pop(_PRIVATE, None)
    return (function, arguments, state, *rest)
