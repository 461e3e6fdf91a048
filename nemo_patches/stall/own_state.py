"""Makes this rank's own state, from what the training thread has noted and where it is now."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from ..sync import __version__
from ..sync.events import Group, WatchedRounds
from ..sync.settings import Settings
from ..text import safe
from . import stacks
from .kernel_call import waits_for_any_child
from .loader_workers import described, loader_workers
from .occupation import Occupation
from .progress import Progress
from .rank_kinds import LENGTH_SYNC, ROUNDS_OF
from .rank_state import CALLING, COMPUTING, MOVING, RankState
from .training_notes import TrainingNotes

# Parts of stall_timeout: for this long afterwards a rank counts as going on.
_CALLING_PART = 1 / 2
_MOVING_PART = 1 / 4


class OwnState:
    """Used by the stall monitor's thread."""

    def __init__(
        self, group: Group, notes: TrainingNotes, progress: Progress, settings: Callable[[], Settings]
    ) -> None:
        self._group = group
        self._notes = notes
        self._progress = progress
        self._settings = settings

    def make(self) -> RankState:
        """As of now."""
        now = time.monotonic()
        settings = self._settings()
        last = self._notes.last
        idle = now - last.since if last.since else -1.0
        timeout = settings.timeout
        # Without stall reports there is still `diagnose --job`.
        stall_timeout = settings.stall_timeout or timeout
        away_after = min(timeout, stall_timeout) / 2
        since_s = idle if last.since else now - self._progress.stepped_at
        away = timedelta(seconds=since_s) >= away_after
        workers = loader_workers() if away else ()
        thread = stacks.training_thread(last.thread, last.native_thread)
        # A rank that has ended an evaluation waits for the others from then on, and is not missing
        # meanwhile.
        looks = away or not last.training
        occupation = stacks.occupation(thread.ident, thread.native) if looks else Occupation()
        syncs = self._notes.syncs(self._group)
        in_sync = next((f"{ROUNDS_OF}{sync.title}" for sync in syncs if sync.in_call), "")
        if last.sync is not None and last.sync.in_call:
            in_sync = LENGTH_SYNC
        rounds, given_up = _rounds(syncs, now, timeout.total_seconds())
        goes_on, goes_on_for = self._goes_on(now, stall_timeout.total_seconds())
        settings_text = settings.alike()
        if self._notes.encoder_flag:
            settings_text += f"; {self._notes.encoder_flag}"
        nemo = getattr(sys.modules.get("nemo"), "__version__", "?")
        return RankState(
            rank=self._group.rank,
            host=safe(socket.gethostname()),
            pid=os.getpid(),
            versions=f"nemo_patches {__version__}, nemo {nemo}",
            settings=settings_text,
            encoder=last.sync.title if last.sync is not None else "",
            calls=last.calls,
            clock=last.clock,
            idle=idle,
            rounds=rounds,
            given_up=given_up,
            apart=_apart(syncs),
            training=last.training,
            goes_on=goes_on,
            goes_on_for=goes_on_for,
            still=self._progress.still_s(now),
            sleeps=self._progress.sleeps,
            where=stacks.where(thread.ident) if away else "",
            collective=in_sync or occupation.collective,
            caller=occupation.caller,
            hook=occupation.hook,
            activity=occupation.activity,
            request=occupation.request if away else "",
            waits_for_child=away and waits_for_any_child(),
            workers=workers,
            worker_states=described(workers, self._progress.busy_processes),
            batch=self._notes.batch() if away else "",
        )

    def _goes_on(self, now: float, limit_s: float) -> tuple[str, float]:
        """How this rank goes on, and for how many seconds that counts."""
        last = self._notes.last
        progress = self._progress
        left = {
            CALLING: last.since + _CALLING_PART * limit_s - now if last.since else 0.0,
            MOVING: progress.stepped_at + _MOVING_PART * limit_s - now,
            COMPUTING: progress.computed_at + _MOVING_PART * limit_s - now,
        }
        goes_on = next((how for how, seconds in left.items() if seconds > 0), "")
        return goes_on, max(*left.values(), 0.0)


def _rounds(syncs: list[WatchedRounds], now: float, timeout_s: float) -> tuple[dict[str, int], dict[str, float]]:
    """By key: the latest round, the open ones last; and since when this rank no longer waits for
    it, if so.
    """
    rounds = [(sync, round_) for sync in syncs if (round_ := sync.round) is not None]
    in_order = sorted(rounds, key=lambda one: (not one[0].has_come(one[1]), one[1].issued_at))
    given_up = {
        sync.key: now - (round_.gave_up_at or round_.issued_at + timeout_s)
        for sync, round_ in rounds
        if not sync.has_come(round_) and (round_.gave_up_at or now - round_.issued_at >= timeout_s)
    }
    return {sync.key: sync.rounds.issued for sync, _ in in_order}, given_up


def _apart(syncs: list[WatchedRounds]) -> dict[str, str]:
    """By key: why none of this rank's encoders takes part in its rounds, where none does."""
    taking_part = {sync.key for sync in syncs if not sync.apart}
    return {sync.key: sync.apart for sync in syncs if sync.key not in taking_part}
