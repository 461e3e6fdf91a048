"""Whether a thread computes, by its CPU time as Linux counts it, and whether its code gets on.

A loop that polls sleeps, and does not compute, whatever it counts. An empty loop and one call of C
or C++ that never returns compute and do not get on: so does a rank that waits for its GPU, which
takes a core.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .occupation import Frame

# Of the time in which the thread did not wait for a core. In a moment a thread that polls may take
# more.
_COMPUTING_PART = 0.5
# It may wait for Python's lock, too, or read what it computes with, and is not to be ended; a
# loop that polls every hundredth of a second takes 0.01 to 0.03.
_MOVING_PART = 0.2
# Of the time in which it had a core: so much it had Python's lock, too.
_LEAST_PART = 0.25


class ThreadMotion:
    """What one thread of this process does, from look to look.

    computes: by its CPU time in the last window that is over. moves: since the last look it has
    taken a part of a core, and it is at another place in its code. has_run: however briefly; true
    where that cannot be told. One thread calls `look`.
    """

    def __init__(self, native_thread: int, window_s: float) -> None:
        """native_thread: the kernel's number of it."""
        self.native_thread = native_thread
        self.computes = False
        self.moves = False
        self.has_run = True
        self._window_s = window_s
        self._window: _Times | None = None  # its begin
        # A whole one; before that, what there is of the first counts.
        self._has_measured = False
        self._before: _Times | None = None
        self._place: tuple[tuple[int, int], ...] = ()

    def look(self, frames: Iterable[Frame]) -> None:
        place = tuple((id(frame.code), frame.last_instruction) for frame in frames)
        before = self._before
        times = _times(self.native_thread)
        self.moves = False
        self.has_run = True
        if times is None:
            self.computes = False
            self._window = None
        elif self._window is None:
            self._window = times
        else:
            is_over = times.at - self._window.at >= self._window_s
            if is_over or not self._has_measured:
                self.computes = times.part_since(self._window) >= _COMPUTING_PART
            if is_over:
                self._window = times
                self._has_measured = True
        if before is not None and times is not None:
            self.has_run = times.ran_s > before.ran_s
            self.moves = (
                place != self._place and times.part_since(before) >= _MOVING_PART
            )
        self._before = times
        self._place = place


class _Times(NamedTuple):
    """Of a thread. waited_s: for a core. own_waited_s: the same of the thread that looks. at:
    time.monotonic().
    """

    ran_s: float
    waited_s: float
    own_waited_s: float
    at: float

    def part_since(self, before: _Times) -> float:
        """The part that it ran of the time in which it did not wait for a core."""
        ran_s = self.ran_s - before.ran_s
        had_a_core_s = self.at - before.at - (self.waited_s - before.waited_s)
        # On a busy machine it waits for Python's lock, too, which the thread that looks holds while
        # it has no core.
        had_both_s = had_a_core_s - (self.own_waited_s - before.own_waited_s)
        had_both_s = max(had_both_s, _LEAST_PART * had_a_core_s)
        return min(ran_s / had_both_s, 1.0) if had_both_s > 0 else float(ran_s > 0)


def _times(native_thread: int) -> _Times | None:
    """None where they cannot be told."""
    try:
        ran_s, waited_s = _ran_and_waited(native_thread)
        _, own_waited_s = _ran_and_waited(threading.get_native_id())
    except (OSError, ValueError):  # the thread has ended; no file left to read with
        return None
    return _Times(ran_s, waited_s, own_waited_s, time.monotonic())


def _ran_and_waited(native_thread: int) -> tuple[float, float]:
    ran_ns, waited_ns, _ = (
        Path(f"/proc/self/task/{native_thread}/schedstat").read_text().split()
    )
    return int(ran_ns) / 1e9, int(waited_ns) / 1e9
