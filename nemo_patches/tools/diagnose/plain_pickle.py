"""A reader for pickles of plain data: containers, text and numbers. Nothing in a file is ever called.

`pickle.load` runs code from a file. This reader knows the instructions that build plain data, and refuses all others.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

LARGEST_BYTES = 1 << 28
_MOST_STEPS = 50_000_000  # instructions

_NUMBERS = frozenset({"INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"})
_TEXTS = frozenset({"UNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE"})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_STORES, _FETCHES = frozenset({"PUT", "BINPUT", "LONG_BINPUT"}), frozenset({"GET", "BINGET", "LONG_BINGET"})
_MARK = object()


class NotPlainError(Exception):
    """The data are no pickle, or one that is not of plain data only. The text says what was met."""


def load(data: bytes) -> Any:
    """The one object in a pickle. Raises NotPlainError.

    Parts that are shared in the pickle are shared in the object, so going through it must be bounded.
    """
    if len(data) > LARGEST_BYTES:
        raise NotPlainError(f"{len(data)} bytes, more than {LARGEST_BYTES}")
    try:
        return _built(data)
    except NotPlainError:
        raise
    except Exception as error:  # a stack that is too short, a key that cannot be one, a number of a million digits ...
        raise NotPlainError(f"no pickle: {type(error).__name__}") from error


def _built(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for step, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if step > _MOST_STEPS:
            raise NotPlainError(f"more than {_MOST_STEPS} instructions")
        if name in _NUMBERS or name in _TEXTS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _STORES:
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _FETCHES:
            stack.append(memo[argument])
        elif name in _TUPLES:
            items = tuple(stack[-_TUPLES[name] :])
            del stack[-_TUPLES[name] :]
            stack.append(items)
        elif name in ("TUPLE", "LIST", "DICT"):
            items = tuple(_since_mark(stack))
            pairs = zip(items[::2], items[1::2], strict=True)
            stack.append(items if name == "TUPLE" else list(items) if name == "LIST" else dict(pairs))
        elif name in ("APPEND", "APPENDS"):
            items = tuple([stack.pop()] if name == "APPEND" else _since_mark(stack))
            list.extend(stack[-1], items)
        elif name in ("SETITEM", "SETITEMS"):
            flat = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _since_mark(stack)
            dict.update(stack[-1], zip(flat[::2], flat[1::2], strict=True))
        elif name == "STOP":
            (result,) = stack
            return result
        elif name not in ("PROTO", "FRAME"):
            raise NotPlainError(f"the instruction {name}, which plain data do not need")
    raise NotPlainError("no pickle: it has no end")


def _since_mark(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1
    while stack[at] is not _MARK:
        at -= 1
        if at < 0:
            raise NotPlainError("no pickle: a mark is missing")
    items = stack[at + 1 :]
    del stack[at:]
    return items
