"""Where a thread is, in one line: the user's own code in full, innermost first, runs of library frames folded."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from itertools import groupby, takewhile
from operator import itemgetter
from types import FrameType

from .occupation import Frame, Occupation
from .occupation import occupation as occupation_of

LONGEST = 600  # characters
_OWN_FRAMES, _FOLDS = 5, 4
_NOT_CALLERS = {"torch", "nemo_patches", "python"}
_FRAMEWORKS = {"lightning", "pytorch_lightning", "lightning_fabric"}
_LIBRARIES = ("site-packages", "dist-packages")
_STDLIB = tuple(sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = (_PACKAGE, *(os.path.join(_PACKAGE, room) for room in ("channel", "sync", "stall", "tracing", "options")))
_ENCODER_METHODS = os.path.join(_PACKAGE, "sync", "encoder_methods.py")


def where(thread: int) -> str:
    """The place of the thread with this identifier; empty if there is no such thread. At most LONGEST characters.

    "load (data/reader.py:31) < main (train.py:80), in: select (python/selectors.py:415) < get (torch/...)" is: `load`
    was called by `main` and has called into libraries, which are in `select`. "+3" is how many frames were folded.
    """
    places: list[tuple[str, str]] = []  # the library (empty: the user's own code), and the text
    for frame in frames(thread):
        library, path = _library(frame.f_code.co_filename)
        places.append((library, f"{frame.f_code.co_name} ({path}:{frame.f_lineno})"))
    own = [text for library, text in places if not library]
    inside = []
    for _, run in groupby(takewhile(itemgetter(0), places), itemgetter(0)):
        (_, text), *folded = run
        inside.append(f"{text} +{len(folded)}" if folded else text)
    line = " < ".join(own[:_OWN_FRAMES]) + (f" < {len(own) - _OWN_FRAMES} more" if len(own) > _OWN_FRAMES else "")
    if inside:
        line += (", in: " if own else "") + " < ".join(inside[:_FOLDS])
    return line[:LONGEST]


def occupation(thread: int) -> Occupation:
    """What this thread is doing; unknown if there is no such thread."""
    stack = list(frames(thread))
    found = occupation_of([Frame(frame.f_code, frame.f_lasti) for frame in stack])
    return found._replace(caller=_caller(stack))


def _caller(stack: list[FrameType]) -> str:
    """The innermost frame in the user's code or in NeMo's: "file_exists (nemo_model_checkpoint.py:540)"."""
    others = [(frame, _library(frame.f_code.co_filename)[0]) for frame in stack]
    others = [(frame, library) for frame, library in others if library not in _NOT_CALLERS]
    best = next((frame for frame, library in others if library not in _FRAMEWORKS), others[0][0] if others else None)
    if best is None:
        return ""
    return f"{best.f_code.co_name} ({os.path.basename(best.f_code.co_filename)}:{best.f_lineno})"


def training_thread(caller: int, native_id: int) -> int:
    """The thread that has called an encoder; if that has ended or runs no Python, the main thread.

    A GPU's backward has a thread of its own, which calls an encoder within torch.utils.checkpoint once more. native_id:
    the identifier of a thread that has ended is soon another's.
    """
    is_there = caller in sys._current_frames() and os.path.exists(f"/proc/self/task/{native_id}")
    return caller if is_there else threading.main_thread().ident or 0


def runs(thread: int, place: tuple[str, str]) -> bool:
    """Whether this thread is running the function `place` (its file, its name)."""
    return any((frame.f_code.co_filename, frame.f_code.co_name) == place for frame in frames(thread))


def encoder_function() -> tuple[str, str]:
    """The file and name of the encoder's function that has called the length sync on this thread: its forward."""
    frame: FrameType | None = sys._getframe(1)
    inside_the_sync = True
    while frame is not None:
        file = frame.f_code.co_filename
        if not inside_the_sync and os.path.dirname(file) not in _OURS and _library(file)[0] != "torch":
            return file, frame.f_code.co_name
        inside_the_sync = inside_the_sync and file != _ENCODER_METHODS
        frame = frame.f_back
    return "", ""


def all_threads() -> list[str]:
    """A line for each thread of this process except the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = [thread for thread in sys._current_frames() if thread != threading.get_ident()]
    return [f"thread {names.get(thread, thread)}: {where(thread)}" for thread in others]


def frames(thread: int) -> Iterator[FrameType]:
    """The frames of the thread with this identifier, innermost first; none if there is no such thread."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.lru_cache(maxsize=1 << 12)
def is_pythons_own(file: str) -> bool:
    """Whether the file is part of Python's standard library, not of the user's code or a package."""
    return file.startswith("<frozen ") or (file.startswith(_STDLIB) and _library(file)[0] == "python")


@functools.lru_cache(maxsize=1 << 12)
def is_users_own(file: str) -> bool:
    """Whether the file is the user's own code, not a package's."""
    return not _library(file)[0]


def _library(file: str) -> tuple[str, str]:
    """The package that a file belongs to (empty for the user's own code), and its path as it is shown."""
    parts = file.split(os.sep)
    for name in _LIBRARIES:
        if name in parts:
            inner = parts[parts.index(name) + 1 :]
            return inner[0], "/".join(inner)
    if file.startswith((*_STDLIB, "<")):
        return "python", "python/" + parts[-1]
    if os.path.dirname(file) in _OURS:
        return "nemo_patches", "nemo_patches/" + parts[-1]
    return "", "/".join(parts[-2:])
