"""This rank's progress: the steps that others may wait for, and whether it computes meanwhile."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import logging
import math
import subprocess
import time
from typing import Any

import torch.distributed

from ..judging.kinds import is_guess
from ..text import first_line
from . import stacks
from .kernel_call import kernel_call
from .loader_workers import WorkerMotion
from .log_line import report
from .motion import ThreadMotion
from .occupation import occupation
from .torch_knows import has_gpu
from .training_notes import TrainingNotes

NOT_COUNTED = -1
_FIRST_CALLS = 2  # of encoders
_FIRST_RISES = 10  # looks at which more collectives had begun
_BETWEEN_LOOKS_S = 0.2
_DEAD_PART = 1 / 4  # of stall_timeout
_AT_WORK_PART = 1 / 4  # of stall_timeout, after a step: nobody asks then
_WINDOW_PART = 1 / 4  # of stall_timeout


class Progress:
    """What this rank has begun, and when it was last seen to move.

    stepped_at: time.monotonic() at which an encoder call or a collective has last begun; at first
    that of the making. computed_at: when its training thread, a process that this thread waits for,
    or a loader's worker was last seen to compute. moved_at: the latest of these two, but that its
    training thread must have got on in its code: an empty loop is no sign of life. has_started:
    whether it steps, as training does: else it may still be in its set-up. sleeps: whether the
    training thread has not run at all for long: it is in one wait. The stall monitor's thread calls
    `look` and `begin_anew`, and alone writes the fields; any thread may read.
    """

    def __init__(self, notes: TrainingNotes) -> None:
        now = time.monotonic()
        self.begun = NOT_COUNTED  # operations that this rank has begun, in all its process groups
        self.stepped_at = now
        self.moved_at = now
        self.computed_at = -math.inf
        self.has_started = False
        self.sleeps = False
        self._rises = 0
        self._notes = notes
        self._motion: ThreadMotion | None = None
        self._workers = WorkerMotion()
        self._looked_at = 0.0  # at the stack
        self._window_s = 0.0  # in which it is measured whether the thread computes
        self._ran_at = now  # when the training thread last ran, however briefly
        self._uncounted = ""  # why the operations cannot be counted

    def still_s(self, now: float) -> float:
        """Seconds since this rank was last seen to move."""
        return max(now - self.moved_at, 0.0)

    @property
    def busy_processes(self) -> frozenset[int]:
        """The data loader's workers that compute, and the processes that its training thread waits
        for.
        """
        return self._workers.busy

    def look(self, now: float, limit_s: float) -> None:
        self._count_steps(now, limit_s)
        self._window_s = _WINDOW_PART * limit_s
        if limit_s <= 0 or now - self.stepped_at < _AT_WORK_PART * limit_s:
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
        if last.calls >= _FIRST_CALLS or self._rises >= _FIRST_RISES:
            self.has_started = True

    def _look_at_the_thread(self, now: float) -> None:
        last = self._notes.last
        thread = stacks.training_thread(last.thread, last.native_thread)
        frames = stacks.seen(thread.ident)
        if self._motion is None or self._motion.native_thread != thread.native:
            self._motion = ThreadMotion(thread.native, self._window_s)
        self._motion.look(frames)
        waits_in = occupation(frames, kernel_call(thread.native)).collective
        if is_guess(waits_in) and not has_gpu():
            waits_in = ""  # such a call computes there
        waits = any(frame.code.co_filename == subprocess.__file__ for frame in frames)
        has_busy_workers = self._workers.moved(now, waits_for_process=waits)
        if self._motion.moves or (has_busy_workers and not waits_in):
            self.moved_at = now
            self.computed_at = now
        elif self._motion.computes and not waits_in:  # such a wait may take a core
            self.computed_at = now
        if self._motion.has_run:
            self._ran_at = now

    def _count(self, is_wanted: bool) -> int:
        """The sum over all process groups: a rank that works in its own group moves, too. 0.2 us
        each.
        """
        world: Any = torch.distributed.group.WORLD
        if self._uncounted or world is None:
            return NOT_COUNTED
        try:
            count = int(world._get_sequence_number_for_group())
        except Exception as error:  # each backend, and each torch, has its own
            if is_wanted:
                self._uncounted = first_line(error)
                text = "the collectives that this rank begins are not counted here"
                report(logging.INFO, f"{text}: {self._uncounted}")
            return NOT_COUNTED
        groups: list[Any] = list(torch.distributed.distributed_c10d._world.pg_map)
        for group in groups:
            if group is not world:
                with contextlib.suppress(Exception):  # of another backend, or destroyed just now
                    count += int(group._get_sequence_number_for_group())
        return count
