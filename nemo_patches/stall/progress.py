"""This rank's progress: the steps that others may wait for, and whether it computes meanwhile."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import logging
import subprocess
import time
from typing import Any

import torch.distributed

from ..text import first_line
from . import stacks
from .loader_workers import WorkerMotion
from .log_line import report
from .motion import ThreadMotion
from .training_notes import TrainingNotes

NOT_COUNTED = -1
_FIRST_CALLS = 2  # of encoders
_FIRST_RISES = 10  # looks at which more collectives had begun
_BETWEEN_LOOKS_S = 0.2
_DEAD_PART = 1 / 4  # of stall_timeout


class Progress:
    """What this rank has begun, and when it was last seen to move.

    stepped_at: time.monotonic() at which an encoder call or a collective has last begun; at first that of the making.
    moved_at: the same, or when its training thread, a process that this thread waits for, or a loader's worker last
    computed. has_started: whether it steps, as training does: else it may still be in its set-up. sleeps: whether the
    training thread has not run at all for long: it is in one wait.
    The stall monitor's thread calls `look` and `begin_anew`, and alone writes the fields; any thread may read.
    """

    def __init__(self, notes: TrainingNotes) -> None:
        now = time.monotonic()
        self.begun = NOT_COUNTED  # operations that this rank has begun, in all its process groups
        self.stepped_at = now
        self.moved_at = now
        self.has_started = False
        self.sleeps = False
        self._rises = 0
        self._notes = notes
        self._motion: ThreadMotion | None = None
        self._workers = WorkerMotion()
        self._looked_at = 0.0  # at the stack
        self._ran_at = now  # when the training thread last ran, however briefly
        self._uncounted = ""  # why the operations cannot be counted

    def still_s(self, now: float) -> float:
        """Seconds since this rank was last seen to move."""
        return max(now - self.moved_at, 0.0)

    def look(self, now: float, limit_s: float) -> None:
        self._count_steps(now, limit_s)
        if limit_s <= 0 or now - self.stepped_at < limit_s / 2:
            self._motion = None
            self._ran_at = now
            self.sleeps = False
        elif now - self._looked_at >= min(_BETWEEN_LOOKS_S, limit_s / 8):
            self._looked_at = now
            self._look_at_the_thread(now)
            self.sleeps = now - self._ran_at >= _DEAD_PART * limit_s

    def begin_anew(self, now: float) -> None:
        """There was no look for long: it is not known what this rank did meanwhile."""
        self.moved_at = now
        self._motion = None
        self._workers = WorkerMotion()

    def _count_steps(self, now: float, limit_s: float) -> None:
        last = self._notes.last
        begun = self._count(is_wanted=now - self.stepped_at >= limit_s / 2)
        if begun > self.begun:
            self.stepped_at = now
            if self.begun != NOT_COUNTED:
                self._rises += 1
        self.begun = begun
        self.stepped_at = max(self.stepped_at, last.since)
        self.moved_at = max(self.moved_at, self.stepped_at)
        self.has_started = self.has_started or last.calls >= _FIRST_CALLS or self._rises >= _FIRST_RISES

    def _look_at_the_thread(self, now: float) -> None:
        last = self._notes.last
        thread = stacks.training_thread(last.thread, last.native_thread)
        frames = stacks.seen(thread.ident)
        if self._motion is None or self._motion.native_thread != thread.native:
            self._motion = ThreadMotion(thread.native)
        self._motion.look(frames)
        waits = any(frame.code.co_filename == subprocess.__file__ for frame in frames)
        workers_compute = self._workers.moved(now, waits_for_process=waits)
        if self._motion.computes or workers_compute:
            self.moved_at = now
        if self._motion.has_run:
            self._ran_at = now

    def _count(self, is_wanted: bool) -> int:
        """The sum over all process groups: a rank that works in its own group moves, too. 0.2 us each."""
        world: Any = torch.distributed.group.WORLD
        if self._uncounted or world is None:
            return NOT_COUNTED
        try:
            count = int(world._get_sequence_number_for_group())
        except Exception as error:  # each backend, and each torch, has its own
            if is_wanted:
                self._uncounted = first_line(error)
                report(logging.INFO, f"the collectives that this rank begins are not counted here: {self._uncounted}")
            return NOT_COUNTED
        groups: list[Any] = list(torch.distributed.distributed_c10d._world.pg_map)
        for group in groups:
            if group is not world:
                with contextlib.suppress(Exception):  # of another backend, or destroyed just now
                    count += int(group._get_sequence_number_for_group())
        return count
