"""A backward that only some ranks made: they wait for the gradients of the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from nemo_patches.text import named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.alignment import Whole
from nemo_patches.tools.diagnose.case import Case, whom
from nemo_patches.tools.diagnose.endings import anchors, positions, weighted_kinds
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding
from nemo_patches.tools.diagnose.rank_trace import BACKWARD, CUT, NO_BACKWARD, NO_GRAPH, TIMEOUT, UNWAITED, Track

_ENOUGH_BACKWARDS = 3  # of a rank, to say that it makes each before its next call
_CALLS_TO_RECOVER = 3  # all ranks went on for so many training calls
_NEXT_STEP = (
    "Look for what leaves the backward out on this rank: an out-of-memory error that is swallowed, a check for NaN or "
    "for an empty batch that returns early. All ranks must make it, or none (reduce the decision over the ranks)."
)


@dataclass(frozen=True)
class SkippedBackward:
    """waiting: the ranks that wait in the backward of that call."""

    finding: Finding
    waiting: frozenset[int]


@dataclass(frozen=True)
class _Backwards:
    """The training calls of one rank whose output had a graph. Training calls are counted as in endings.py."""

    index: Whole  # of the call
    count: Whole  # of training calls up to it
    made: npt.NDArray[np.bool_]
    left_out: npt.NDArray[np.bool_]  # not made, and it cannot come any more

    @property
    def usual(self) -> bool:
        """Whether most calls have a backward: else one without is usual."""
        return bool(self.made.size and self.made.mean() > 0.5)


def skipped_backward(case: Case) -> SkippedBackward | None:
    """The first training call that has a backward on some ranks, and none on others, which went on without it.

    Ranks with damaged traces and calls without a graph (a frozen encoder) are left out.
    """
    starts = anchors(case.tracks)
    deferred = any(track.deferred for track in case.tracks.values())
    ranks = {
        rank: _backwards(track, start, deferred)
        for rank, track in case.tracks.items()
        if (start := starts.get(rank)) is not None and track.calls.n and case.job.traces[rank].damage in ("", CUT)
    }
    usual = {rank: of_rank for rank, of_rank in ranks.items() if of_rank.usual}
    made = np.unique(np.concatenate([of_rank.count[of_rank.made] for of_rank in usual.values()] or [np.zeros(0, int)]))
    left_out = {rank: np.intersect1d(of_rank.count[of_rank.left_out], made) for rank, of_rank in ranks.items()}
    first = min((int(counts[0]) for counts in left_out.values() if len(counts)), default=None)
    if first is None:
        return None
    without = sorted(rank for rank, counts in left_out.items() if first in counts)
    having = sorted(rank for rank, of_rank in usual.items() if first in of_rank.count[of_rank.made])
    calls = {rank: _call(case.tracks[rank], ranks[rank], first) for rank in without}
    total = sum(map(len, left_out.values()))
    times = f"; {total} backwards are missing in all" if total > len(without) else ""
    went_on = min(int(positions(case.tracks[rank], starts[rank] or 0)[0][-1]) for rank in ranks) - first
    in_vain = any(_in_vain_after(case.tracks[rank], ranks[rank], first) for rank in [*without, *having])
    waiting = {rank for rank in having if case.tracks[rank].calls.backward[-1] == BACKWARD}
    severity = WARNING if went_on >= _CALLS_TO_RECOVER and not in_vain and not waiting else CRITICAL
    call = calls[without[0]]
    text = f"{named(without)} made no backward of training call {call} of {case.name}, and went on to the next call; "
    text += f"{named(having)} made {'it' if len(having) == 1 else 'theirs'}{times}."
    evidence = [
        f"rank {rank}: call {n} has left the encoder with a graph, and no backward" for rank, n in calls.items()
    ]
    evidence += [f"in the backward, and not through it: {named(sorted(waiting))}"] if waiting else []
    finding = Finding(
        ids.NO_BACKWARD, severity, tuple(without), text, _NEXT_STEP, case.name, call, evidence=tuple(evidence[:8])
    )
    return SkippedBackward(finding, frozenset(waiting))


def _backwards(track: Track, start: int, deferred: bool) -> _Backwards:
    """deferred: some rank made a backward after entering a later call, so entering one does not show a skipped one."""
    calls = track.calls
    state = np.array(calls.backward)
    kinds, _ = weighted_kinds(track)
    index = np.flatnonzero((kinds == 1) & (state != NO_GRAPH) & (np.arange(len(state)) >= start))
    numbers, made = np.array(calls.n)[index], state[index] != NO_BACKWARD
    goes_on = numbers < track.settled
    if not deferred:
        goes_on |= (numbers < track.last) & (np.cumsum(made) >= _ENOUGH_BACKWARDS)
    return _Backwards(index, positions(track, start)[0][index], made, ~made & goes_on)


def _call(track: Track, of_rank: _Backwards, count: int) -> int:
    return track.calls.n[int(of_rank.index[np.searchsorted(of_rank.count, count)])]


def _in_vain_after(track: Track, of_rank: _Backwards, count: int) -> bool:
    """Whether one of the next calls' rounds did not come in time."""
    index = int(of_rank.index[np.searchsorted(of_rank.count, count)]) + 1
    return any(outcome in (TIMEOUT, UNWAITED) for outcome in track.calls.outcome[index : index + _CALLS_TO_RECOVER])


def unlike_backwards(case: Case, hang: Finding) -> Finding:
    """Explain a hang outside the encoder by the last backward, if some ranks wait in it and others do not."""
    last = {rank: track.calls.backward[-1] for rank, track in case.tracks.items() if track.calls.n}
    inside = sorted(rank for rank, state in last.items() if state == BACKWARD)
    if hang.id != ids.OUTSIDE or not inside or set(last) != set(case.sure) or NO_GRAPH in last.values():
        return hang
    before = sorted(rank for rank, state in last.items() if state == NO_BACKWARD and not case.sure[rank].process.waited)
    evidence = (f"in the backward, and not through it: {named(inside)}", *hang.evidence)
    if not before:
        return replace(hang, severity=CRITICAL, evidence=evidence)
    first = case.endings[before[0]]
    text = f"{whom(before, 'has', 'have')} come out of {case.call(first)}, and made no backward of it, which "
    text += f"{whom(inside, 'is', 'are')} in: left out, or stuck before it."
    return Finding(ids.NO_BACKWARD, CRITICAL, tuple(before), text, _NEXT_STEP, case.name, first.call, evidence=evidence)
