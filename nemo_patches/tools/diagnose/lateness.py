"""Verdicts on ranks that come late: a chronic straggler, single incidents that recovered, and timeouts at large."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from nemo_patches.runtime.naming import named, safe
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.aligning import Floats, Rounds
from nemo_patches.tools.diagnose.case import Case
from nemo_patches.tools.diagnose.columns import CAME, TIMEOUT
from nemo_patches.tools.diagnose.findings import NOTE, WARNING, Finding

_ROUNDS = 48  # fewer say nothing of a habit
_PIECES = 4  # in each of which a chronic straggler is the last in most rounds
_SHARE = 0.5  # of all waiting, and a part more where there are few ranks
_WAITING = 0.05  # of the time, below which waiting is nobody's trouble
_LAG = 0.005  # seconds


@dataclass(frozen=True)
class Waiting:
    """Who waited and for whom, over the rounds that all came to in time. By rank: seconds, shares, seconds."""

    waited: dict[int, float]
    caused: dict[int, float]
    lag: dict[int, float]


def waiting(rounds: Rounds) -> Waiting:
    """All waiting in a round is for the rank that came last to it."""
    if not rounds.number.size:
        return Waiting({}, {}, {})
    each: Floats = rounds.waited.sum(axis=0)
    last = rounds.waited.argmin(axis=0)
    caused = np.bincount(last, weights=each, minlength=len(rounds.ranks))
    total = float(each.sum()) or 1.0
    return Waiting(
        {rank: float(rounds.waited[row].sum()) for row, rank in enumerate(rounds.ranks)},
        {rank: float(caused[row]) / total for row, rank in enumerate(rounds.ranks)},
        {rank: float(np.median(rounds.lag[row])) for row, rank in enumerate(rounds.ranks)},
    )


def straggler(case: Case) -> list[Finding]:
    """The rank that the others wait for, again and again."""
    rounds = case.rounds
    size = len(rounds.ranks)
    if size < 2 or rounds.number.size < _ROUNDS:
        return []
    last = rounds.waited.argmin(axis=0)
    row = int(np.bincount(last, minlength=size).argmax())
    rank = rounds.ranks[row]
    share = waiting(rounds).caused[rank]
    others = np.delete(rounds.waited, row, axis=0)
    span = float(rounds.at[0][-1] - rounds.at[0][0])
    waits = float(np.median(others.mean(axis=0))) * rounds.number.size / span if span > 0 else 0.0
    lag = float(np.median(rounds.lag[row]))
    always = all((piece == row).mean() > 0.5 for piece in np.array_split(last, _PIECES))
    if share < _SHARE + 0.5 / size or waits < _WAITING or lag < _LAG or not always:
        return []
    header = case.job.traces[rank].header
    return [
        Finding(
            id=ids.STRAGGLER,
            severity=WARNING,
            ranks=(rank,),
            text=f"Rank {rank} is a chronic straggler: it comes last to most rounds, {lag * 1000:.0f} ms after the "
            f"first (median), and causes {share:.0%} of all waiting; the others wait {waits:.0%} of the time.",
            next_step=f"Compare {safe(header.host)} with the others: its disk and network, the processors left to its "
            "data loader, the GPU's clock; and its share of the data (longer files?).",
            encoder=case.name,
            evidence=(
                f"{rounds.number.size} rounds; last in {(last == row).mean():.0%} of them",
                *(f"rank {one}: median lag {np.median(rounds.lag[at]) * 1000:.1f} ms" for at, one in _worst(rounds)),
            ),
        )
    ]


def _worst(rounds: Rounds) -> list[tuple[int, int]]:
    lags = np.median(rounds.lag, axis=1)
    return [(int(row), rounds.ranks[int(row)]) for row in np.argsort(-lags)[:4]]


def incidents(case: Case) -> list[Finding]:
    """Rounds that some ranks gave up and others came to late; and timeouts that no trace explains."""
    gave_up: dict[int, list[int]] = defaultdict(list)
    came: dict[int, list[int]] = defaultdict(list)
    calls: dict[tuple[int, int], int] = {}
    latest = {rank: ending.round for rank, ending in case.endings.items()}
    for rank, track in case.tracks.items():
        outcome = np.array(track.calls.outcome, dtype=np.int8)
        rounds = np.array(track.calls.round, dtype=np.int64)
        for index in np.flatnonzero(outcome == TIMEOUT):
            gave_up[int(rounds[index])].append(rank)
            calls[int(rounds[index]), rank] = track.calls.n[int(index)]
    for rank, track in case.tracks.items():
        outcome = np.array(track.calls.outcome, dtype=np.int8)
        rounds = np.array(track.calls.round, dtype=np.int64)
        wanted = np.isin(rounds, list(gave_up)) & (outcome == CAME)
        for number in rounds[wanted]:
            came[int(number)].append(rank)
    late: Counter[int] = Counter(rank for ranks in came.values() for rank in set(ranks))
    told = [_late(case, rank, times, came, gave_up, calls) for rank, times in sorted(late.items())][:8]
    open_rounds = {number for number in gave_up if all(latest[rank] <= number for rank in gave_up[number])}
    unexplained = [number for number in gave_up if number not in came and number not in open_rounds]
    stuck = [number for number in open_rounds if number not in came]
    if unexplained or (stuck and not told):
        some = sorted(unexplained or stuck)
        ranks = tuple(sorted({rank for number in some for rank in gave_up[number]}))
        told.append(
            Finding(
                id=ids.TIMEOUTS,
                severity=NOTE,
                ranks=ranks,
                text=f"{named(ranks)} gave up waiting in {len(some)} rounds and went on with their own lengths; "
                "no trace tells for whom.",
                next_step="Look at the stall reports on stderr of these ranks: they name the missing rank.",
                encoder=case.name,
                call=calls[some[0], gave_up[some[0]][0]],
            )
        )
    return told


def _late(
    case: Case,
    rank: int,
    times: int,
    came: dict[int, list[int]],
    gave_up: dict[int, list[int]],
    calls: dict[tuple[int, int], int],
) -> Finding:
    first = min(number for number, ranks in came.items() if rank in ranks)
    others = sorted(set(gave_up[first]))
    call = calls[first, others[0]]
    where = next(
        (
            safe(place)
            for other in others
            for report in case.job.traces[other].missing
            for one, place in zip(report.ranks, report.where, strict=False)
            if one == rank and place and report.n == calls[first, other]
        ),
        "",
    )
    doing = f"; it was in {where}" if where else ""
    return Finding(
        id=ids.LATE,
        severity=WARNING,
        ranks=(rank,),
        text=f"Rank {rank} came too late to {times} {'round' if times == 1 else 'rounds'}, first to call {call} of "
        f"{case.name}; {named(others)} went on with their own lengths, and it recovered{doing}.",
        next_step="Look at what held this rank up then: a slow file or file system, a checkpoint, a log that only one "
        "rank writes. No number of the model was changed by it.",
        encoder=case.name,
        call=call,
        evidence=(f"round {first}: gave up: {named(others)}; came later: {named(sorted(set(came[first])))}",),
    )
