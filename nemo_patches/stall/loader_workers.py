"""A data loader's workers, and what the kernel tells of each without any rights: its state, its open files."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
from pathlib import Path

_STATES = {"D": "waits for a device or a network's file system", "T": "is stopped", "t": "is stopped by a debugger"}
_ENDED = {"Z", "X"}
_NOT_DATA = ("/dev/", "/proc/", "/sys/", "/memfd:")
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
