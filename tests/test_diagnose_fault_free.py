"""Random jobs without a fault, cut at random moments: nothing critical. With one rank that stays
away, it is named.
"""

from __future__ import annotations

import bisect
import json
import random
from pathlib import Path

import pytest
from diagnosing import report_of
from simulated_job import Away, Call, Event, Exit, Gradients, evaluation, steps
from simulated_traces import Setup, write

from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.findings import CRITICAL

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

CUTS = 30  # of each job
_MOST_JITTER_S = 8.0  # less than a length sync waits
_BEHIND = 0.01  # seconds of records that the writer's thread may not have written


def stretches(draw: random.Random) -> list[tuple[str, int, float]]:
    """What a job does, one after the other: its kind, how many calls, and how long it then calls no
    encoder.
    """
    kinds = [draw.choice(("train", "evaluate")) for _ in range(draw.randrange(1, 4))]
    gaps = [
        draw.choice((0.0, draw.uniform(20, 58), draw.uniform(62, 900))) for _ in kinds
    ]
    return [
        (kind, draw.randrange(2, 12), gap)
        for kind, gap in zip(kinds, gaps, strict=True)
    ]


def of_rank(draw: random.Random, job: list[tuple[str, int, float]]) -> list[Event]:
    """One rank's part of it; ranks come out of a gap at moments of their own."""
    events: list[Event] = []
    for kind, count, gap in job:
        events += (
            steps(count, 0.05 + draw.expovariate(20))
            if kind == "train"
            else evaluation(count)
        )
        if gap:
            events.append(Away(gap + draw.uniform(0, _MOST_JITTER_S)))
    return events


def fault_free(seed: int) -> list[list[Event]]:
    """All end in good order; some much later than others, who decode or write a checkpoint for
    long.
    """
    draw = random.Random(seed)
    size, job = draw.choice((1, 2, 4, 8)), stretches(draw)
    last: list[Event] = (
        [Call(), Gradients()] if draw.random() < 0.5 else [Call(training=False)]
    )
    ends = draw.choice((0.0, 30.0, 400.0))
    return [
        [*of_rank(draw, job), *last, Away(draw.uniform(0, ends)), Exit()]
        for _ in range(size)
    ]


def cut(whole: Path, at: float, folder: Path, draw: random.Random) -> dict[int, float]:
    """What the files had at that moment; for how long each rank had written nothing."""
    folder.mkdir()
    silent = {}
    for rank, file in enumerate(sorted(whole.iterdir())):
        lines = file.read_bytes().splitlines(True)
        found = [json.loads(line) for line in lines]
        # Of call 1, which all leave at once.
        began = next(one["t"] for one in found if one["k"] == "sync")
        times = [one.get("t", -1e9) - began for one in found]
        count = bisect.bisect(times, at - draw.choice((0, _BEHIND)))
        if count:
            (folder / file.name).write_bytes(b"".join(lines[:count]))
            silent[rank] = at - times[count - 1]
    return silent


def moments(whole: Path, draw: random.Random) -> list[float]:
    """Random ones of the whole job, and of its last minutes and stall reports."""
    ends, reports = [], []
    for file in whole.iterdir():
        found = [json.loads(line) for line in file.read_bytes().splitlines()]
        began = next(one["t"] for one in found if one["k"] == "sync")
        ends.append(found[-1]["t"] - began)
        reports += [
            one["t"] - began + draw.uniform(0, 5)
            for one in found
            if one["k"] == "stalled"
        ]
    anywhere = [draw.uniform(0, max(ends)) for _ in range(CUTS)]
    at_the_end = [draw.choice(ends) + draw.uniform(-3, 3) for _ in range(CUTS)]
    in_a_gap = [draw.choice(reports) for _ in range(CUTS if reports else 0)]
    return anywhere + at_the_end + in_a_gap


@pytest.mark.parametrize("seed", range(16))
def test_no_cut_of_a_fault_free_job_is_critical(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    whole = write(tmp_path / "whole", fault_free(seed), seed=seed)
    report = report_of(whole)
    assert not [one for one in report.findings if one.id != ids.STRAGGLER], report
    assert report.verdict.startswith("Nothing found") or report.findings
    for number, at in enumerate(moments(whole, draw)):
        folder = tmp_path / str(number)
        silent = cut(whole, at, folder, draw)
        if not silent:
            continue
        findings = report_of(folder).findings
        criticals = [one for one in findings if one.severity == CRITICAL]
        assert not criticals, (seed, at, findings)


@pytest.mark.parametrize("seed", range(16))
def test_a_rank_that_truly_stays_away_is_critical_and_named(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    job, size = stretches(draw), draw.choice((2, 4, 8))
    away, waits = (
        draw.randrange(size),
        draw.choice(([Call(), Gradients()], [Away(0.1), Gradients()])),
    )
    schedules = [
        of_rank(draw, job) + steps(3) + ([] if rank == away else waits)
        for rank in range(size)
    ]
    sync = draw.choice(("bounded", "local"))
    setups = {rank: Setup(sync=sync) for rank in range(size)}
    report = report_of(write(tmp_path, schedules, setups, seed=seed))
    first = report.findings[0]
    assert (first.severity, first.ranks) == (CRITICAL, (away,)), (seed, report)
