"""This rank's progress: the steps that others may wait for, and whether it works meanwhile."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch.distributed

from ..text import first_line
from .late_modules import LateModules
from .log_line import report
from .training_notes import TrainingNotes
from .training_thread import TrainingThread

if TYPE_CHECKING:
    from .at_work import AtWork

NOT_COUNTED = -1
_FIRST_CALLS = 2  # of encoders
_FIRST_RISES = 10  # looks at which more collectives had begun
_FIRST_COLLECTIVES = 8  # DDP's construction and first step make up to 7
_BETWEEN_LOOKS_S = 0.2
_DEAD_PART = 1 / 4  # of stall_timeout
_AT_WORK_PART = 1 / 4  # of stall_timeout, after a step: nobody asks then
# Of stall_timeout: in which it is measured whether the rank works. Longer than what a program that
# looks at the machine every now and then takes for that.
_WINDOW_PART = 1 / 4
_SHORTEST_WINDOW_S = 0.25
# After such a pause counting begins again, or after this part of stall_timeout: the longer one
_HELD_UP_S = 2.0
_HELD_UP_PART = 1 / 4


class Progress:
    """What this rank has begun, and when it was last seen to move.

    stepped_at: time.monotonic() at which an encoder call or a collective has last begun; at first
    that of the making. worked_at: when it was last seen to work (at_work.py). moved_at: the latest
    of these two. has_started: whether it steps, as training does: else it may still be in its
    set-up. sleeps: whether the training thread has not run at all for long: it is in one wait. The
    stall monitor's thread calls `look` and `begin_anew`, and alone writes the fields; any thread
    may read.
    """

    def __init__(
        self,
        notes: TrainingNotes,
        late: LateModules,
        ranks_here: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """ranks_here: the processes of this host's other ranks, as far as they are known."""
        now = time.monotonic()
        # When counting has begun again, after a pause of the thread that looks.
        self.anew_at = 0.0
        self.begun = NOT_COUNTED  # operations that this rank has begun, in all its process groups
        self.stepped_at = now
        self.moved_at = now
        self.worked_at = -math.inf
        self.has_started = False
        self.sleeps = False
        self._rises = 0
        self._notes = notes
        self._late = late
        self.training_thread = TrainingThread(notes)
        self._ranks_here = ranks_here
        self._at_work: AtWork | None = None
        self._looked_at = now
        self._held_up_s = _HELD_UP_S
        self._looked_at_work = 0.0
        self._ran_at = now  # when the training thread last ran, however briefly
        self._uncounted = ""  # why the operations cannot be counted

    @property
    def has_begun(self) -> bool:
        """Whether it is beyond its set-up, as far as its collectives tell."""
        return self.has_started or self.begun >= _FIRST_COLLECTIVES

    def still_s(self, now: float) -> float:
        """Seconds since this rank was last seen to move; -1: not known, where nobody looks."""
        if now - self._looked_at > self._held_up_s:
            return -1.0
        return max(now - self.moved_at, 0.0)

    @property
    def busy_processes(self) -> frozenset[int]:
        """The data loader's workers that compute, and so do the processes that its training thread
        waits for.
        """
        return (
            self._at_work.busy_processes if self._at_work is not None else frozenset()
        )

    def look(self, now: float, limit_s: float) -> None:
        """limit_s: stall_timeout. Call it before this rank answers others."""
        self._held_up_s = max(_HELD_UP_S, _HELD_UP_PART * limit_s)
        if now - self._looked_at > self._held_up_s:
            # It was stopped and continued, or lacked Python's lock; or reports were off.
            self.begin_anew(now)
        self._looked_at = now
        self._count_steps(now, limit_s)
        self.training_thread.look(now, self.begun)
        if now - self.stepped_at < _AT_WORK_PART * limit_s:
            self._at_work = None
            self._ran_at = now
            self.sleeps = False
        elif now - self._looked_at_work >= min(_BETWEEN_LOOKS_S, limit_s / 8):
            self._looked_at_work = now
            self._look_at_work(now, limit_s)
            self.sleeps = now - self._ran_at >= _DEAD_PART * limit_s

    def begin_anew(self, now: float) -> None:
        """There was no look for long: it is not known what this rank did meanwhile."""
        self.anew_at = now
        self.moved_at = now
        self._at_work = None

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

    def _look_at_work(self, now: float, limit_s: float) -> None:
        self._late.run()
        from .at_work import AtWork

        if self._at_work is None:
            window_s = max(_WINDOW_PART * limit_s, _SHORTEST_WINDOW_S)
            self._at_work = AtWork(window_s, self._ranks_here)
        self._at_work.look(now, self.training_thread.known())
        if self._at_work.works:
            self.moved_at = now
            self.worked_at = now
        if self._at_work.has_run:
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
                # Of another backend, or destroyed just now.
                with contextlib.suppress(Exception):
                    count += int(group._get_sequence_number_for_group())
        return count
