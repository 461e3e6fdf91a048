"""Where a thread is, in one line:
the user's own code in full, innermost first, runs of library frames folded.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from itertools import groupby, takewhile
from operator import itemgetter

from .frames import stack
from .kernel_call import kernel_call
from .libraries import origin
from .occupation import KeptFrame, Occupation
from .occupation import occupation as occupation_of

LONGEST = 600  # characters
_OWN_FRAMES = 5
_FOLDS = 4


def where(thread: int) -> str:
    """The place of the thread with this identifier; empty if there is no such thread. At most
    LONGEST characters.

    "load (data/reader.py:31) < main (train.py:80), in: select (python/selectors.py:415) < get
    (torch/...)" is: `load` was called by `main` and has called into libraries, which are in
    `select`. Of each library only the innermost frame is told.
    """
    # The library (empty: the user's own code), and the text.
    places: list[tuple[str, str]] = []
    for frame in seen(thread):
        package, shown = origin(frame.code.co_filename)
        places.append((package, f"{frame.code.co_name} ({shown}:{frame.line})"))
    own = [text for package, text in places if not package]
    called = takewhile(itemgetter(0), places)
    inside = [next(run)[1] for _, run in groupby(called, itemgetter(0))]
    line = " < ".join(own[:_OWN_FRAMES])
    if len(own) > _OWN_FRAMES:
        line += f" < {len(own) - _OWN_FRAMES} more"
    if inside:
        line += (", in: " if own else "") + " < ".join(inside[:_FOLDS])
    return line[:LONGEST]


def occupation(thread: int, native_thread: int = 0) -> Occupation:
    """What this thread is doing; unknown if there is no such thread."""
    return occupation_of(seen(thread), kernel_call(native_thread))


def seen(thread: int) -> list[KeptFrame]:
    """What is kept of the frames of the thread with this identifier, innermost first; none if there
    is no such one.
    """
    return [KeptFrame(code, line or 0) for code, line in stack(thread)]
