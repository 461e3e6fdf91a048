"""A data loader's workers, and what the kernel reveals about each without extra rights: state, open files."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import math
import multiprocessing.process
import os
from pathlib import Path

_STATES = {"D": "waits for a device or a network's file system", "T": "is stopped", "t": "is stopped by a debugger"}
_ENDED = {"Z", "X"}
_NOT_DATA = ("/dev/", "/proc/", "/sys/", "/memfd:")
_BETWEEN_LOOKS_S, _BUSY_PART = 1.0, 0.02  # of a core; an idle worker looks for its parent every few seconds
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LONGEST_PATH, _MOST_DESCRIBED, _MOST_FILES, _MOST_DESCENDANTS = 120, 8, 2, 200


def loader_workers() -> tuple[int, ...]:
    """The process ids of this process's daemonic children: a data loader's workers. Reaps nobody."""
    # active_children() would take a dead child's exit code away from the thread that waits for it.
    children = list(getattr(multiprocessing.process, "_children", ()))
    return tuple(sorted(child.pid for child in children if child.daemon and child.pid))


def described(workers: tuple[int, ...]) -> tuple[str, ...]:
    """A text for each of the first workers with something to report: "worker 3 (pid 81) has /data/a.tar open"."""
    texts = (_text(index, pid) for index, pid in enumerate(workers))
    return tuple(text for text in texts if text)[:_MOST_DESCRIBED]


class WorkerMotion:
    """Whether a data loader's worker of this process computes, or a process that its training thread has started and
    waits for. One thread calls `moved`."""

    def __init__(self) -> None:
        self._looked_at = -math.inf
        self._ran_s: dict[int, float] = {}  # by process id, at the latest look

    def moved(self, now: float, waits_for_process: bool = False) -> bool:
        """Since the look before; the first, and one that is too soon after another: no.

        waits_for_process: whether the training thread does: then all descendants count, else a logger's process beside
        it would.
        """
        passed_s = now - self._looked_at
        if passed_s < _BETWEEN_LOOKS_S:
            return False
        watched = {*loader_workers(), *(_descendants() if waits_for_process else ())}
        before, self._ran_s, self._looked_at = self._ran_s, {pid: _ran_s(pid) for pid in watched}, now
        least_s = _BUSY_PART * passed_s
        return any(ran_s - before[pid] >= least_s for pid, ran_s in self._ran_s.items() if pid in before)


def _descendants() -> list[int]:
    """The children of this process; none if the kernel does not say."""
    found, rest = list[int](), [os.getpid()]
    while rest and len(found) < _MOST_DESCENDANTS:
        with contextlib.suppress(OSError, ValueError):
            for tasks in Path(f"/proc/{rest.pop()}/task").iterdir():
                children = list(map(int, (tasks / "children").read_text().split()))
                found += children
                rest += children
    return found


def _ran_s(pid: int) -> float:
    """What this process has used of a core, and those that it has started and that have ended; 0 if not known."""
    with contextlib.suppress(OSError, ValueError):
        return sum(map(int, _stat(pid)[11:15])) / _TICKS_PER_S
    return 0.0


def _stat(pid: int) -> list[str]:
    """The fields after its name, from its state on. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _text(index: int, pid: int) -> str:
    who, process = f"worker {index} (pid {pid})", Path(f"/proc/{pid}")
    try:
        state = _stat(pid)[0]
    except (OSError, IndexError):
        return f"{who} has ended"
    if state in _ENDED:
        return f"{who} has ended"
    said = [_STATES[state]] if state in _STATES else []
    said += [f"has {name} open" for name in _open_files(process)]
    with contextlib.suppress(OSError):
        wait = process.joinpath("wchan").read_text()
        said += [f"is in the kernel's {wait}"] if said and wait not in ("", "0") else []
    return f"{who} " + ", ".join(said) if said else ""


def _is_only_written(process: Path, number: int) -> bool:
    """A log, or what another process reads: no data that a worker waits for."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        flags = (process / "fdinfo" / str(number)).read_text().partition("flags:")[2].split()[0]
        return int(flags, 8) & os.O_ACCMODE == os.O_WRONLY
    return False


def _open_files(process: Path) -> list[str]:
    """The regular files that it has open to read, the last opened first. Nothing is opened, no file system is asked."""
    numbers = list[int]()
    with contextlib.suppress(OSError):
        numbers = sorted(map(int, os.listdir(process / "fd")), reverse=True)
    found = list[str]()
    for number in numbers:
        target = ""
        with contextlib.suppress(OSError):  # closed just now
            target = os.readlink(process / "fd" / str(number)) if number > 2 else ""
        is_data = target.startswith("/") and not target.startswith(_NOT_DATA)
        if is_data and not _is_only_written(process, number):
            found.append(target[-_LONGEST_PATH:])
    return found[:_MOST_FILES]
