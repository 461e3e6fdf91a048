"""The frames of this process's threads, read so that no thread crashes by it.

Python 3.11 makes a frame's object when it is asked for, which may begin a garbage collection. If
that lets the thread run on, the object is of a frame that is gone, and the process ends by a
segmentation fault. So no garbage is collected meanwhile; and no bytecode is run until it is again,
so that no other thread sees that it was not.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, chain, repeat, takewhile
from operator import attrgetter, is_not, methodcaller
from types import CodeType, FrameType
from typing import TypeVar

_Result = TypeVar("_Result")
_call = methodcaller("__call__")
_kept = attrgetter("f_code", "f_lineno")


def threads() -> list[int]:
    """Their identifiers."""
    return _uncollected(partial(list, chain.from_iterable(_current_frames())))


def stack(thread: int) -> list[tuple[CodeType, int | None]]:
    """The code and the line of each frame of the thread with this identifier, innermost first; none
    if there is no such one.

    The frames' objects would keep the functions' variables. Of these none is read: before Python
    3.13 that would write into the user's locals().
    """
    innermost = map(methodcaller("get", thread), _current_frames())
    callers = accumulate(chain(innermost, repeat("f_back")), getattr)
    frames = takewhile(partial(is_not, None), callers)
    return _uncollected(partial(list, map(_kept, frames)))


def _current_frames() -> Iterator[dict[int, FrameType]]:
    """One dict, made when it is taken. No variable may hold it: that one's frame is in it, so it
    would hold itself, and all threads' variables, until the next collection.
    """
    return map(_call, (sys._current_frames,))


def _uncollected(function: Callable[[], _Result]) -> _Result:
    """function: all that it calls is written in C."""
    if not gc.isenabled():
        return function()
    result: _Result
    try:
        _, result, _ = map(_call, (gc.disable, function, gc.enable))
    except BaseException:
        gc.enable()
        raise
    return result
