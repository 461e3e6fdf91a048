"""Whether the training thread, a process that it waits for, or a data loader's worker computes."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import subprocess

from ..judging.kinds import is_guess
from . import stacks
from .kernel_call import kernel_call
from .loader_workers import WorkerMotion
from .motion import ThreadMotion
from .occupation import occupation
from .torch_knows import has_gpu
from .training_notes import TrainingNotes


class ThreadAtWork:
    """One thread calls `look`; the other fields are of the last one.

    moves: the thread has got on in its code, or what it waits for computes. computes: one of these,
    or the thread computes, in one place perhaps. has_run: however briefly.
    """

    def __init__(self, notes: TrainingNotes, window_s: float) -> None:
        """window_s: in which it is measured whether the thread computes."""
        self.moves = False
        self.computes = False
        self.has_run = True
        self._notes = notes
        self._window_s = window_s
        self._motion: ThreadMotion | None = None
        self._workers = WorkerMotion()

    @property
    def busy_processes(self) -> frozenset[int]:
        return self._workers.busy

    def look(self, now: float) -> None:
        last = self._notes.last
        thread = stacks.training_thread(last.thread, last.native_thread)
        frames = stacks.seen(thread.ident)
        if self._motion is None or self._motion.native_thread != thread.native:
            self._motion = ThreadMotion(thread.native, self._window_s)
        motion = self._motion
        motion.look(frames)
        waits_in = occupation(frames, kernel_call(thread.native)).collective
        if is_guess(waits_in) and not has_gpu():
            waits_in = ""  # such a call computes there
        waits = any(frame.code.co_filename == subprocess.__file__ for frame in frames)
        has_busy_workers = self._workers.moved(now, waits_for_process=waits)
        self.moves = motion.moves or (has_busy_workers and not waits_in)
        # A wait in a collective may take a core.
        self.computes = self.moves or (motion.computes and not waits_in)
        self.has_run = motion.has_run
