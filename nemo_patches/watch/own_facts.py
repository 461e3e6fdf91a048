"""What this rank says of itself: what the training thread has noted, and where it is now."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

from ..channel.own_socket import host_name
from ..facts import (
    CALLING,
    COMPUTING,
    LENGTH_SYNC,
    MOVING,
    NO_PAGE,
    ROUNDS_OF,
    RankFacts,
)
from ..sync import __version__
from ..sync.encoder_rounds import WatchedRounds
from ..sync.length_sync import current
from ..text import safe
from .incidents import Incidents
from .late_rounds import LateRounds
from .stalls import Stalls

# Parts of stall_timeout: for this long afterwards a rank counts as going on.
_CALLING_PART = 1 / 2
_MOVING_PART = 1 / 4
_COMPUTING_PART = 3 / 8  # longer than from one window to the next (progress.py)


class OwnFacts:
    """Used by the stall monitor's thread."""

    def __init__(
        self, incidents: Incidents, late_rounds: LateRounds, stalls: Stalls
    ) -> None:
        self._incidents = incidents
        self._late_rounds = late_rounds
        self._stalls = stalls

    def make(self) -> RankFacts:
        """As of now."""
        now = time.monotonic()
        incidents = self._incidents
        notes = incidents.notes
        progress = incidents.progress
        settings = current()
        last = notes.last
        timeout = settings.timeout
        # Without stall reports there is still `diagnose --job`.
        stall_timeout = settings.stall_timeout or timeout
        syncs = notes.syncs(incidents.group)
        in_sync = next(
            (f"{ROUNDS_OF}{sync.title}" for sync in syncs if sync.in_call), ""
        )
        if last.sync is not None and last.sync.in_call:
            in_sync = LENGTH_SYNC
        rounds, given_up = _rounds(
            syncs, now, timeout.total_seconds(), notes.may_be_uneven()
        )
        goes_on, goes_on_for = self._goes_on(now, stall_timeout.total_seconds())
        nemo = getattr(sys.modules.get("nemo"), "__version__", "?")
        reports_stalls = settings.stall_timeout > timedelta(0)
        facts = RankFacts(
            rank=incidents.group.rank,
            host=safe(host_name()),
            pid=os.getpid(),
            versions=f"nemo_patches {__version__}, nemo {nemo}",
            settings=settings.alike(),
            flag=notes.encoder_flag,
            encoder=last.sync.title if last.sync is not None else "",
            calls=last.calls,
            clock=last.clock,
            idle=now - last.since if last.since else -1.0,
            rounds=rounds,
            given_up=given_up,
            late=self._late_rounds.asks(),
            asks=incidents.need_judgement,
            apart=_apart(syncs),
            training=last.training,
            goes_on=goes_on,
            goes_on_for=goes_on_for,
            still=self._still_s(now),
            sleeps=progress.sleeps,
            page=self._stalls.page if reports_stalls and settings.on_stall else NO_PAGE,
            collective=in_sync,
        )
        since_s = now - (last.since or progress.stepped_at)
        away_after_s = (min(timeout, stall_timeout) / 2).total_seconds()
        is_away = since_s >= away_after_s
        # A rank that has ended an evaluation waits for the others from then on, and is not missing
        # meanwhile. They wait for less than the timeout only if they have waited in vain before.
        is_soon = not incidents.late.are_there and since_s < away_after_s / 2
        may_have_ended = not last.training and not is_soon
        if is_away or may_have_ended:
            incidents.late.run()
            from .place import with_place

            return with_place(facts, notes, progress, is_away=is_away)
        return facts

    def _still_s(self, now: float) -> float:
        """-1: not known, as where it is not known which thread trains."""
        is_known = self._incidents.progress.training_thread.known() is not None
        return self._incidents.progress.still_s(now) if is_known else -1.0

    def _goes_on(self, now: float, limit_s: float) -> tuple[str, float]:
        """How this rank goes on, and for how many seconds that counts."""
        last = self._incidents.notes.last
        progress = self._incidents.progress
        left = {
            CALLING: last.since + _CALLING_PART * limit_s - now if last.since else 0.0,
            MOVING: progress.stepped_at + _MOVING_PART * limit_s - now,
            COMPUTING: progress.worked_at + _COMPUTING_PART * limit_s - now,
        }
        goes_on = next((how for how, seconds in left.items() if seconds > 0), "")
        return goes_on, max(*left.values(), 0.0)


def _rounds(
    syncs: list[WatchedRounds], now: float, timeout_s: float, may_be_uneven: bool
) -> tuple[dict[str, int], dict[str, float]]:
    """By key: the latest round, the open ones last; and since when this rank no longer waits for
    it, if so. may_be_uneven: in an evaluation it then waits for nobody who might owe it that.
    """
    rounds = [(sync, round_) for sync in syncs if (round_ := sync.round) is not None]
    in_order = sorted(
        rounds, key=lambda one: (not one[0].has_come(one[1]), one[1].issued_at)
    )
    given_up = {
        sync.key: now - (round_.gave_up_at or round_.issued_at + timeout_s)
        for sync, round_ in rounds
        if (round_.training or not may_be_uneven)
        and not sync.has_come(round_)
        and (round_.gave_up_at or now - round_.issued_at >= timeout_s)
    }
    return {sync.key: sync.rounds.issued for sync, _ in in_order}, given_up


def _apart(syncs: list[WatchedRounds]) -> dict[str, str]:
    """By key: why none of this rank's encoders takes part in its rounds, where none does."""
    taking_part = {sync.key for sync in syncs if not sync.apart}
    return {sync.key: sync.apart for sync in syncs if sync.key not in taking_part}
