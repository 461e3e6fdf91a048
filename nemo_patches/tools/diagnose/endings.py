"""Where each rank is at the end of its trace, so that ranks can be compared without their clocks.

A position is (training calls, evaluation calls since the last of them), both entered. Ranks that train together stand
at the same one, whatever evaluations went before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from nemo_patches.tools.diagnose.aligning import Whole, shared_rounds
from nemo_patches.tools.diagnose.columns import (
    BARE,
    CAME,
    ENDED,
    LEFT,
    OPEN,
    RAISED,
    TIMEOUT,
    UNKNOWN,
    UNSYNCED,
    UNWAITED,
    RankTrace,
    Track,
)
from nemo_patches.tools.diagnose.findings import GROWTH, LAYERS, LENGTH_SYNC, PRE_ENCODE

Position = tuple[int, int]


@dataclass(frozen=True)
class Ending:
    """One rank at the end of its trace, for one encoder.

    call: the number of its last call, 0 before the first. phase: where it is in that call; empty where it has come out.
    round: the latest that it is known to have issued. unsure: why what it did last is not known; empty where it is.
    """

    rank: int
    call: int
    training: bool | None  # None where it is not recorded
    position: Position
    phase: str
    raised: bool
    round: int
    in_vain: bool  # its last call gave up, or did not wait, because a round had not come
    sync_ended: bool
    ended: bool
    last: float
    unsure: str

    @property
    def inside(self) -> bool:
        return bool(self.phase)

    @property
    def kind(self) -> str:
        return "" if self.training is None else "training " if self.training else "evaluation "


@dataclass(frozen=True)
class Passes:
    """What the calls of an encoder go through, as far as any rank has shown."""

    sync: bool
    pre: bool
    layer: bool
    known: bool  # whether any call has come out


def passes(tracks: dict[int, Track]) -> Passes:
    """What the calls of this encoder go through."""
    found = Passes(False, False, False, False)
    for track in tracks.values():
        calls = track.calls
        out = np.array(calls.ended, dtype=np.int8) == LEFT
        found = Passes(
            found.sync or bool((np.array(calls.outcome, dtype=np.int8) != UNSYNCED).any()),
            found.pre or bool((~np.isnan(np.array(calls.pre))).any()),
            found.layer or bool((~np.isnan(np.array(calls.layer))).any()),
            found.known or bool(out.any()),
        )
    return found


def endings(traces: dict[int, RankTrace], tracks: dict[int, Track], moving: bool) -> dict[int, Ending]:
    """The ending of every rank that has a trace, also of one that has not called this encoder."""
    through = passes(tracks)
    starts = anchors(tracks)
    # Stopped everywhere, it is over; where on some ranks only, these made calls that are not there.
    over = all(trace.is_over for trace in traces.values())
    found = {
        rank: _ending(trace, tracks.get(rank), through, starts.get(rank), moving, over)
        for rank, trace in traces.items()
    }
    # A round that came on one rank had been issued by all: a trace that does not have it is not whole.
    proven = max((_latest_that_came(track) for track in tracks.values()), default=0)
    for rank, ending in found.items():
        if not ending.unsure and not ending.sync_ended and _could_have_issued(ending) < proven and not moving:
            ending = replace(ending, unsure=f"it came to round {proven}, which its trace does not have")
        found[rank] = replace(ending, round=max(ending.round, proven))
    return found


def _could_have_issued(ending: Ending) -> int:
    return ending.round + (ending.phase == LENGTH_SYNC)


def _latest_that_came(track: Track) -> int:
    came = np.flatnonzero(np.array(track.calls.outcome, dtype=np.int8) == CAME)
    return int(track.calls.round[came[-1]]) if len(came) else 0


def _ending(
    trace: RankTrace, track: Track | None, through: Passes, anchor: int | None, moving: bool, over: bool
) -> Ending:
    unsure = trace.gap or ("lines of another process are in it" if trace.mixed else "")
    if trace.stopped and not over:
        unsure = unsure or f"its trace was stopped: {trace.stopped}"
    ended = trace.ended is not None or over
    if trace.cut and not moving:
        unsure = "its last line is not whole"
    if track is None or not track.calls.n:
        if trace.damage and not trace.cut:
            unsure = trace.damage
        return Ending(trace.rank, 0, True, (0, 0), "", False, 0, False, False, ended, trace.last, unsure)
    calls = track.calls
    if damaged_at_the_end(track):
        unsure = unsure or trace.damage
    elif calls.ended[-1] == BARE and any(one != UNKNOWN for one in calls.training[-64:]):
        unsure = unsure or "the beginning of its last call is not there"
    elif calls.ended[-1] == OPEN and ended:
        unsure = unsure or "it has ended within a call, and its trace does not say how"
    position, kind = _position(track, anchor)
    if position is None:
        position, unsure = (0, calls.n[-1]), unsure or "which of its calls are training calls is not known"
    return Ending(
        rank=trace.rank,
        call=calls.n[-1],
        training=kind,
        position=position,
        phase=_phase(track, through) if calls.ended[-1] == OPEN else "",
        raised=calls.ended[-1] == RAISED,
        round=calls.round[-1],
        in_vain=calls.outcome[-1] in (TIMEOUT, UNWAITED),
        sync_ended=calls.outcome[-1] == ENDED,
        ended=ended,
        last=trace.last,
        unsure=unsure,
    )


def _phase(track: Track, through: Passes) -> str:
    calls = track.calls
    if through.sync and calls.outcome[-1] == UNSYNCED and math.isnan(calls.pre[-1]) and math.isnan(calls.layer[-1]):
        return LENGTH_SYNC
    if not math.isnan(calls.layer[-1]) or not math.isnan(calls.pre[-1]):
        return LAYERS
    if 0 < track.room < track.result:
        return GROWTH
    return PRE_ENCODE if through.pre or not through.known else LAYERS


def anchors(tracks: dict[int, Track]) -> dict[int, int | None]:
    """For each rank the call from which calls are counted: the first; where some are lost, one that all have in common.

    None where there is none, and for a rank whose trace is damaged at its end.
    """
    if all(not track.calls.n or (track.calls.n[0] == 1 and track.damaged_at < 0) for track in tracks.values()):
        return dict.fromkeys(tracks, 0)
    reliable = {rank: track for rank, track in tracks.items() if track.calls.n and not damaged_at_the_end(track)}
    found: dict[int, int | None] = dict.fromkeys(tracks)
    rounds = shared_rounds(reliable)
    if not rounds.number.size:
        return found
    fit = np.ones(rounds.number.size, dtype=bool)
    kinds = []
    for row, rank in enumerate(rounds.ranks):
        calls = tracks[rank].calls
        fit &= np.array(calls.n)[rounds.index[row]] > tracks[rank].damaged_at + 1
        kinds.append(np.array(calls.training, dtype=np.int8)[rounds.index[row]])
    fit &= (np.stack(kinds) == kinds[0]).all(axis=0) & (kinds[0] != UNKNOWN)
    # In evaluation, ranks that were late may be calls apart; in training they are not.
    for candidates in (np.flatnonzero(fit & (kinds[0] == 1)), np.flatnonzero(fit)):
        if len(candidates):
            return found | {rank: int(rounds.index[row, candidates[0]]) for row, rank in enumerate(rounds.ranks)}
    return found


def damaged_at_the_end(track: Track) -> bool:
    """Whether what a rank did last may not be what its trace shows."""
    return track.damaged_at >= track.last - 1


def _position(track: Track, anchor: int | None) -> tuple[Position | None, bool | None]:
    """The last call's, and whether it is a training call; no position where it is not known."""
    kinds, _ = weighted_kinds(track)
    last = None if kinds[-1] == UNKNOWN else bool(kinds[-1] == 1)
    if anchor is None:
        return ((0, track.last), last) if len(set(kinds.tolist())) == 1 else (None, last)
    training, evaluation = positions(track, anchor)
    return (int(training[-1]), int(evaluation[-1])), last


def positions(track: Track, anchor: int) -> tuple[Whole, Whole]:
    """Training calls, and evaluation calls since the last of them, at each call from the anchor on; 0 before it."""
    kinds, weights = weighted_kinds(track)
    weights[:anchor] = 0
    weights[anchor] = 1
    training = np.cumsum(np.where(kinds == 1, weights, 0))
    evaluation = np.cumsum(np.where(kinds == 1, 0, weights))
    return training, evaluation - np.maximum.accumulate(np.where(kinds == 1, evaluation, 0))


def weighted_kinds(track: Track) -> tuple[Whole, Whole]:
    """Whether each call is a training call, and for how many it stands: itself and those that are lost before it."""
    kinds = np.array(track.calls.training, dtype=np.int64)
    known = np.flatnonzero(kinds != UNKNOWN)
    if len(known):  # a call whose beginning was not read is taken for one like its neighbour
        kinds = kinds[known[np.clip(np.searchsorted(known, np.arange(len(kinds)), "right") - 1, 0, None)]]
    numbers = np.array(track.calls.n, dtype=np.int64)
    return kinds, np.diff(numbers, prepend=numbers[0] - 1)
