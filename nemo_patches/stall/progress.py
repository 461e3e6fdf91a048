"""This rank's progress: its encoder calls, its collectives, and how its training thread and loaders visibly move."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time
from typing import Any

import torch.distributed

from ..text import first_line
from . import stacks
from .loader_workers import WorkerMotion
from .log_line import report
from .motion import StackMotion
from .training_notes import LastCall, TrainingNotes

NOT_COUNTED = -1
_FIRST_CALLS, _FIRST_RISES = 2, 10  # encoder calls; looks at which more collectives had begun
_BETWEEN_LOOKS_S = 0.2
_DEAD_PART = 1 / 4  # of stall_timeout


class Progress:
    """What this rank has begun, and when it was last seen to move.

    stepped_at: time.monotonic() at which an encoder call or a collective has last begun; at first that of the making.
    moved_at: the same, or of a motion that its stack or its loaders show. has_started: whether it steps, as training
    does: else it may still be in its set-up. sleeps: whether the training thread has not run at all for long: it is in
    one wait.
    The stall monitor's thread calls `look` and `begin_anew`, and alone writes the fields; any thread may read.
    """

    def __init__(self, notes: TrainingNotes) -> None:
        self.begun = NOT_COUNTED  # operations that this rank has begun, in all its process groups
        self.stepped_at = self.moved_at = time.monotonic()  # the last of these, or encoder call; the last motion
        self.has_started = self.sleeps = False
        self._rises = 0
        self._notes = notes
        self._last = LastCall()  # the one that `_motion` comes after
        self._motion: StackMotion | None = None
        self._workers = WorkerMotion()
        self._looked_at = 0.0  # at the stack; so that a polling thread is not seen at every wake-up
        self._ran_at = self.moved_at  # when the training thread last ran, however briefly
        self._uncounted = ""  # why the operations cannot be counted

    def still_s(self, now: float) -> float:
        """Seconds since this rank was last seen to move."""
        return max(now - self.moved_at, 0.0)

    def look(self, now: float, limit_s: float) -> None:
        last = self._notes.last
        begun = self._count(now - self.stepped_at >= limit_s / 2)
        if begun > self.begun:
            self._rises += self.begun >= 0
            self.stepped_at = now
        self.begun = begun
        self.stepped_at = max(self.stepped_at, last.since)
        self.has_started = self.has_started or last.calls >= _FIRST_CALLS or self._rises >= _FIRST_RISES
        self.moved_at = max(self.moved_at, self.stepped_at)
        at_the_stack = limit_s > 0 and now - self.stepped_at >= limit_s / 2
        if last is not self._last or not at_the_stack:
            self._last, self._motion = last, None
        if at_the_stack and now - self._looked_at >= min(_BETWEEN_LOOKS_S, limit_s / 8):
            self._looked_at = now
            thread = stacks.training_thread(last.thread, last.native_thread)
            native_thread = last.native_thread if thread == last.thread else os.getpid()  # the main thread's
            self._motion = self._motion or StackMotion(native_thread)
            waits = any(frame.f_code.co_filename == subprocess.__file__ for frame in stacks.frames(thread))
            if self._workers.moved(now, waits) | self._motion.moved(stacks.frames(thread)):
                self.moved_at = now
            if self._motion.has_run:
                self._ran_at = now
            self.sleeps = now - self._ran_at >= _DEAD_PART * limit_s
        elif not at_the_stack:
            self.sleeps, self._ran_at = False, now

    def begin_anew(self, now: float) -> None:
        """There was no look for long: it is not known what this rank did meanwhile."""
        self.moved_at, self._motion, self._workers = now, None, WorkerMotion()

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
            with contextlib.suppress(Exception):  # of another backend, or destroyed just now
                count += 0 if group is world else int(group._get_sequence_number_for_group())
        return count
