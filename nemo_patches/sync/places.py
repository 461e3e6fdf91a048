"""Whose code a method of NeMo's class is now, and the same code with other names. No torch."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Mapping
from types import FunctionType, GetSetDescriptorType, MethodType
from typing import Any

_OURS = "nemo_patches.sync.encoder_methods"  # not imported: it needs torch
_MOST_LAYERS = 20  # of wrappers: one that is around itself has no end


def place_of(thing: Any) -> str:
    """`module.name (file:line)` of a function, or of what a wrapper runs: functools.wraps gives it
    another's name.
    """
    function = function_of(thing)
    if function is not None:
        # Python 3.10 has the latter alone.
        name = getattr(function.__code__, "co_qualname", function.__code__.co_name)
        return (
            f"{function.__globals__.get('__name__', '?')}.{name} ({line_of(function)})"
        )
    kind = thing if isinstance(thing, type) else type(thing)
    call = getattr(kind, "__call__", None)  # noqa: B004  # not whether, but where
    place = f" ({line_of(call)})" if function_of(call) else ""
    return f"an object of {kind.__module__}.{kind.__qualname__}{place}"


def line_of(thing: Any) -> str:
    """`file:line` of a function, or of what a wrapper runs."""
    function = function_of(thing)
    if function is None:
        return "no file"
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"


def function_of(thing: Any) -> FunctionType | None:
    """The Python function that runs when `thing` is called; None if none can be seen."""
    for _ in range(_MOST_LAYERS):
        # isinstance() would take wrapt's word for what it wraps.
        if type(thing) is FunctionType:
            return thing
        if isinstance(thing, classmethod | staticmethod | MethodType):
            thing = thing.__func__
        elif isinstance(thing, functools.partial | functools.partialmethod):
            thing = thing.func
        elif isinstance(thing, property):
            thing = thing.fget
        else:
            thing = getattr(thing, "_self_wrapper", None)  # wrapt's
    return None


def layers(thing: Any) -> list[Any]:
    """A wrapper, what it wraps, and so on; the last one wraps nothing that can be seen.

    Not inspect.unwrap(): from Python 3.11.8 on it takes a class's wrapper for the class.
    """
    found = [thing]
    while len(found) < _MOST_LAYERS:
        inner = getattr(found[-1], "__wrapped__", None)
        if inner is None:
            break
        found.append(inner)
    return found


def stored(thing: Any, name: str) -> Any:
    """What an object, or else its classes, hold under this name, of whose code nothing is run; None
    if they do not.

    Not inspect.getattr_static(), which raises for some classes in Python 3.13.0.
    """
    # As every class has them, also where its metaclass says otherwise.
    held = ChainMap(*map(type.__dict__["__dict__"].__get__, type.mro(type(thing))))
    own = held.get("__dict__")
    names = own.__get__(thing) if type(own) is GetSetDescriptorType else {}
    return dict.get(names, name, held.get(name))


def is_ours(thing: Any) -> bool:
    """Whether it is our replacement of an encoder's method, including one from the diffs."""
    function = function_of(thing)
    return function is not None and str(function.__globals__.get("__name__")).endswith(
        _OURS
    )


def with_names(function: FunctionType, names: Mapping[str, object]) -> FunctionType:
    """The same function, which sees other objects under these names of its module."""
    return FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
