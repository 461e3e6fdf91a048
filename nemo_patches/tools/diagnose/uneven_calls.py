"""Uneven calls: a rank made more evaluation or training calls than another, or evaluated at another step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nemo_patches.text import named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.case import Case
from nemo_patches.tools.diagnose.endings import Ending, anchors, positions, weighted_kinds
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding
from nemo_patches.tools.diagnose.rank_trace import UNKNOWN, Track

_NEXT_STEPS = {  # by whether they are training calls
    False: "Make the number of evaluation batches equal on all ranks (DistributedSampler, drop_last, or streams of "
    "equal length). nemo_patches lets training go on; a metric that is gathered from all ranks may still wait.",
    True: "Make the number of training batches equal on all ranks (drop_last, DistributedSampler, "
    "limit_train_batches): the gradients' all-reduce waits for the rank that has fewer, and nothing can help it.",
}
_NEXT_STEP_ELSEWHERE = (
    "Have all ranks evaluate after the same training step (val_check_interval, callbacks, a condition that depends on "
    "the rank), and make their numbers of training batches equal."
)


@dataclass(frozen=True)
class UnevenRun:
    """Ranks that made more training or evaluation calls in a row than others did.

    elsewhere: the text, if those with fewer training calls evaluated after this row, and the others trained on.
    """

    training: bool
    more: frozenset[int]
    fewer: frozenset[int]
    call: int  # the first one too many, on a rank that has more
    elsewhere: str = ""


def uneven_calls(case: Case) -> list[tuple[Finding, UnevenRun]]:
    """For training and for evaluation calls at most one finding each, with the unevenness it is about."""
    uneven = [_told_by_counts(case, run) for run in (*_mixed_rounds(case), *_runs(case))]
    if elsewhere := [run for run in uneven if run.elsewhere]:  # later runs are compared with unlike ones
        first = min(elsewhere, key=lambda run: run.call)
        uneven = [*(run for run in uneven if run.call < first.call), first]
    by_kind = [[run for run in uneven if run.training == training] for training in (True, False)]
    return [(_finding(case, of_kind), of_kind[-1]) for of_kind in by_kind if of_kind]


def _finding(case: Case, uneven: list[UnevenRun]) -> Finding:
    first, kind = uneven[0], "training" if uneven[0].training else "evaluation"
    more, fewer = named(sorted(first.more)), named(sorted(first.fewer))
    fewer_ranks = len(first.fewer) < len(first.more) + first.training  # of two, the one whose batches ended first
    text = (
        f"{fewer} made fewer {kind} calls than {more}" if fewer_ranks else f"{more} made more {kind} calls than {fewer}"
    )
    count = len({run.call for run in uneven})
    times = f", {count} times" if count > 1 else ""
    text = f"{text}, from call {first.call} of {case.name} on{times}."
    ranks, next_step = tuple(sorted(first.fewer if fewer_ranks else first.more)), _NEXT_STEPS[first.training]
    if first.elsewhere:
        undecided = first.training and len(first.fewer) == len(first.more)
        ranks, text, next_step = () if undecided else ranks, first.elsewhere, _NEXT_STEP_ELSEWHERE
    severity = CRITICAL if first.training else WARNING
    evidence = tuple({f"{kind} call {run.call}: only on {named(sorted(run.more))}": None for run in uneven})[:4]
    return Finding(ids.UNEVEN_CALLS, severity, ranks, text, next_step, case.name, first.call, evidence=evidence)


def _told_by_counts(case: Case, run: UnevenRun) -> UnevenRun:
    """Fewer training calls in a row are fewer in all only if the totals say so; else a rank evaluated elsewhere."""
    if not run.training:
        return run
    kinds = {rank: weighted_kinds(case.tracks[rank]) for rank in run.more | run.fewer}
    trained = {rank: int(weights[kind == 1].sum()) for rank, (kind, weights) in kinds.items()}
    passes = {rank: int((np.diff(kind, prepend=1) == -1).sum()) for rank, (kind, _) in kinds.items()}
    once_more = min(passes[rank] for rank in run.fewer) > max(passes[rank] for rank in run.more)
    is_fewer = max(trained[rank] for rank in run.fewer) < min(trained[rank] for rank in run.more)
    if is_fewer and not once_more:
        return run
    who, others = named(sorted(run.fewer)), named(sorted(run.more))
    place = f"training call {run.call} of {case.name}"
    kind, weights = kinds[min(run.more)]
    here = np.array(case.tracks[min(run.more)].calls.n) < run.call
    trained_by_then = int(weights[here & (kind == 1)].sum())
    if not once_more or any(trained[rank] <= trained_by_then for rank in run.fewer):
        text = f"{who} evaluated where {others} made {place}: fewer batches, or an evaluation at another step."
        return replace(run, elsewhere=text)
    text = f"{who} evaluated once more than {others}, which made {place} there"
    if len(set(trained.values())) == 1:
        text += f"; each has made {next(iter(trained.values()))} training calls"
    return UnevenRun(False, run.fewer, run.more, run.call, f"{text}.")


def _mixed_rounds(case: Case) -> list[UnevenRun]:
    """Rounds in which some ranks made a training and some an evaluation call, right after all were level.

    Level: the round before completed in time on all ranks, at the same position. So a late rank is not mistaken for one
    that makes more calls.
    """
    rounds, starts = case.rounds, anchors(case.tracks)
    if len(rounds.ranks) < 2 or rounds.number.size < 2 or any(starts.get(rank) is None for rank in rounds.ranks):
        return []
    kinds, trained, evaluated = [], [], []
    for row, rank in enumerate(rounds.ranks):
        index, track = rounds.index[row], case.tracks[rank]
        kinds.append(np.array(track.calls.training)[index])
        training, evaluation = positions(track, starts[rank] or 0)
        trained.append(training[index])
        evaluated.append(evaluation[index])
    kind = np.stack(kinds)
    level = np.ones(kind.shape[1], dtype=bool)
    for rows in (kind, np.stack(trained), np.stack(evaluated)):
        level &= (rows == rows[0]).all(axis=0)
    mixed = ((kind == 0).any(axis=0) & (kind == 1).any(axis=0) & (kind != UNKNOWN).all(axis=0))[1:]
    uneven = []
    for before in np.flatnonzero(mixed & level[:-1] & (np.diff(rounds.number) == 1)):
        goes_on = kind[:, before + 1] == kind[:, before]
        more = frozenset(rank for rank, does in zip(rounds.ranks, goes_on, strict=True) if does)
        row = int(np.flatnonzero(goes_on)[0])
        call = case.tracks[rounds.ranks[row]].calls.n[int(rounds.index[row, before + 1])]
        uneven.append(UnevenRun(bool(kind[0, before]), more, frozenset(rounds.ranks) - more, call))
    return uneven


def _runs(case: Case) -> list[UnevenRun]:
    """Runs of one kind of call that are longer on some ranks, of those whose traces are complete from the start."""
    whole = {
        rank: track
        for rank, track in case.tracks.items()
        if track.calls.n and track.calls.n[0] == 1 and track.damaged_at < 0 and not case.job.traces[rank].damage
    }
    if len(whole) < 2:
        return []
    runs = {rank: _runs_of(track) for rank, track in whole.items()}
    all_ended = len(case.endings) == case.job.world_size and all(map(_came_to_its_end, case.endings.values()))
    uneven = []
    before = dict.fromkeys(whole, 0)
    for number in range(max(map(len, runs.values()))):
        there = {rank: run[number] for rank, run in runs.items() if number < len(run)}
        if len({training for training, _ in there.values()}) != 1:
            break
        closed = {
            rank: length
            for rank, (_, length) in there.items()
            if (all_ended and rank in case.sure) or number + 1 < len(runs[rank])
        }
        if closed:
            fewest = min(closed.values())
            more = frozenset(rank for rank, (_, length) in there.items() if length > fewest)
            fewer = frozenset(rank for rank, length in closed.items() if length == fewest)
            if more:
                call = before[min(more)] + fewest + 1
                uneven.append(UnevenRun(next(iter(there.values()))[0], more, fewer, call))
        for rank, (_, length) in there.items():
            before[rank] += length
    return uneven


def _runs_of(track: Track) -> list[tuple[bool, int]]:
    """Each run of one rank: whether it is of training calls, and how many."""
    kinds, weights = weighted_kinds(track)
    edges = np.flatnonzero(np.diff(kinds)) + 1
    pieces = zip(np.split(kinds, edges), np.split(weights, edges), strict=True)
    return [(bool(kind[0] == 1), int(weight.sum())) for kind, weight in pieces]


def _came_to_its_end(ending: Ending) -> bool:
    return ending.ended and not (ending.raised or ending.sync_ended or ending.in_vain or ending.process.error)
