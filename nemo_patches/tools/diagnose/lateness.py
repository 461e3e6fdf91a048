"""Lateness: a chronic straggler, single incidents that recovered, and unexplained time-outs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.alignment import Floats, Rounds
from nemo_patches.tools.diagnose.case import Case
from nemo_patches.tools.diagnose.findings import NOTE, WARNING, Finding
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
        float(in_round.sum()) / span if (span := float(np.ptp(rounds.at, axis=1).sum())) > 0 else 0.0,
    )


def straggler(case: Case) -> list[Finding]:
    """The rank that the others wait for again and again, if there is one."""
    rounds = case.rounds
    size = len(rounds.ranks)
    if size < 2 or rounds.number.size < _LEAST_ROUNDS:
        return []
    last = rounds.waited.argmin(axis=0)
    row = int(np.bincount(last, minlength=size).argmax())
    rank = rounds.ranks[row]
    times = waiting(rounds)
    lag = times.lag[rank]
    rows = [at for at, of_rank in enumerate(rounds.ranks) if at == row or times.lag[of_rank] > lag / 2]
    if len(rows) == size:
        return []
    share = sum(times.caused[rounds.ranks[at]] for at in rows)
    others = np.delete(rounds.waited, rows, axis=0)
    span = float(rounds.at[0][-1] - rounds.at[0][0])
    waits = float(np.median(others.mean(axis=0))) * rounds.number.size / span if span > 0 else 0.0
    after_all_others = rounds.waited[rows].max(axis=0) < others.min(axis=0)
    always = all(piece.mean() > 0.5 for piece in np.array_split(after_all_others, _PIECES))
    if share < _LEAST_SHARE + 0.5 / size or waits < _LEAST_WAITING or lag < _LEAST_LAG_S or not always:
        return []
    if len(rows) > 1:
        return [_together(case, [rounds.ranks[at] for at in rows], lag, waits)]
    host = safe(case.job.traces[rank].header.host)
    latest = sorted(times.lag.items(), key=lambda item: -item[1])[:4]
    text = f"Rank {rank} is a chronic straggler: it comes last to most rounds, {lag * 1000:.0f} ms after the first "
    text += f"(median), and causes {share:.0%} of all waiting; the others wait {waits:.0%} of the time."
    next_step = f"Compare {host} with the others: its disk and network, the processors left to its data loader, the "
    next_step += "GPU's clock; and its share of the data (longer files?)."
    evidence = (
        f"{rounds.number.size} rounds; last in {(last == row).mean():.0%} of them",
        *(f"rank {late}: median lag {seconds * 1000:.1f} ms" for late, seconds in latest),
    )
    return [Finding(ids.STRAGGLER, WARNING, (rank,), text, next_step, case.name, evidence=evidence)]


def _together(case: Case, ranks: list[int], lag: float, waits: float) -> Finding:
    why = "One of them may be late, and the others wait for it before the encoder, in DDP's broadcast of buffers."
    next_step = "Run a while with broadcast_buffers=False, if the model allows that: then the rounds tell which one."
    text = f"{named(ranks)} come last to most rounds together, {lag * 1000:.0f} ms after the first (median); the "
    text += f"others wait {waits:.0%} of the time. {why}"
    evidence = tuple(f"rank {rank}: last with the others" for rank in ranks[:4])
    return Finding(ids.STRAGGLER, WARNING, (), text, next_step, case.name, evidence=evidence)


@dataclass(frozen=True)
class _GivenUp:
    """By round that some rank gave up: the ranks that did, and those that came later, each with its call."""

    gave_up: dict[int, dict[int, int]]
    came: dict[int, dict[int, int]]


def _given_up(case: Case) -> _GivenUp:
    gave_up: dict[int, dict[int, int]] = defaultdict(dict)
    came: dict[int, dict[int, int]] = defaultdict(dict)
    columns = {
        rank: (np.array(track.calls.outcome), np.array(track.calls.round), np.array(track.calls.n))
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
    """The first call in which others gave up on this rank, after the last round that came in time on all; 0 if none."""
    came = int(case.rounds.number[-1]) if case.rounds.number.size else 0
    given_up = {number: ranks for number, ranks in _given_up(case).gave_up.items() if number > came}
    of_others = [calls for ranks in given_up.values() for other, calls in ranks.items() if other != rank]
    return min(of_others, default=0)


def late_calls(case: Case) -> dict[int, list[int]]:
    """By rank, its calls that came too late, and the one that it has not made and that others gave up waiting for."""
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
    """Rounds that some ranks gave up and others came to late; and timeouts that no trace explains."""
    given_up = _given_up(case)
    gave_up, came = given_up.gave_up, given_up.came
    late: Counter[int] = Counter(rank for ranks in came.values() for rank in ranks)
    findings = [_late(case, rank, times, given_up) for rank, times in sorted(late.items())][:_MOST_FINDINGS]
    unexplained = [number for number in gave_up if number not in came]
    if unexplained and (not findings or len(unexplained) > 1):
        first = min(unexplained)
        ranks = tuple(sorted({rank for number in unexplained for rank in gave_up[number]}))
        text = f"{named(ranks)} gave up waiting in {len(unexplained)} {_rounds(len(unexplained))} and went on with "
        text += "their own lengths; no trace has the rank that came to it after."
        next_step = "Look at the stall reports on stderr of these ranks: they name the missing rank."
        call = next(iter(gave_up[first].values()))
        findings.append(Finding(ids.TIMEOUTS, NOTE, ranks, text, next_step, case.name, call))
    return findings


def _rounds(count: int) -> str:
    return "round" if count == 1 else "rounds"


def _late(case: Case, rank: int, times: int, given_up: _GivenUp) -> Finding:
    first = min(number for number, ranks in given_up.came.items() if rank in ranks)
    waited = given_up.gave_up[first]
    others, call = sorted(waited), given_up.came[first][rank]
    where = next(
        (
            safe(place)
            for other in others
            for report in case.job.traces[other].missing
            for missing, place in zip(report.ranks, report.where, strict=False)
            if missing == rank and place and report.n == waited[other]
        ),
        "",
    )
    doing = f"; it was in {where}" if where else ""
    text = f"Rank {rank} came too late to {times} {_rounds(times)}, first to call {call} of {case.name}; "
    text += f"{named(others)} went on without it, and it recovered{doing}."
    next_step = "Look at what held this rank up then: a slow file or file system, a checkpoint, a log that only one "
    next_step += "rank writes. No number of the model was changed by it."
    evidence = (f"round {first}: gave up: {named(others)}; came later: {named(sorted(given_up.came[first]))}",)
    return Finding(ids.LATE, WARNING, (rank,), text, next_step, case.name, call, evidence=evidence)
