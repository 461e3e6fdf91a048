"""The rounds that all ranks reached, how late each rank was to each, and the offsets between the traces' clocks.

A round completes on all ranks at nearly the same moment, when the last one arrives. So a rank's lag is the longest wait
of all ranks minus its own, and rounds with the same number tie the clocks together. Hosts' clocks are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from nemo_patches.tools.diagnose.rank_trace import CAME, Track

Floats = npt.NDArray[np.float64]
Floats32 = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int32]

_KNOTS = 64  # moments at which two clocks are compared; between them drift is taken to be linear
_ROUNDS_AT_A_KNOT = 16


@dataclass(frozen=True)
class Rounds:
    """The rounds of one encoder that completed in time on all these ranks; rows are ranks, columns are rounds."""

    ranks: tuple[int, ...]
    number: Whole  # of the round
    index: Indices  # of the call, within the rank's calls
    at: Floats  # when the round completed, in seconds of the rank's own trace
    waited: Floats32  # seconds

    @property
    def lag(self) -> Floats32:
        """Seconds by which each rank came later than the first."""
        longest: Floats32 = self.waited.max(axis=0) - self.waited
        return longest


@dataclass(frozen=True)
class _RoundsInTime:
    """One rank's rounds, as in Rounds."""

    number: Whole
    index: Indices
    at: Floats
    waited: Floats32


@dataclass(frozen=True)
class Clocks:
    """The traces' clocks on the reference rank's scale, without the ranks that share no round with it."""

    reference: int
    knots: dict[int, tuple[Floats, Floats]]  # by rank: own time, and what to add to it

    def common(self, rank: int, at: float) -> float | None:
        """Seconds of a rank's own trace on the common scale; None where that cannot be told."""
        return float(self.all_common(rank, np.array(at))) if rank in self.knots else None

    def all_common(self, rank: int, at: Floats) -> Floats:
        """Likewise of many moments of a rank that is on the scale."""
        common: Floats = at + np.interp(at, *self.knots[rank])
        return common

    def common_or_own(self, rank: int, at: float) -> float:
        common = self.common(rank, at)
        return at if common is None else common


def shared_rounds(tracks: dict[int, Track]) -> Rounds:
    in_time = {rank: _in_time(track) for rank, track in tracks.items()}
    ranks = tuple(sorted(in_time))
    if not ranks:
        empty = np.zeros((0, 0), np.float32)
        return Rounds((), np.zeros(0, np.int64), empty.astype(np.int32), empty.astype(np.float64), empty)
    number = reduce(_in_both, (in_time[rank].number for rank in ranks))
    rows = []
    for rank in ranks:  # one rank's arrays after the other: of a million calls, all take 60 MiB
        one = in_time.pop(rank)
        where = np.searchsorted(one.number, number)
        rows.append((one.index[where], one.at[where], one.waited[where]))
    return Rounds(ranks, number, *map(np.stack, zip(*rows, strict=True)))


def clocks(tracks: dict[int, Track]) -> Clocks:
    """The clocks of the given ranks, by the rounds that each shares with the rank that has the most."""
    in_time = {rank: _in_time(track) for rank, track in tracks.items()}
    if not in_time:
        return Clocks(-1, {})
    reference = max(sorted(in_time), key=lambda rank: len(in_time[rank].number))
    theirs = in_time[reference]
    knots = {reference: (np.zeros(1), np.zeros(1))}
    for rank, ours in in_time.items():
        if rank == reference:
            continue
        shared = _in_both(ours.number, theirs.number)
        mine, other = np.searchsorted(ours.number, shared), np.searchsorted(theirs.number, shared)
        if not len(mine):
            continue
        own = ours.at[mine]
        offsets = theirs.at[other] - own
        pieces = np.array_split(np.arange(len(own)), max(1, min(_KNOTS, len(own) // _ROUNDS_AT_A_KNOT)))
        knots[rank] = (
            np.array([np.median(own[piece]) for piece in pieces]),
            np.array([np.median(offsets[piece]) for piece in pieces]),
        )
    return Clocks(reference, knots)


def _in_both(left: Whole, right: Whole) -> Whole:
    """The rounds in both; each has every round once, in order. Nearly always both are the same."""
    return left if np.array_equal(left, right) else np.intersect1d(left, right, True)


def _in_time(track: Track) -> _RoundsInTime:
    calls = track.calls
    index = np.flatnonzero(np.array(calls.outcome) == CAME).astype(np.int32)
    number = np.array(calls.round)[index]
    synced = np.array(calls.synced, dtype=np.float64)[index]
    entered = np.array(calls.entered)
    at: Floats = entered[index] + synced
    waited = np.array(calls.waited)[index]
    if (np.diff(number) > 0).all():
        return _RoundsInTime(number, index, at, waited)
    number, first = np.unique(number, return_index=True)
    return _RoundsInTime(number, index[first], at[first], waited[first])
