"""A data loader's workers, and what the kernel tells of each without any rights: its state, its open files."""
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
_LONGEST_PATH, _MOST_DESCRIBED, _MOST_FILES = 120, 8, 2


def loader_workers() -> tuple[int, ...]:
    """The process ids of this process's daemonic children: a data loader's workers. Reaps nobody."""
    # active_children() would take a dead child's exit code away from the thread that waits for it.
    children = list(getattr(multiprocessing.process, "_children", ()))
    return tuple(sorted(child.pid for child in children if child.daemon and child.pid))


def described(workers: tuple[int, ...]) -> tuple[str, ...]:
    """A text for each of the first of whom there is something to say: "worker 3 (pid 81) has /data/a.tar open"."""
    texts = (_text(index, pid) for index, pid in enumerate(workers))
    return tuple(text for text in texts if text)[:_MOST_DESCRIBED]


class WorkerMotion:
    """Whether a data loader's worker of this process computes. One thread calls `moved`."""

    def __init__(self) -> None:
        self._looked_at = -math.inf
        self._ran_s: dict[int, float] = {}  # by process id, at the latest look

    def moved(self, now: float) -> bool:
        """Since the look before; the first, and one that is too soon after another: no."""
        passed_s = now - self._looked_at
        if passed_s < _BETWEEN_LOOKS_S:
            return False
        before, self._ran_s, self._looked_at = self._ran_s, {pid: _ran_s(pid) for pid in loader_workers()}, now
        least_s = _BUSY_PART * passed_s
        return any(ran_s - before[pid] >= least_s for pid, ran_s in self._ran_s.items() if pid in before)


def _ran_s(pid: int) -> float:
    """What this process has used of a core, and those that it has started and that have ended; 0 if not known."""
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS_PER_S
    return 0.0


def _text(index: int, pid: int) -> str:
    who, process = f"worker {index} (pid {pid})", Path(f"/proc/{pid}")
    try:
        state = process.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()[0]
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


def _open_files(process: Path) -> list[str]:
    """The regular files that it has open, the last opened first; nothing is opened or asked of a file system."""
    with contextlib.suppress(OSError):
        numbers = sorted(map(int, os.listdir(process / "fd")), reverse=True)
        targets = (os.readlink(process / "fd" / str(number)) for number in numbers if number > 2)
        return [
            target[-_LONGEST_PATH:] for target in targets if target.startswith("/") and not target.startswith(_NOT_DATA)
        ][:_MOST_FILES]
    return []
