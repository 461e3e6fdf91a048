"""The rounds that all ranks reached, how late each rank was to each, and the offsets between the
traces' clocks.

A round completes on all ranks at nearly the same moment, when the last one arrives. So a rank's lag
is the longest wait of all ranks minus its own, and rounds with the same number tie the clocks
together. Hosts' clocks are not compared.
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

_LAST_ROUNDS = 64  # by which two clocks are compared: what happened at the end counts


@dataclass(frozen=True)
class Rounds:
    """The rounds of one encoder that completed in time on all these ranks; rows are ranks, columns
    are rounds.
    """

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
class Clocks:
    """What to add to each trace's times for the reference rank's; without ranks that share no round
    with it.
    """

    reference: int
    offsets: dict[int, float]

    def common(self, rank: int, at: float) -> float | None:
        """Seconds of a rank's own trace on the common scale; None where that cannot be told."""
        return at + self.offsets[rank] if rank in self.offsets else None


def shared_rounds(tracks: dict[int, Track]) -> Rounds:
    ranks = tuple(sorted(tracks))
    in_time = [_in_time(tracks[rank]) for rank in ranks]
    number = (
        reduce(_in_both, (one.number for one in in_time))
        if in_time
        else np.zeros(0, np.int64)
    )
    where = [np.searchsorted(one.number, number) for one in in_time]
    shape = (len(ranks), len(number))
    return Rounds(
        ranks,
        number,
        np.array(
            [one.index[0][at] for one, at in zip(in_time, where, strict=True)], np.int32
        ).reshape(shape),
        np.array(
            [one.at[0][at] for one, at in zip(in_time, where, strict=True)], np.float64
        ).reshape(shape),
        np.array(
            [one.waited[0][at] for one, at in zip(in_time, where, strict=True)],
            np.float32,
        ).reshape(shape),
    )


def clocks(tracks: dict[int, Track]) -> Clocks:
    """The clocks of the given ranks, by the last rounds that each shares with the rank that has the
    most.
    """
    in_time = {rank: _in_time(track) for rank, track in sorted(tracks.items())}
    if not in_time:
        return Clocks(-1, {})
    reference = max(in_time, key=lambda rank: len(in_time[rank].number))
    theirs = in_time[reference]
    offsets = {reference: 0.0}
    for rank, ours in in_time.items():
        shared = _in_both(ours.number, theirs.number)[-_LAST_ROUNDS:]
        if len(shared):
            own = ours.at[0][np.searchsorted(ours.number, shared)]
            other = theirs.at[0][np.searchsorted(theirs.number, shared)]
            offsets[rank] = float(np.median(other - own))
    return Clocks(reference, offsets)


def _in_both(left: Whole, right: Whole) -> Whole:
    """The rounds in both; each has every round once, in order. Nearly always both are the same."""
    return left if np.array_equal(left, right) else np.intersect1d(left, right, True)


def _in_time(track: Track) -> Rounds:
    """One rank's rounds; of a round that several calls have, the first."""
    calls = track.calls
    index = np.flatnonzero(np.array(calls.outcome) == CAME)
    number, first = np.unique(np.array(calls.round)[index], return_index=True)
    index = index[first]
    at: Floats = np.array(calls.entered)[index] + np.array(calls.synced)[index]
    return Rounds(
        (),
        number,
        index[None, :].astype(np.int32),
        at[None, :],
        np.array(calls.waited)[index][None, :],
    )
