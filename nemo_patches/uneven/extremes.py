"""Rounds that tell every rank the highest and the lowest value of all, and a rank that has each.

MAX alone tells a rank that is ahead nothing of those behind; the lowest value is the MAX of its complement.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from nemo_patches.channel.side_channel import SideChannel

_RANK_BITS, VALUE_BITS, _BATCH_BITS = 20, 43, 26  # a rank and a value are one int64, and never a negative one
_RANKS, _VALUES, _BATCHES = 1 << _RANK_BITS, 1 << VALUE_BITS, 1 << _BATCH_BITS


class Place(NamedTuple):
    """Where a rank is in its passes over a loader. ended: it has no such batch."""

    pass_number: int  # from 1
    batch: int  # from 1
    ended: bool

    def value(self) -> int:
        """Places in order. Many passes or batches wrap: ranks are only asked whether they are at the same place."""
        return ((self.pass_number * _BATCHES + self.batch % _BATCHES) * 2 + self.ended) % _VALUES

    @classmethod
    def of(cls, value: int) -> Place:
        return cls(value // 2 // _BATCHES, value // 2 % _BATCHES, bool(value % 2))


class Extreme(NamedTuple):
    """A value, and the highest rank that has it."""

    value: int
    rank: int


class Extremes(NamedTuple):
    highest: Extreme
    lowest: Extreme


def packed(value: int, rank: int) -> tuple[int, int]:
    """What a rank sends: for the highest value, and for the lowest."""
    return value * _RANKS + rank, (_VALUES - 1 - value) * _RANKS + rank


def unpacked(highest: int, lowest: int) -> Extremes:
    """From the MAX of both."""
    lowest_extreme = Extreme(_VALUES - 1 - lowest // _RANKS, lowest % _RANKS)
    return Extremes(Extreme(highest // _RANKS, highest % _RANKS), lowest_extreme)


class ExtremesRounds:
    """At most one outstanding: `issue`, then `wait` until it gives the result. Both raise RoundFailed."""

    def __init__(self, channel: SideChannel, key: str) -> None:
        """key: the same on all ranks."""
        self._rank, self.last = channel.rank, channel.rounds(f"{key} lowest")
        self._first = channel.rounds(f"{key} highest")

    def issue(self, value: int) -> None:
        highest, lowest = packed(value, self._rank)
        self._first.issue(highest)
        self.last.issue(lowest)

    def wait(self, limit: timedelta) -> Extremes | None:
        """None if it has not come within `limit`, or within twice that where only its first half has."""
        if (highest := self._first.wait(limit)) is None or (lowest := self.last.wait(limit)) is None:
            return None
        return unpacked(highest, lowest)

    def close(self) -> None:
        """Nobody here wants them any more. Takes no lock: the garbage collector may call this anywhere."""
        self._first.closed = self.last.closed = True
