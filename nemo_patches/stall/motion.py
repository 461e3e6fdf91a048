"""Whether a thread visibly moves, judged by its stack from one look to the next.

What counts: a loop over an iterator, by `for` or `next`, whose variable has become another one, a whole number in a
variable of the user's code, or in a step counter of a package, that it had at no look before, functions that were at
no look before, twice in a row, and computing: another instruction than at the look before, of a thread that has
hardly slept since. So a loop that polls is no motion: it comes back to what was seen, and sleeps; nor is an empty
loop, or one call that never returns, whatever that takes of a core. Looked for only once the thread is long away from
the encoder: before Python 3.13 a look keeps what the variables of such functions hold until the next one.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dis
import functools
import inspect
import time
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from . import stacks

_COUNTERS = {"batch_idx", "batch_nb", "i", "it", "idx", "index", "step", "epoch", "iteration", "pos", "offset", "t"}
_COUNTER_ENDINGS = ("_idx", "_index", "_step", "_iter", "_pos", "_offset")
_STORES = {"STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF"}
_GLOBAL_LOADS = {"LOAD_GLOBAL", "LOAD_NAME"}
_UNSET = object()  # stands for a variable without a value at this moment
_MOST_SEEN = 1 << 14  # stacks and values; after that they are forgotten
_HARDLY_SLEPT = 0.5  # of the time between two looks, at most


class _Names(NamedTuple):
    """A function's variables that show motion.

    counters: all of the user's code, by name those of packages, none of Python's own.
    """

    loops: tuple[str, ...]
    counters: tuple[str, ...]


class StackMotion:
    """The motion of one thread in one stall. One thread calls `moved`."""

    def __init__(self, native_thread: int) -> None:
        """native_thread: the kernel's thread id."""
        self._stacks: set[tuple[CodeType, ...]] = set()  # but the latest
        self._values: set[int] = set()  # hashes of a function's whole numbers and of its callers'
        self._loops: dict[tuple[int, CodeType, str], int] = {}  # at the latest look, by the frame
        self._latest: tuple[CodeType, ...] = ()
        self._was_new = False
        self._instructions: tuple[tuple[CodeType, int], ...] = ()  # at the latest look, of all frames
        self._sleep = _Sleep(native_thread)

    def moved(self, frames: Iterable[FrameType]) -> bool:
        """Whether the thread with these frames, innermost first, has moved since the look before; the first: no."""
        if is_first := not self._latest or len(self._stacks) + len(self._values) > _MOST_SEEN:
            self._stacks, self._values, self._loops, self._latest = set(), set(), {}, ()
        stack: list[CodeType] = []
        instructions: list[tuple[CodeType, int]] = []
        loops: dict[tuple[int, CodeType, str], int] = {}
        numbers: list[tuple[CodeType, tuple[tuple[str, int], ...]]] = []
        for frame in frames:
            code, names = frame.f_code, _names(frame.f_code)
            instructions.append((code, frame.f_lasti))
            if not stacks.is_pythons_own(code.co_filename):
                stack.append(code)
            variables = _variables(frame) if names.loops or names.counters else {}
            for name in names.loops:
                value = variables.get(name, _UNSET)
                if value is not _UNSET and type(value) is not int:
                    loops[id(frame), code, name] = id(value)
            named = {name: variables.get(name) for name in (*names.loops, *names.counters)}
            numbers.append((code, tuple((name, value) for name, value in named.items() if type(value) is int)))
        # A variable that is not a whole number is compared by its address, which may be used again later.
        tells = any(self._loops.get(key, value) != value for key, value in loops.items())
        tells |= self._has_new_numbers(numbers)
        self._loops = loops
        computes = self._computes(tuple(instructions))
        return (self._has_new_functions(tuple(stack)) or tells or computes) and not is_first

    @property
    def has_run(self) -> bool:
        """Whether the thread has run at all between the last two looks, or may have."""
        return self._sleep.has_run

    def _computes(self, instructions: tuple[tuple[CodeType, int], ...]) -> bool:
        """Whether it runs without waiting for anything: that it will never end would be a guess."""
        goes_on = instructions != self._instructions
        self._instructions = instructions
        return self._sleep.share() <= _HARDLY_SLEPT and goes_on

    def _has_new_numbers(self, numbers: list[tuple[CodeType, tuple[tuple[str, int], ...]]]) -> bool:
        """A function's values together with its callers': an inner loop repeats the same ones in each outer step."""
        context, is_new = 0, False
        for code, values in reversed(numbers):
            if values:
                context = hash((context, code, values))
                is_new |= context not in self._values
                self._values.add(context)
        return is_new

    def _has_new_functions(self, stack: tuple[CodeType, ...]) -> bool:
        """Twice in a row: a thread that polls is seen once where it looks, and then where it waits again."""
        is_new, was_new = bool(self._latest) and stack not in self._stacks, self._was_new
        self._stacks.add(self._latest or stack)
        self._latest, self._was_new = stack, is_new
        return is_new and was_new


