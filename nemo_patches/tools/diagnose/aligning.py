"""Rounds that all ranks came to: who was late to each, and how far the clocks of the traces are apart.

A round is complete on all ranks at nearly the same moment, when the last one arrives. So a rank's lag is the longest
wait of all ranks less its own, and rounds with the same number tie the clocks together. Hosts' clocks are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from nemo_patches.tools.diagnose.columns import CAME, Track

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

_KNOTS = 64  # moments at which two clocks are compared; between them they drift evenly
_ROUNDS_AT_A_KNOT = 16


@dataclass(frozen=True)
class Rounds:
    """The rounds of one encoder that came in time on all these ranks; rows are ranks, columns are rounds.

    number: of the round. index: of the call, within the rank's calls. at: when it came, in seconds of the rank's own
    trace. waited: seconds.
    """

    ranks: tuple[int, ...]
    number: Whole
    index: Whole
    at: Floats
    waited: Floats

    @property
    def lag(self) -> Floats:
        """Seconds by which each rank came later than the first."""
        longest: Floats = self.waited.max(axis=0) - self.waited
        return longest


@dataclass(frozen=True)
class _Came:
    number: Whole
    index: Whole
    at: Floats
    waited: Floats


@dataclass(frozen=True)
class Clocks:
    """The traces' clocks on one scale, that of one rank. A rank that shares no round with it is not on the scale."""

    reference: int
    knots: dict[int, tuple[Floats, Floats]]  # own time, and what to add to it

    def common(self, rank: int, at: float | Floats) -> Floats | None:
        """Seconds of a rank's own trace on the common scale; None where that cannot be told."""
        if rank not in self.knots:
            return None
        moments, offsets = self.knots[rank]
        own = np.asarray(at, dtype=np.float64)
        together: Floats = own + np.interp(own, moments, offsets)
        return together


def shared_rounds(tracks: dict[int, Track]) -> Rounds:
    """The rounds that came in time on all the given ranks."""
    came = {rank: _came(track) for rank, track in tracks.items()}
    ranks = tuple(sorted(came))
    if not ranks:
        empty = np.zeros((0, 0))
        return Rounds((), np.zeros(0, np.int64), empty.astype(np.int64), empty, empty)
    number: Whole = reduce(lambda one, other: np.intersect1d(one, other, True), (came[rank].number for rank in ranks))
    where = {rank: np.searchsorted(came[rank].number, number) for rank in ranks}
    return Rounds(
        ranks,
        number,
        np.stack([came[rank].index[where[rank]] for rank in ranks]),
        np.stack([came[rank].at[where[rank]] for rank in ranks]),
        np.stack([came[rank].waited[where[rank]] for rank in ranks]),
    )


def clocks(tracks: dict[int, Track]) -> Clocks:
    """The clocks of the given ranks, by the rounds that each shares with the one that has the most."""
    came = {rank: _came(track) for rank, track in tracks.items()}
    if not came:
        return Clocks(-1, {})
    reference = max(sorted(came), key=lambda rank: len(came[rank].number))
    theirs = came[reference]
    knots = {reference: (np.zeros(1), np.zeros(1))}
    for rank, ours in came.items():
        if rank == reference:
            continue
        _, mine, other = np.intersect1d(ours.number, theirs.number, True, return_indices=True)
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


def _came(track: Track) -> _Came:
    calls = track.calls
    index = np.flatnonzero(np.array(calls.outcome, dtype=np.int8) == CAME)
    number = np.array(calls.round, dtype=np.int64)[index]
    at = np.array(calls.entered)[index] + np.array(calls.synced, dtype=np.float64)[index]
    waited = np.array(calls.waited, dtype=np.float64)[index]
    number, first = np.unique(number, return_index=True)
    return _Came(number, index[first], at[first], waited[first])
