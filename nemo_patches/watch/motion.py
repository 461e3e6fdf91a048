"""Whether this rank works, by the CPU time of its process and of all that it has started.

As Linux counts it, and without our own threads'.
A loop that polls sleeps, and is no work. An endless loop that computes cannot be told from work.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..channel.daemon import own_threads
from .process_id import stat_fields

# Of a core, all threads and processes together. A thread that polls every hundredth of a second
# takes 0.004 to 0.01, one that reads the state of all processes every second 0.002.
LEAST_PART = 0.1
# Of the time in which a thread had a core: so much it had Python's lock, too.
_LEAST_LOCKED_PART = 0.25
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Linux has a clock for each process and thread, which needs no file.
_PROCESS_CLOCK = 2
_THREAD_CLOCK = 6


class RankMotion:
    """What this process and its descendants use of cores, from look to look.

    works: in the window that ends with the latest look they have used LEAST_PART of a core; a
    window is over as soon as they have. One thread calls `look`.
    """

    def __init__(self, window_s: float) -> None:
        self.works = False
        self._window_s = window_s
        self._window_at = 0.0
        self._worked_s = 0.0  # in this window
        self._before: _Look | None = None

    def look(
        self, descendants: Iterable[int], *, with_own_threads: bool = True
    ) -> None:
        """with_own_threads: whether the threads of this process count, too."""
        before, now = self._before, _Look.make(descendants)
        self._before = now
        self.works = False
        if before is None:
            self._window_at = now.at
            return
        self._worked_s += now.worked_s(before, with_own_threads)
        self.works = self._worked_s >= LEAST_PART * self._window_s
        if self.works or now.at - self._window_at >= self._window_s:
            self._window_at = now.at
            self._worked_s = 0.0


class _Times(NamedTuple):
    """Of a thread; waited_s: for a core."""

    ran_s: float
    waited_s: float = 0.0


@dataclass(frozen=True)
class _CoreUse:
    """ran_s: what its threads have used of a core, also those that have ended. children_s: what
    those have that it has waited for, and theirs. threads: of those that run.
    """

    ran_s: float = 0.0
    children_s: float = 0.0
    threads: dict[int, _Times] = field(default_factory=dict)

    def worked_s(self, before: _CoreUse, passed_s: float, locked_s: float) -> float:
        """The seconds of a core that it would have used, had its threads never waited for one.

        locked_s: for so long somebody may have had Python's lock without a core.
        """
        worked_s = self._ended_s() - before._ended_s()
        for thread, then in before.threads.items():
            if thread not in self.threads:
                worked_s -= then.ran_s  # which is in what those have used that ended
        for thread, times in self.threads.items():
            then = before.threads.get(thread, _Times(0.0))
            ran_s = times.ran_s - then.ran_s
            had_a_core_s = passed_s - (times.waited_s - then.waited_s)
            had_both_s = max(
                had_a_core_s - locked_s, _LEAST_LOCKED_PART * had_a_core_s, ran_s
            )
            worked_s += passed_s * ran_s / had_both_s if ran_s > 0 else 0.0
        return worked_s

    def _ended_s(self) -> float:
        return self.ran_s - sum(times.ran_s for times in self.threads.values())


@dataclass(frozen=True)
class _Look:
    """own_waited_s: for a core, of the thread that looks."""

    at: float
    own_waited_s: float
    own: _CoreUse
    descendants: dict[int, _CoreUse]

    @classmethod
    def make(cls, descendants: Iterable[int]) -> _Look:
        here = threading.get_native_id()
        found = dict[int, _CoreUse]()
        for pid in descendants:
            with contextlib.suppress(OSError):  # it has ended
                found[pid] = _process(pid)
        waited_s = _threads(os.getpid(), only=(here,)).get(here, _Times(0.0)).waited_s
        return cls(time.monotonic(), waited_s, _own_process(), found)

    def worked_s(self, before: _Look, with_own_threads: bool) -> float:
        """In seconds of a core."""
        passed_s = self.at - before.at
        worked_s = 0.0
        if with_own_threads:
            locked_s = self.own_waited_s - before.own_waited_s
            worked_s += self.own.worked_s(before.own, passed_s, locked_s)
        for pid, process in self.descendants.items():
            if then := before.descendants.get(pid):
                worked_s += process.worked_s(then, passed_s, locked_s=0.0)
            else:
                worked_s += min(process.ran_s, passed_s)
        return worked_s + self._reaped_s(before)

    def _reaped_s(self, before: _Look) -> float:
        """What those have used since then that have ended."""
        reaped_s = self.own.children_s - before.own.children_s
        for pid, process in self.descendants.items():
            then = before.descendants.get(pid, _CoreUse())
            reaped_s += process.children_s - then.children_s
        for pid, process in before.descendants.items():
            if pid not in self.descendants:
                reaped_s -= process.ran_s + process.children_s
        return max(reaped_s, 0.0)


def thread_ran_s(native_thread: int) -> float:
    """What this thread of this process has used of a core; -1 if it has ended."""
    with contextlib.suppress(OSError):
        return time.clock_gettime(_clock(native_thread, _THREAD_CLOCK))
    return -1.0


def process_ran_s(pid: int) -> float:
    """What this process has used of a core, and those that it has waited for. Raises OSError."""
    return time.clock_gettime(_clock(pid, _PROCESS_CLOCK)) + _children_s(pid)


def _clock(number: int, kind: int) -> int:
    return (~number << 3) | kind


def _own_process() -> _CoreUse:
    """Without our own threads."""
    ours = own_threads.running().values()
    ran_s = time.process_time() - own_threads.ended_s()
    ran_s -= sum(max(thread_ran_s(thread), 0.0) for thread in ours)
    times = os.times()
    children_s = times.children_user + times.children_system
    return _CoreUse(ran_s, children_s, _threads(os.getpid(), but=ours))


def _process(pid: int) -> _CoreUse:
    """Raises OSError if there is none of this number."""
    ran_s = time.clock_gettime(_clock(pid, _PROCESS_CLOCK))
    return _CoreUse(ran_s, _children_s(pid), _threads(pid))


def _children_s(pid: int) -> float:
    """0 if the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        return sum(map(int, stat_fields(pid)[13:15])) / _TICKS_PER_S
    return 0.0


def _threads(
    pid: int, *, only: Collection[int] = (), but: Collection[int] = ()
) -> dict[int, _Times]:
    """By the kernel's number. Those of which it does not tell for how long they have waited for a
    core are left out.
    """
    found = dict[int, _Times]()
    numbers: Iterable[int] = only
    with contextlib.suppress(OSError):
        numbers = only or map(int, os.listdir(f"/proc/{pid}/task"))
    for number in numbers:
        if number not in but:
            with contextlib.suppress(OSError, ValueError):
                ran_ns, waited_ns, _ = (
                    Path(f"/proc/{pid}/task/{number}/schedstat").read_text().split()
                )
                found[number] = _Times(int(ran_ns) / 1e9, int(waited_ns) / 1e9)
    return found