class _Sleep:
    """How a thread of this process spends its time, according to Linux."""

    def __init__(self, native_thread: int) -> None:
        self._file = Path(f"/proc/self/task/{native_thread}/schedstat")
        self._looked_at = time.monotonic()
        self._running_s = self._ready_s = 0.0
        self.has_run = True  # since it was asked before, or may have

    def share(self) -> float:
        """Of the time since it was asked last, 0 to 1, without that in which it had to wait for a core; 1 where it
        cannot be told."""
        try:
            running_ns, ready_ns, _ = self._file.read_text().split()
        except (OSError, ValueError):  # the thread has ended; no such file, or no file left to read it with
            self.has_run = True
            return 1.0
        now, running_s, ready_s = time.monotonic(), int(running_ns) / 1e9, int(ready_ns) / 1e9
        ran_s = running_s - self._running_s
        self.has_run = ran_s > 0
        slept_s = max(now - self._looked_at - ran_s - (ready_s - self._ready_s), 0.0)
        self._looked_at, self._running_s, self._ready_s = now, running_s, ready_s
        return slept_s / (slept_s + ran_s) if ran_s > 0 else 1.0


def _variables(frame: FrameType) -> Any:
    variables = frame.f_locals
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED or type(variables) is dict:
        return variables
    return {}  # an object of the user's class, whose methods are not called here


@functools.lru_cache(maxsize=1 << 12)
def _names(code: CodeType) -> _Names:
    loops: list[str] = []
    to_store = 0  # of a loop's variables, how many are still to come
    is_called = False  # by `next`, which has arguments
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name == "FOR_ITER" or (name in _GLOBAL_LOADS and instruction.argval == "next"):
            to_store, is_called = 1, name != "FOR_ITER"
        elif to_store and name.startswith("UNPACK_"):
            starred = instruction.arg or 0  # of UNPACK_EX: how many come before the starred one, and after it
            to_store += starred - 1 if name == "UNPACK_SEQUENCE" else (starred & 0xFF) + (starred >> 8)
        elif to_store and name.startswith("STORE_FAST_"):  # from Python 3.13 on two in one; the second may be a load
            stored = instruction.argval[: 2 if name == "STORE_FAST_STORE_FAST" else 1]
            loops += stored
            to_store -= len(stored)
        elif to_store and name in _STORES:
            loops.append(str(instruction.argval))
            to_store -= 1
        elif name != "EXTENDED_ARG" and not is_called:
            to_store = 0
    if stacks.is_pythons_own(code.co_filename):
        return _Names(tuple(loops), ())
    variables = code.co_varnames if code.co_flags & inspect.CO_OPTIMIZED else code.co_names
    if stacks.is_users_own(code.co_filename):
        return _Names(tuple(loops), tuple(variables))
    counters = (name for name in variables if name in _COUNTERS or name.endswith(_COUNTER_ENDINGS))
    return _Names(tuple(loops), tuple(counters))
