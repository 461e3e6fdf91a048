"""Logs, on a rank that returns to the encoder, that other ranks had waited for it, and gave up."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import time

from ..judging.found import Found
from ..sync.rounds import Group, Round, WatchedRounds
from .log_line import report
from .training_notes import TrainingNotes


class LateReturn:
    """The stall monitor's thread calls `heard` and `look`, and alone writes the fields."""

    def __init__(self, group: Group, notes: TrainingNotes) -> None:
        self._group = group
        self._notes = notes
        # By encoder: a round, and where this rank was then.
        self._waited_for: dict[str, tuple[int, str]] = {}
        self._said: dict[str, int] = {}  # by encoder: the last round

    def heard(self, found: Found) -> None:
        """A question has found ranks that have given up a round: did they wait for this one?"""
        now = time.monotonic()
        own = found.states.get(self._group.rank)
        for key, (number, gave_up_at) in _given_up(found, now).items():
            if own is None or number <= self._said.get(key, 0):
                continue
            sync = self._sync_of(key)
            round_ = _round_of(sync, number) if sync is not None else None
            if own.rounds.get(key, 0) < number and not own.apart.get(key):
                self._waited_for.setdefault(key, (number, own.where))
            elif round_ is not None and round_.issued_at > gave_up_at:
                self._waited_for.setdefault(key, (number, ""))

    def look(self) -> None:
        """Whether this rank has come to a round that others had waited for."""
        for key, (number, where) in list(self._waited_for.items()):
            sync = self._sync_of(key)
            if sync is None or (latest := sync.round) is None or latest.number < number:
                continue
            del self._waited_for[key]
            self._said[key] = number
            been = f"; it had been in {where}" if where else ""
            call = sync.call_title(_round_of(sync, number) or latest)
            report(
                logging.WARNING,
                f"other ranks waited for this one, and gave up ({call}){been}",
            )

    def _sync_of(self, key: str) -> WatchedRounds | None:
        """The one with the latest round: encoders have their rounds together."""
        called = [
            sync
            for sync in self._notes.syncs(self._group)
            if sync.key == key and sync.round is not None
        ]
        return max(called, key=lambda sync: sync.latest_rounds[-1].number, default=None)


def _round_of(sync: WatchedRounds, number: int) -> Round | None:
    """None if this rank has not come to it, or is far past it."""
    return next(
        (round_ for round_ in list(sync.latest_rounds) if round_.number == number), None
    )


def _given_up(found: Found, now: float) -> dict[str, tuple[int, float]]:
    """By encoder: the round that others have given up, and when the first of them had."""
    rounds: dict[str, tuple[int, float]] = {}
    for state in found.states.values():
        for key, seconds in state.given_up.items():
            number, at = state.rounds.get(key, 0), now - seconds
            before = rounds.get(key, (0, at))
            rounds[key] = (
                (number, min(at, before[1])) if number >= before[0] else before
            )
    return rounds
