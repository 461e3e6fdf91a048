"""The processes that this rank has started, and theirs: who they are, and their end."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from .process_id import stat_fields

_MOST = 200
_MOST_ANCESTORS = 32
_TERM_S = 1.0  # for them to end by themselves
_PAUSE_S = 0.05
_INIT = 1
_SHARED_MEMORY = "torch_shm_manag"  # as the kernel cuts its name


class _Process(NamedTuple):
    """As the kernel says. began: in its ticks since it has booted."""

    state: str
    parent: int
    group: int
    session: int
    began: int


class Descendants:
    """One thread calls `look`.

    Who has been seen once stays one, also when its parent ends, and it becomes another's child.
    """

    def __init__(self) -> None:
        self._began: dict[int, int] = {}  # by process id: when each has begun
        # By process id: children of this process's ancestors that are none.
        self._others: set[int] = set()

    def look(self, ranks: Collection[int], *, with_orphans: bool = True) -> list[int]:
        """The ids of those that there are now. ranks: other ranks here, which may be children of
        this one, and are no part of it, nor what they have started. with_orphans: also those whose
        parent had ended before they were seen, which is a guess.
        """
        began = dict[int, int]()
        roots = [os.getpid(), *self._began]
        if with_orphans:
            roots += self._orphans(ranks)
        while roots and len(began) < _MOST:
            pid = roots.pop()
            if pid in began or pid in ranks:
                continue
            if pid != os.getpid():
                process = _process(pid)
                if process is None and not _is_there(pid):
                    continue
                # Of another user's process the kernel may say nothing.
                at = process.began if process is not None else 0
                if self._began.get(pid, at) != at:
                    continue  # it has ended, and another has its number
                began[pid] = at
            roots += _children(pid)
        self._began = began
        return list(began)

    def _orphans(self, ranks: Collection[int]) -> Iterator[int]:
        """What has begun later than this process, in its process group, and is a child of an
        ancestor of another session, or of the first process: these take orphans.
        """
        own = _process(os.getpid())
        if own is None:
            return
        line = dict(_ancestors(own))
        candidates = set[int]()
        for pid, ancestor in line.items():
            is_first = pid == _INIT and (pid != own.parent or ranks)
            if is_first or (pid != _INIT and ancestor.session != own.session):
                candidates.update(_children(pid))
        candidates -= {os.getpid(), *line, *ranks}
        self._others &= candidates
        for pid in candidates - self._others:
            process = _process(pid)
            if (
                process is not None
                and process.group == own.group
                and process.began > own.began
            ):
                yield pid
            else:
                self._others.add(pid)


def end(processes: Collection[int]) -> str:
    """End them, by SIGTERM and then by SIGKILL. What could not be ended, and why; empty if all
    were.
    """
    why = dict[int, str]()
    ends_at = time.monotonic() + _TERM_S
    left = set(processes)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            try:
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)  # a stopped one
            except ProcessLookupError:
                pass
            except OSError as error:
                why[pid] = error.strerror or str(error)
        left = {pid for pid in left - why.keys() if _runs(pid)}
        while left and number == signal.SIGTERM and time.monotonic() < ends_at:
            time.sleep(_PAUSE_S)
            left = {pid for pid in left if _runs(pid)}
    return ", ".join(f"{pid} ({text})" for pid, text in sorted(why.items()))


def ends_by_itself(pid: int) -> bool:
    """With its parent, once it has tidied up: Python's resource tracker and torch's."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is not None and pid == getattr(tracker._resource_tracker, "_pid", 0):
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith(_SHARED_MEMORY)
    return False


def _runs(pid: int) -> bool:
    process = _process(pid)
    return process is not None and process.state not in ("Z", "X")


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _ancestors(process: _Process) -> Iterator[tuple[int, _Process]]:
    """By process id; the nearest first."""
    for _ in range(_MOST_ANCESTORS):
        above = _process(process.parent) if process.parent > 0 else None
        if above is None:
            return
        yield process.parent, above
        process = above


def _children(pid: int) -> list[int]:
    """None if the kernel does not say."""
    found = list[int]()
    with contextlib.suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(
                int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()
            )
    return found


def _process(pid: int) -> _Process | None:
    """None if there is none, or the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = stat_fields(pid)
        return _Process(fields[0], *map(int, (*fields[1:4], fields[19])))
    return None
