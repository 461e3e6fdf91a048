"""Which thread of this process trains; it need not be the main one.

One that has been seen in an encoder call, in a collective or in a step.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import os
import threading
from typing import NamedTuple

import torch

from ..channel.daemon import own_threads
from .frames import stack, threads
from .training_notes import TrainingNotes

_TORCH = os.path.dirname(torch.__file__) + os.sep
# Of a thread that trains: files of torch's (2.6 to 2.15), in which it is.
_OF_STEPS = tuple(
    _TORCH + path.replace("/", os.sep)
    for path in (
        "autograd/graph.py",
        "distributed/_functional_collectives.py",
        "distributed/distributed_c10d.py",
        "distributed/fsdp/",
        "nn/parallel/distributed.py",
        "optim/",
    )
)
_SET_UP = "init_process_group"
# Steps at which a thread was seen; from then on it is looked for less often.
_MANY = 10
_BETWEEN_LOOKS_S = 5.0


class NumberedThread(NamedTuple):
    """ident: Python's number. native: the kernel's; 0: not known."""

    ident: int
    native: int


class TrainingThread:
    """The stall monitor's thread calls the methods."""

    def __init__(self, notes: TrainingNotes) -> None:
        self._notes = notes
        self._seen: dict[int, int] = {}  # by thread: at so many steps
        self._begun = -1
        self._looked_at = -math.inf

    def look(self, now: float, begun: int) -> None:
        """begun: the collectives that this rank has begun. One that lasts counts once: another
        thread may have waited in it in the set-up.
        """
        seen = max(self._seen.values(), default=0)
        if seen and (
            begun == self._begun
            or (seen >= _MANY and now - self._looked_at < _BETWEEN_LOOKS_S)
        ):
            return
        self._begun = begun
        self._looked_at = now
        in_steps = {ident: _is_in_a_step(ident) for ident in threads()}
        self._seen = {
            ident: self._seen.get(ident, 0) + is_in_a_step
            for ident, is_in_a_step in in_steps.items()
            if is_in_a_step or ident in self._seen
        }

    def known(self) -> NumberedThread | None:
        """The caller of the last encoder; else the one that has been seen at most steps, else the
        only thread that there is. None: not known.

        A GPU's backward has a thread of its own, which calls an encoder within
        torch.utils.checkpoint once more.
        """
        present = set(threads())
        last = self._notes.last
        if last.thread in present and os.path.exists(
            f"/proc/self/task/{last.native_thread}"
        ):
            return NumberedThread(last.thread, last.native_thread)
        seen = [ident for ident in self._seen if ident in present]
        main = threading.main_thread().ident or 0
        if seen:
            return _of(max(seen, key=lambda ident: (self._seen[ident], ident == main)))
        if present - own_threads.running().keys() == {main}:
            return _of(main)
        return None


def _of(ident: int) -> NumberedThread:
    if ident == threading.main_thread().ident:
        return NumberedThread(
            ident, os.getpid()
        )  # in a forked child its object has the parent's
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    return NumberedThread(ident, (thread.native_id if thread is not None else 0) or 0)


def _is_in_a_step(thread: int) -> bool:
    return any(
        code.co_filename.startswith(_OF_STEPS) and code.co_name != _SET_UP
        for code, _ in stack(thread)
    )
