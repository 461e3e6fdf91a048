"""This rank's progress: its encoder calls, its collectives, and how its training thread and loaders visibly move."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import torch.distributed

from . import stacks
from .loader_workers import WorkerMotion
from .log_line import report
from .motion import StackMotion
from .rank_text import first_line
from .training_notes import LastCall, TrainingNotes

NOT_COUNTED = -1


class Progress:
    """The stall monitor's thread calls `look` and `begin_anew`, and alone writes the fields; any thread may read."""

    def __init__(self, notes: TrainingNotes) -> None:
        self.begun = NOT_COUNTED  # operations that this rank has begun, in all its process groups
        self._notes = notes
        self._last = LastCall()  # the one that `_motion` comes after
        self._moved_at = 0.0  # time.monotonic(); an encoder call may be later
        self._motion: StackMotion | None = None
        self._workers = WorkerMotion()
        self._uncounted = ""  # why the operations cannot be counted

    def still_s(self, now: float) -> float:
        """Seconds since this rank has last been seen to move; -1 before its first encoder call."""
        last = self._notes.last
        return max(now - max(self._moved_at, last.since), 0.0) if last.since else -1.0

    def look(self, now: float, at_the_stack: bool) -> None:
        """at_the_stack: the last encoder call is long ago."""
        last, begun = self._notes.last, self._count(at_the_stack)
        if begun != self.begun:
            self.begun, self._moved_at = begun, now
        if last is not self._last or not at_the_stack:
            self._last, self._motion = last, None
        if at_the_stack:
            thread = stacks.training_thread(last.thread, last.native_thread)
            native_thread = last.native_thread if thread == last.thread else os.getpid()  # the main thread's
            self._motion = self._motion or StackMotion(native_thread)
            if self._workers.moved(now) | self._motion.moved(stacks.frames(thread)):
                self._moved_at = now

    def begin_anew(self, now: float) -> None:
        """Nobody has looked for long: what this rank did meanwhile is not known."""
        self._moved_at, self._motion, self._workers = now, None, WorkerMotion()

    def _count(self, is_wanted: bool) -> int:
        """Of all process groups: ranks that go on in one of their own move, too. 0.2 us each."""
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
