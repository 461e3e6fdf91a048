"""Endings: where each rank is at the end of its trace, comparable without the ranks' clocks.

A position is (training calls entered, evaluation calls entered since the last of them). Ranks that
train together have the same one, whatever evaluations went before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from nemo_patches.tools.diagnose.alignment import Whole
from nemo_patches.tools.diagnose.findings import LAYERS, LENGTH_SYNC
from nemo_patches.tools.diagnose.rank_end import (
    BY_HAND,
    ProcessEnd,
    error_of,
    process_end,
)
from nemo_patches.tools.diagnose.rank_trace import (
    BARE,
    CAME,
    CUT,
    ENDED,
    OPEN,
    RAISED,
    TIMEOUT,
    UNKNOWN,
    UNSYNCED,
    UNWAITED,
    RankTrace,
    Track,
)

Position = tuple[int, int]


@dataclass(frozen=True)
class Ending:
    """One rank at the end of its trace, for one encoder."""

    rank: int
    call: int = 0  # the number of its last call; 0 before the first
    training: bool | None = True  # None if it is not recorded
    position: Position = (0, 0)
    phase: str = ""  # where it is in that call; empty if it has left it
    raised: bool = False  # an exception ended that call
    round: int = 0  # the latest that it is known to have issued
    # That call gave up a round, or did not wait because an earlier one had not completed
    in_vain: bool = False
    sync_ended: bool = False  # its length sync, because a rank had gone
    ended: bool = False
    process: ProcessEnd = field(default_factory=ProcessEnd)
    unsure: str = (
        ""  # why it is not known what this rank did last; empty if it is known
    )
    # Only because its trace lacks the last round, as that of a killed rank may
    lost_last: bool = False

    @property
    def came_to(self) -> int:
        """The latest round that it may have issued."""
        return self.round + (self.phase == LENGTH_SYNC)

    @property
    def at_fault(self) -> bool:
        """Whether an exception of its own ended it, or its last call."""
        by_hand = self.process.error.partition(":")[0] in BY_HAND
        return bool(self.process.own_error) or (
            self.raised and not self.process.waited and not by_hand
        )

    @property
    def in_good_order(self) -> bool:
        return self.process.in_good_order and not self.raised and not self.inside

    @property
    def inside(self) -> bool:
        return bool(self.phase)

    @property
    def kind(self) -> str:
        return (
            ""
            if self.training is None
            else "training "
            if self.training
            else "evaluation "
        )


def endings(
    traces: dict[int, RankTrace], tracks: dict[int, Track], moving: bool
) -> dict[int, Ending]:
    """The ending of every rank with a trace, also if it has not called this encoder."""
    has_syncs = any(
        (np.array(track.calls.outcome) != UNSYNCED).any() for track in tracks.values()
    )
    # If only some traces were stopped, those ranks made calls that are not recorded; if all were,
    # the job is over.
    over = all(trace.is_over for trace in traces.values())
    by_rank = {
        rank: _ending(trace, tracks.get(rank), has_syncs, moving=moving, over=over)
        for rank, trace in traces.items()
    }
    # All had issued a round that came on one, by whichever of their encoders: a trace that lacks it
    # is incomplete.
    proven = max((_latest_that_came(track) for track in tracks.values()), default=0)
    for rank, ending in by_rank.items():
        came_to = max(ending.came_to, _latest_issued(traces[rank]))
        if (
            not ending.unsure
            and not ending.sync_ended
            and came_to < proven
            and not moving
        ):
            lost_last = came_to == proven - 1 and ending.process.unknown
            unsure = f"it came to round {proven}, which its trace does not have"
            ending = replace(ending, unsure=unsure, lost_last=lost_last)
        by_rank[rank] = replace(ending, round=max(ending.round, proven))
    return by_rank


def _latest_issued(trace: RankTrace) -> int:
    """The latest round that any of its encoders has issued: all share the rounds."""
    return max(
        (track.calls.round[-1] for track in trace.tracks.values() if track.calls.n),
        default=0,
    )


def _latest_that_came(track: Track) -> int:
    came = np.flatnonzero(np.array(track.calls.outcome) == CAME)
    return int(track.calls.round[came[-1]]) if len(came) else 0


def _ending(
    trace: RankTrace, track: Track | None, has_syncs: bool, *, moving: bool, over: bool
) -> Ending:
    """has_syncs: some call of this encoder has a length sync, on any rank."""
    ended, process = trace.ended is not None or over, process_end(trace)
    unsure = _why_unsure(trace, moving, over)
    if track is None or not track.calls.n:
        if trace.damage and not trace.cut:
            unsure = trace.damage
        return Ending(trace.rank, ended=ended, process=process, unsure=unsure)
    calls = track.calls
    if not process.error:
        process = _ended_in_call(trace, track, process)
    unsure = unsure or _why_its_call_is_unsure(
        trace, track, ended and not process.error
    )
    training = None if calls.training[-1] == UNKNOWN else bool(calls.training[-1])
    position = _position(track)
    if position is None:
        position = (0, track.last)
        unsure = unsure or "which of its calls are training calls is not known"
    return Ending(
        rank=trace.rank,
        call=calls.n[-1],
        training=training,
        position=position,
        phase=_phase(track, has_syncs) if track.is_open else "",
        raised=calls.ended[-1] == RAISED,
        round=calls.round[-1],
        in_vain=calls.outcome[-1] in (TIMEOUT, UNWAITED),
        sync_ended=calls.outcome[-1] == ENDED,
        ended=ended,
        process=process,
        unsure=unsure,
    )


def _why_unsure(trace: RankTrace, moving: bool, over: bool) -> str:
    """By the state of its file; empty if the end of the file is what the rank did last."""
    if trace.cut and not moving:
        return CUT
    stopped = (
        f"its trace was stopped: {trace.stopped}" if trace.stopped and not over else ""
    )
    return (
        trace.gap
        or ("lines of another process are in it" if trace.mixed else "")
        or stopped
    )


def _why_its_call_is_unsure(trace: RankTrace, track: Track, ended_unseen: bool) -> str:
    """ended_unseen: the process has ended, and no error of it is known."""
    calls = track.calls
    if damaged_at_the_end(track):
        return trace.damage
    is_bare = calls.ended[-1] == BARE and calls.training[-1] == UNKNOWN
    if is_bare and any(training != UNKNOWN for training in calls.training[-64:]):
        return "the beginning of its last call is not there"
    if calls.ended[-1] == OPEN and ended_unseen:
        return "it has ended within a call, and its trace does not say how"
    return ""


def _ended_in_call(trace: RankTrace, track: Track, process: ProcessEnd) -> ProcessEnd:
    """Add the exception of its last call, if another rank or a signal is the reason for it."""
    last = (track.name, track.calls.n[-1])
    raised = next(
        (raised for raised in reversed(trace.raised) if (raised.e, raised.n) == last),
        None,
    )
    error = error_of(raised) if raised is not None else None
    if error is None:
        return process
    if error.is_of_a_collective:
        return replace(process, error=error.line, waited=True)
    if (
        error.type.rpartition(".")[2] in BY_HAND
    ):  # a signal's handler raised it, wherever it found the rank
        return replace(process, error=error.line, terminated=True)
    return process


def _phase(track: Track, has_syncs: bool) -> str:
    return LENGTH_SYNC if has_syncs and track.calls.outcome[-1] == UNSYNCED else LAYERS


def damaged_at_the_end(track: Track) -> bool:
    return track.damaged_at >= track.last - 1


def _position(track: Track) -> Position | None:
    """Of the last call; None where it is not known which of the calls are training calls."""
    kinds, weights = weighted_kinds(track)
    is_whole = (weights == 1).all() and UNKNOWN not in track.calls.training
    if not is_whole and len(set(kinds.tolist())) > 1:
        return None
    is_training = kinds == 1
    since = np.flatnonzero(is_training)[-1] + 1 if is_training.any() else 0
    return int(weights[is_training].sum()), int(weights[since:].sum())


def weighted_kinds(track: Track) -> tuple[Whole, Whole]:
    """For each call whether it is a training call, and its weight: 1, and 1 for each call lost
    before it.
    """
    kinds = np.array(track.calls.training, dtype=np.int64)
    known = np.flatnonzero(kinds != UNKNOWN)
    if (
        0 < len(known) < len(kinds)
    ):  # a call whose beginning was not read gets its neighbour's kind
        kinds = kinds[
            known[
                np.clip(
                    np.searchsorted(known, np.arange(len(kinds)), "right") - 1, 0, None
                )
            ]
        ]
    return kinds, np.diff(np.array(track.calls.n), prepend=0)
