"""Rows of training or evaluation calls that are longer on some ranks: fewer batches, or an
evaluation elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemo_patches.text import named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.case import Case
from nemo_patches.tools.diagnose.endings import Ending, weighted_kinds
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding
from nemo_patches.tools.diagnose.rank_trace import Track

_NEXT_STEPS = {  # by whether they are training calls
    False: (
        "Make the number of evaluation batches equal on all ranks (DistributedSampler,"
        " drop_last, or streams of equal length). nemo_patches lets training go on; a"
        " metric that is gathered from all ranks may still wait."
    ),
    True: (
        "Make the number of training batches equal on all ranks (drop_last,"
        " DistributedSampler, limit_train_batches), and have all ranks evaluate after"
        " the same step: the gradients' all-reduce waits for the rank that has fewer,"
        " and nothing can help it."
    ),
}


@dataclass(frozen=True)
class UnevenRow:
    """Ranks that made more training or evaluation calls in a row than others did.

    call: the first one too many, on a rank that has more. length: of the shorter row. is_last: the
    ranks with fewer made no call after it.
    """

    training: bool
    more: frozenset[int]
    fewer: frozenset[int]
    call: int
    length: int
    is_last: bool


def uneven_rows(case: Case) -> list[UnevenRow]:
    """Of ranks whose traces are whole, up to the first uneven row of training calls: later rows are
    unlike.
    """
    whole = {
        rank: track
        for rank, track in case.tracks.items()
        if track.calls.n
        and track.calls.n[0] == 1
        and track.damaged_at < 0
        and not case.job.traces[rank].damage
    }
    rows = {rank: _rows_of(track) for rank, track in whole.items()}
    # Traces that begin while a job trains may not begin at the same call.
    if len({track.calls.round[0] for track in whole.values()}) != 1:
        return []
    all_ended = len(case.endings) == case.job.world_size and all(
        map(_came_to_its_end, case.endings.values())
    )
    uneven: list[UnevenRow] = []
    before = dict.fromkeys(rows, 0)
    for number in range(max(map(len, rows.values()))):
        there = {
            rank: of_rank[number]
            for rank, of_rank in rows.items()
            if number < len(of_rank)
        }
        if len({training for training, _ in there.values()}) != 1:
            break
        ended = {
            rank: length
            for rank, (_, length) in there.items()
            if number + 1 < len(rows[rank]) or (all_ended and rank in case.sure)
        }
        fewest = min(ended.values(), default=0)
        more = frozenset(rank for rank, (_, length) in there.items() if length > fewest)
        if ended and more:
            fewer = frozenset(
                rank for rank, length in ended.items() if length == fewest
            )
            training = next(iter(there.values()))[0]
            is_last = all(number + 1 == len(rows[rank]) for rank in fewer)
            call = before[min(more)] + fewest + 1
            uneven.append(UnevenRow(training, more, fewer, call, fewest, is_last))
            if training:
                break
        for rank, (_, length) in there.items():
            before[rank] += length
    return uneven


def uneven_calls(case: Case, rows: list[UnevenRow], explains: bool) -> Finding:
    """Of rows of one kind. explains: why ranks are behind at the end."""
    first = rows[0]
    kind = "training" if first.training else "evaluation"
    more, fewer = named(sorted(first.more)), named(sorted(first.fewer))
    # Of two ranks the one whose batches ended first; where that one evaluates, the other one may as
    # well be wrong.
    names_fewer = len(first.fewer) < len(first.more) + first.training
    ranks = first.fewer if names_fewer else first.more
    text = f"{more} made more {kind} calls than {fewer}"
    if names_fewer:
        text = f"{fewer} made fewer {kind} calls than {more}"
    if first.training and not first.is_last:
        turned = (
            f"{fewer} went on to evaluation after {first.length} training calls in"
            " a row"
        )
        text = (
            f"{turned}, where {more} made more (fewer batches, or an evaluation at"
            " another step)"
        )
        if len(first.fewer) == len(first.more):
            ranks = frozenset()
    times = f", {len(rows)} times" if len(rows) > 1 else ""
    return Finding(
        ids.UNEVEN_CALLS,
        CRITICAL if first.training or explains else WARNING,
        tuple(sorted(ranks)),
        f"{text}, from call {first.call} of {case.name} on{times}.",
        _NEXT_STEPS[first.training],
        case.name,
        first.call,
        evidence=tuple(
            f"{kind} call {row.call}: only on {named(sorted(row.more))}"
            for row in rows[:4]
        ),
    )


def _rows_of(track: Track) -> list[tuple[bool, int]]:
    """Of one rank: whether each row is of training calls, and how many."""
    kinds, weights = weighted_kinds(track)
    edges = np.flatnonzero(np.diff(kinds)) + 1
    pieces = zip(np.split(kinds, edges), np.split(weights, edges), strict=True)
    return [(bool(kind[0] == 1), int(weight.sum())) for kind, weight in pieces]


def _came_to_its_end(ending: Ending) -> bool:
    return ending.ended and not (
        ending.raised or ending.sync_ended or ending.in_vain or ending.process.error
    )
