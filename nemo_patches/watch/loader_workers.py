"""A data loader's workers, and what the kernel reveals of each: its state, its open files."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import math
import multiprocessing.process
import os
from collections.abc import Collection
from pathlib import Path

from .kernel_call import call_in
from .motion import process_ran_s
from .process_id import stat_fields

_STATES = {
    "D": "waits for a device or a network's file system",
    "T": "is stopped",
    "t": "is stopped by a debugger",
}
_ENDED = {"Z", "X"}
_NOT_DATA = ("/dev/", "/proc/", "/sys/", "/memfd:")
_BETWEEN_LOOKS_S = 1.0
_BUSY_PART = 0.02  # of a core; an idle worker looks for its parent every few seconds
_FIFO_WAIT = "wait_for_partner"  # the kernel's function, in open()
_LONGEST_PATH = 120  # characters
_MOST_DESCRIBED = 8
_MOST_FILES = 2


def loader_workers() -> tuple[int, ...]:
    """The pids of this process's daemonic children: a data loader's workers. Reaps nobody."""
    # active_children() would take a dead child's exit code away from the thread that waits for it.
    children = list(getattr(multiprocessing.process, "_children", ()))
    return tuple(sorted(child.pid for child in children if child.daemon and child.pid))


def described(workers: tuple[int, ...], busy: Collection[int] = ()) -> tuple[str, ...]:
    """A text for each of the first workers with something to report: "worker 3 (pid 81) has
    /data/a.tar open".

    busy: those that compute.
    """
    texts = (_text(index, pid, pid in busy) for index, pid in enumerate(workers))
    return tuple(text for text in texts if text)[:_MOST_DESCRIBED]


class WorkerMotion:
    """Whether one of some processes computes: a data loader's workers, or what the training thread
    waits for.

    busy: the processes that did at the last look that counted. One thread calls `moved`.
    """

    def __init__(self) -> None:
        self.busy: frozenset[int] = frozenset()
        self._looked_at = -math.inf
        self._ran_s: dict[int, float] = {}  # by process id, at the latest look

    def moved(self, now: float, processes: Collection[int]) -> bool:
        """Since the look before; the first, and one that is too soon after another: no."""
        passed_s = now - self._looked_at
        if passed_s < _BETWEEN_LOOKS_S:
            return False
        before = self._ran_s
        self._ran_s = {}
        for pid in processes:
            with contextlib.suppress(OSError):  # it has ended
                self._ran_s[pid] = process_ran_s(pid)
        self._looked_at = now
        least_s = _BUSY_PART * passed_s
        self.busy = frozenset(
            pid
            for pid, ran_s in self._ran_s.items()
            if pid in before and ran_s - before[pid] >= least_s
        )
        return bool(self.busy)


def _text(index: int, pid: int, is_busy: bool) -> str:
    who = f"worker {index} (pid {pid})"
    process = Path(f"/proc/{pid}")
    try:
        state = stat_fields(pid)[0]
    except (OSError, IndexError):
        return f"{who} has ended"
    if state in _ENDED:
        return f"{who} has ended"
    said = ["computes"] if is_busy else []
    if state in _STATES:
        said.append(_STATES[state])
    wait = ""
    with contextlib.suppress(OSError):
        wait = process.joinpath("wchan").read_text()
    if opened := _being_opened(process):
        said.append(f"is in open() of {opened}")
    elif wait == _FIFO_WAIT:
        said.append("is in open() of a FIFO")
    said += [f"has {name} open" for name in _open_files(process)]
    if said and wait not in ("", "0"):
        said.append(f"is in the kernel's {wait}")
    return f"{who} " + ", ".join(said) if said else ""


def _being_opened(process: Path) -> str:
    """The file that it is just opening, as of a mount that does not answer, or a FIFO that nobody
    writes to.

    Empty where there is none, or the kernel does not tell it: it is the parent's to know.
    """
    address = call_in(process).opened
    if not address:
        return ""
    with (
        contextlib.suppress(OSError),
        open(process / "mem", "rb", buffering=0) as memory,
    ):
        memory.seek(address)
        path = memory.read(os.pathconf("/", "PC_PATH_MAX"))
        return os.fsdecode(path.partition(b"\0")[0])[-_LONGEST_PATH:]
    return ""


def _is_only_written(process: Path, number: int) -> bool:
    """A log, or what another process reads: no data that a worker waits for."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        flags = (
            (process / "fdinfo" / str(number))
            .read_text()
            .partition("flags:")[2]
            .split()[0]
        )
        return int(flags, 8) & os.O_ACCMODE == os.O_WRONLY
    return False


def _open_files(process: Path) -> list[str]:
    """The regular files that it has open to read, the last opened first. Nothing is opened, no file
    system is asked.
    """
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
