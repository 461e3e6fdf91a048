"""Rounds that give every rank the highest and the lowest value, each with a rank that has it.

MAX alone tells a rank that is ahead nothing of those behind; the lowest value is the MAX of its
complement.
"""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from .exchange import Exchange
from .rounds import CLOSED

# A rank and a value are one int64, and never a negative one.
_RANK_BITS, VALUE_BITS = 20, 43
_RANKS, VALUES = 1 << _RANK_BITS, 1 << VALUE_BITS


class Extreme(NamedTuple):
    """A value, and the highest rank that has it."""

    value: int
    rank: int


class Extremes(NamedTuple):
    highest: Extreme
    lowest: Extreme


def packed(value: int, rank: int) -> tuple[int, int]:
    """What a rank sends: for the highest value, and for the lowest."""
    return value * _RANKS + rank, (VALUES - 1 - value) * _RANKS + rank


def unpacked(highest: int, lowest: int) -> Extremes:
    """From the MAX of both."""
    lowest_extreme = Extreme(VALUES - 1 - lowest // _RANKS, lowest % _RANKS)
    return Extremes(Extreme(highest // _RANKS, highest % _RANKS), lowest_extreme)


class ExtremesRounds:
    """At most one outstanding: `issue`, then `wait` until it gives the result. Both raise
    RoundFailed.
    """

    def __init__(self, exchange: Exchange, key: str) -> None:
        """key: the same on all ranks."""
        self._rank = exchange.rank
        self._first = exchange.rounds(f"{key} highest")
        self.last = exchange.rounds(f"{key} lowest")

    def issue(self, value: int) -> None:
        highest, lowest = packed(value, self._rank)
        self._first.issue(highest)
        self.last.issue(lowest)

    def wait(self, limit: timedelta) -> Extremes | None:
        """The result; None if it has not come within `limit`, or within twice that if its first
        half has.
        """
        if (highest := self._first.wait(limit)) is None or (
            lowest := self.last.wait(limit)
        ) is None:
            return None
        return unpacked(highest, lowest)

    def close(self, why: str = CLOSED) -> None:
        """As Rounds.close."""
        self._first.close(why)
        self.last.close(why)

    def leave(self) -> None:
        """As Rounds.leave."""
        self._first.leave()
        self.last.leave()
