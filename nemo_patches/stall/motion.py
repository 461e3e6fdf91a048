"""Whether a thread computes: its CPU time, by Linux, and whether its code has got on from one look to the next.

A loop that polls sleeps, and does not compute, whatever it counts. An empty loop and one call of C or C++ that never
returns do not get on: so a rank that waits for its GPU, which takes a core, does not compute.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .occupation import Frame

# Of the time in which it did not wait for a core. It may wait for Python's lock, too, or read what it computes with; a
# loop that polls every hundredth of a second takes 0.01 to 0.03.
_COMPUTING_PART = 0.2


class ThreadMotion:
    """What one thread of this process has done between the last two looks. One thread calls `look`."""

    def __init__(self, native_thread: int) -> None:
        """native_thread: the kernel's number of it."""
        self.native_thread = native_thread
        self.computes = False
        self.has_run = True  # however briefly, or may have
        self._before: _Times | None = None
        self._place: tuple[tuple[int, int], ...] = ()

    def look(self, frames: Iterable[Frame]) -> None:
        place = tuple((id(frame.code), frame.last_instruction) for frame in frames)
        before = self._before
        times = _times(self.native_thread)
        self.computes = False
        self.has_run = True
        if before is not None and times is not None:
            ran_s = times.ran_s - before.ran_s
            had_a_core_s = times.at - before.at - (times.waited_s - before.waited_s)
            self.has_run = ran_s > 0
            self.computes = self.has_run and ran_s >= _COMPUTING_PART * had_a_core_s and place != self._place
        self._before = times
        self._place = place


class _Times(NamedTuple):
    """Of a thread. waited_s: for a core. at: time.monotonic()."""

    ran_s: float
    waited_s: float
    at: float


def _times(native_thread: int) -> _Times | None:
    """None where they cannot be told."""
    try:
        text = Path(f"/proc/self/task/{native_thread}/schedstat").read_text()
        ran_ns, waited_ns, _ = text.split()
    except (OSError, ValueError):  # the thread has ended; no such file, or no file left to read it with
        return None
    return _Times(int(ran_ns) / 1e9, int(waited_ns) / 1e9, time.monotonic())
