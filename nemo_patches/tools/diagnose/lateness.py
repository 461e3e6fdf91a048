"""Lateness: for which ranks the others waited, the one that they always wait for, and late ones
that recovered.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.alignment import Floats, Rounds
from nemo_patches.tools.diagnose.case import Case
from nemo_patches.tools.diagnose.findings import WARNING, Finding
from nemo_patches.tools.diagnose.rank_trace import CAME, TIMEOUT

_LEAST_ROUNDS = 48  # fewer show no habit
_PIECES = 4  # of the rounds; a chronic straggler is last in most rounds of each
_LEAST_SHARE = 0.5  # of all waiting; more where there are few ranks
_LEAST_WAITING = 0.05  # share of the time; less waiting does no harm
_LEAST_LAG_S = 0.005
_MOST_FINDINGS = 8


@dataclass(frozen=True)
class Waiting:
    """For which ranks the others waited, over the rounds that completed in time on all."""

    caused: dict[int, float]  # share of all ranks' waiting
    lag: dict[int, float]  # seconds, the median
    share: float  # of the ranks' time


def waiting(rounds: Rounds) -> Waiting:
    """In each round all waiting is for the rank that came last."""
    if not rounds.number.size:
        return Waiting({}, {}, 0.0)
    in_round: Floats = rounds.waited.sum(axis=0, dtype=np.float64)
    last = rounds.waited.argmin(axis=0)
    caused = np.bincount(last, weights=in_round, minlength=len(rounds.ranks))
    total = float(in_round.sum()) or 1.0
    lags = np.median(rounds.lag, axis=1)
    return Waiting(
        {rank: float(caused[row]) / total for row, rank in enumerate(rounds.ranks)},
        {rank: float(lags[row]) for row, rank in enumerate(rounds.ranks)},
        (
            float(in_round.sum()) / span
            if (span := float(np.ptp(rounds.at, axis=1).sum())) > 0
            else 0.0
        ),
    )


def straggler(case: Case) -> list[Finding]:
    """The rank that the others wait for again and again, if there is one.

    None where several come last together: each may have waited for the other before the encoder, as
    in DDP's broadcast of buffers.
    """
    rounds = case.rounds
    if len(rounds.ranks) < 2 or rounds.number.size < _LEAST_ROUNDS:
        return []
    times = waiting(rounds)
    rank = max(times.caused, key=times.caused.__getitem__)
    lag, share = times.lag[rank], times.caused[rank]
    row = rounds.ranks.index(rank)
    others = np.delete(rounds.waited, row, axis=0)
    span = float(rounds.at[0][-1] - rounds.at[0][0])
    waits = (
        float(np.median(others.mean(axis=0))) * rounds.number.size / span
        if span > 0
        else 0.0
    )
    is_last = rounds.waited[row] < others.min(axis=0)
    is_alone = all(
        lag >= 2 * of_other for other, of_other in times.lag.items() if other != rank
    )
    always = all(piece.mean() > 0.5 for piece in np.array_split(is_last, _PIECES))
    is_much = (
        share >= _LEAST_SHARE + 0.5 / len(rounds.ranks)
        and waits >= _LEAST_WAITING
        and lag >= _LEAST_LAG_S
    )
    if not (is_alone and always and is_much):
        return []
    host = safe(case.job.traces[rank].header.host)
    text = (
        f"Rank {rank} is a chronic straggler: it comes last to most rounds,"
        f" {lag * 1000:.0f} ms after the first "
    )
    text += (
        f"(median), and causes {share:.0%} of all waiting; the others wait {waits:.0%}"
        " of the time."
    )
    next_step = (
        f"Compare {host} with the others: its disk and network, the processors left to"
        " its data loader, the "
    )
    next_step += "GPU's clock; and its share of the data (longer files?)."
    evidence = (f"{rounds.number.size} rounds; last in {is_last.mean():.0%} of them",)
    return [
        Finding(
            ids.STRAGGLER,
            WARNING,
            (rank,),
            text,
            next_step,
            case.name,
            evidence=evidence,
        )
    ]


@dataclass(frozen=True)
class _GivenUp:
    """By round that some rank gave up: the ranks that did, and those that came later, each with its
    call.
    """

    gave_up: dict[int, dict[int, int]]
    came: dict[int, dict[int, int]]


def _given_up(case: Case) -> _GivenUp:
    gave_up: dict[int, dict[int, int]] = defaultdict(dict)
    came: dict[int, dict[int, int]] = defaultdict(dict)
    columns = {
        rank: (
            np.array(track.calls.outcome),
            np.array(track.calls.round),
            np.array(track.calls.n),
        )
        for rank, track in case.tracks.items()
    }
    for rank, (outcome, rounds, calls) in columns.items():
        for index in np.flatnonzero(outcome == TIMEOUT):
            gave_up[int(rounds[index])][rank] = int(calls[index])
    wanted = np.array(sorted(gave_up), dtype=np.int64)
    for rank, (outcome, rounds, calls) in columns.items():
        for index in np.flatnonzero((outcome == CAME) & np.isin(rounds, wanted)):
            came[int(rounds[index])][rank] = int(calls[index])
    return _GivenUp(gave_up, came)


def behind_since(case: Case, rank: int) -> int:
    """The first call in which others gave up on this rank, after the last round that came in time
    on all; 0 if none.
    """
    came = int(case.rounds.number[-1]) if case.rounds.number.size else 0
    given_up = {
        number: ranks
        for number, ranks in _given_up(case).gave_up.items()
        if number > came
    }
    of_others = [
        calls
        for ranks in given_up.values()
        for other, calls in ranks.items()
        if other != rank
    ]
    return min(of_others, default=0)


def late_calls(case: Case) -> dict[int, list[int]]:
    """By rank, its calls that came too late, and the one that it has not made and that others gave
    up waiting for.
    """
    given_up = _given_up(case)
    late: dict[int, list[int]] = defaultdict(list)
    for came in given_up.came.values():
        for rank, call in came.items():
            late[rank].append(call)
    last = max(given_up.gave_up, default=0)
    for rank, ending in case.sure.items():
        if ending.round < last and not ending.inside:
            late[rank].append(ending.call + 1)
    return late


def incidents(case: Case) -> list[Finding]:
    """Rounds that some ranks gave up, and others came to late."""
    given_up = _given_up(case)
    late = sorted({rank for ranks in given_up.came.values() for rank in ranks})
    return [_late(case, rank, given_up) for rank in late[:_MOST_FINDINGS]]


def _late(case: Case, rank: int, given_up: _GivenUp) -> Finding:
    numbers = sorted(number for number, ranks in given_up.came.items() if rank in ranks)
    waited = given_up.gave_up[numbers[0]]
    others = sorted(waited)
    call = given_up.came[numbers[0]][rank]
    places = [
        safe(place)
        for other in others
        for report in case.job.traces[other].missing
        for missing, place in zip(report.ranks, report.where, strict=False)
        if missing == rank and place and report.n == waited[other]
    ]
    doing = f"; it was in {places[0]}" if places else ""
    rounds = "1 round" if len(numbers) == 1 else f"{len(numbers)} rounds, first"
    text = f"Rank {rank} came too late to {rounds}, to call {call} of {case.name}; "
    text += f"{named(others)} went on without it, and it recovered{doing}."
    next_step = (
        "Look at what held this rank up then: a slow file or file system, a checkpoint,"
        " a log that only one "
    )
    next_step += "rank writes. No number of the model was changed by it."
    came = named(sorted(given_up.came[numbers[0]]))
    evidence = (f"round {numbers[0]}: gave up: {named(others)}; came later: {came}",)
    return Finding(
        ids.LATE, WARNING, (rank,), text, next_step, case.name, call, evidence=evidence
    )
