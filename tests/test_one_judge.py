"""Properties of the judge over all evidence, on random jobs: what several sources tell of one, and
what is made up.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from simulated_job import Collective, Event
from test_entries import Hang, hang_of, played

from nemo_patches.tools.diagnose import conditions as f
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.entries import Entry
from nemo_patches.tools.diagnose.findings import CRITICAL, Diagnosis
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.rank_facts import (
    Condition,
    Evidence,
    Fact,
    Motion,
    Place,
    ProcessRank,
)

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

# 100,000 take some minutes.
JOBS = int(os.environ.get("NEMO_PATCHES_TEST_JOBS", "3000"))
STUCK = Place(where="read (data.py:41) < main (train.py:80)")
WAITED = Condition(f.WAITED, "Timed out waiting 1800000 ms")


def evidence(job: Hang) -> Evidence:
    size = len(job.groups["0"])
    return Evidence(
        groups={name: set(ranks) for name, ranks in job.groups.items()}, world_size=size
    )


def records(job: Hang, ranks: set[int]) -> list[Fact]:
    """As Flight Recorder dumps tell."""
    return [
        Fact(entry.rank, entry, f"trace_{entry.rank}", at=100.0)
        for entry in job.entries
        if entry.rank in ranks
    ]


def place_of(job: Hang, rank: int) -> Place:
    entry = job.waits.get(rank)
    return (
        Place(
            collective=entry.kind,
            caller=f"group {entry.group} (train.py:{entry.number})",
        )
        if entry
        else STUCK
    )


def stacks(job: Hang, ranks: set[int], looked_twice: bool) -> list[Fact]:
    found = []
    for rank in ranks:
        cite = f"node1, pid {100 + rank}"
        values = [
            ProcessRank(len(job.groups["0"]), 100 + rank),
            Condition(f.RUNS),
            place_of(job, rank),
        ]
        values += [Motion(False, still_s=60.0)] if looked_twice else []
        found += [Fact(rank, value, cite, 200.0, "node1") for value in values]
    return found


def some(chance: random.Random, size: int) -> set[int]:
    """All, or some of them."""
    return (
        set(range(size))
        if chance.random() < 0.5
        else set(chance.sample(range(size), chance.randint(0, size)))
    )


def accused(report: Diagnosis) -> set[int]:
    return {rank for one in report.findings for rank in one.ranks}


def hung(chance: random.Random) -> tuple[Hang, Evidence]:
    """A job that hangs, or has hung, as some sources tell of it: records, stacks, the errors of
    those that waited.
    """
    job = played(chance, stops=chance.randint(0, 2), swaps=chance.randint(0, 1))
    size, told = len(job.groups["0"]), evidence(job)
    here = some(chance, size)
    told.facts += records(job, here)
    told.groups = {name: ranks & here for name, ranks in told.groups.items()}
    if chance.random() < 0.6:
        told.facts += stacks(job, some(chance, size), chance.random() < 0.7)
    for rank in job.waits:
        if chance.random() < 0.3:
            told.facts.append(Fact(rank, WAITED, f"train.log:{rank}", 1900.0, "node1"))
    for rank in job.stopped:
        if chance.random() < 0.3:
            told.facts.append(
                Fact(
                    rank,
                    Condition(chance.choice((f.KILLED, f.RAISED, f.GONE, f.SILENT))),
                    f"log:{rank}",
                )
            )
    chance.shuffle(told.facts)
    return job, told


def test_nobody_whom_any_fact_shows_waiting_is_accused() -> None:
    named = 0
    for seed in range(JOBS):
        job, told = hung(random.Random(seed))
        waits = {
            fact.rank
            for fact in told.facts
            if isinstance(fact.value, Place) and fact.value.collective
        }
        waits |= {fact.rank for fact in told.facts if fact.value == WAITED}
        waits |= {
            fact.rank
            for fact in told.facts
            if isinstance(fact.value, Entry) and fact.value in job.waits.values()
        }
        report = judge(told)
        assert not accused(report) & waits, (seed, report.findings)
        named += bool(accused(report))
    assert named > JOBS / 10


def ran_ahead(chance: random.Random, fails: bool) -> Hang:
    """As on GPUs: each rank enqueues some collectives before it waits for the first of them; they
    end in that order.

    fails: the network does, and no collective ends any more. Else a rank stops.
    """
    world = chance.randint(2, 5)
    groups = {
        "0": list(range(world)),
        "1": sorted(chance.sample(range(world), chance.randint(2, world))),
    }
    steps = chance.choices("001", k=chance.randint(3, 20))
    ahead = [chance.randint(1, 4) for _ in range(world)]
    stop_at = (
        {chance.randrange(world): chance.randint(0, len(steps))} if not fails else {}
    )
    last_ended = chance.randint(0, len(steps)) if fails else len(steps)
    events = [
        Collective(group, "", lost=number >= last_ended)
        for number, group in enumerate(steps)
    ]
    programs: list[list[Event]] = [
        [event for event in events[: stop_at.get(rank)] if rank in groups[event.group]]
        for rank in range(world)
    ]
    return hang_of(groups, programs, stop_at, ahead)


def test_who_waits_for_what_it_has_enqueued_is_not_accused() -> None:
    named = 0
    for seed in range(JOBS):
        chance = random.Random(seed)
        job = ran_ahead(chance, fails=chance.random() < 0.5)
        told = evidence(job)
        told.facts = records(job, set(job.groups["0"]))
        report = judge(told)
        assert accused(report) <= job.stopped, (seed, report.findings)
        named += bool(accused(report))
    assert named > JOBS / 10


def test_who_stopped_is_named_by_records_and_by_stacks_alike() -> None:
    for seed in range(JOBS):
        chance = random.Random(seed)
        job = played(chance, stops=1)
        everybody = set(range(len(job.groups["0"])))
        # Of who has ended stacks tell no more.
        if not job.waits or job.waits.keys() | job.stopped != everybody:
            continue
        by_records, by_stacks, by_both = evidence(job), evidence(job), evidence(job)
        by_records.facts = records(job, everybody)
        by_stacks.facts = stacks(job, everybody, looked_twice=True)
        by_both.facts = [*by_records.facts, *by_stacks.facts]
        reports = [judge(told) for told in (by_records, by_stacks, by_both)]
        assert [accused(report) for report in reports] == [job.stopped] * 3, (
            seed,
            reports,
        )
        assert [report.exit_code for report in reports] == [1, 1, 1]
        assert {report.findings[0].id for report in reports} == {ids.MISSING_RANK}


def test_nothing_is_critical_where_all_ended_in_good_order() -> None:
    for seed in range(JOBS):
        chance = random.Random(seed)
        job = played(chance)
        told = evidence(job)
        everybody = set(range(len(job.groups["0"])))
        told.facts = records(job, everybody) if chance.random() < 0.7 else []
        told.facts += [
            Fact(rank, Condition(f.ENDED), f"rank {rank}'s trace", 300.0 + rank)
            for rank in everybody
        ]
        chance.shuffle(told.facts)
        report = judge(told)
        assert not [one for one in report.findings if one.severity == CRITICAL], (
            seed,
            report.findings,
        )
        assert not accused(report), (seed, report.findings)


def test_where_all_made_as_many_nobody_made_fewer() -> None:
    for seed in range(JOBS):
        chance = random.Random(seed)
        job = played(chance, swaps=1)
        told = evidence(job)
        told.facts = records(job, set(range(len(job.groups["0"]))))
        report = judge(told)
        assert not accused(report), (seed, report.findings)
        assert all(one.id != ids.FEWER_BATCHES for one in report.findings), (
            seed,
            report.findings,
        )


def test_whatever_the_facts_are_there_is_a_report() -> None:
    """Also where they contradict: the accused have a fact of their own, and none that shows them
    waiting.
    """
    kinds = (
        f.RAISED,
        f.KILLED,
        f.STOPPED,
        f.TRACED,
        f.ENDED,
        f.GONE,
        f.SILENT,
        f.UNSEEN,
        f.FAILED,
        f.WAITED,
        f.CUT,
    )
    kinds += (f.TERMINATED, f.RUNS, f.UNREADABLE)
    for seed in range(JOBS):
        chance = random.Random(seed)
        size = chance.randint(1, 5)
        told = Evidence(
            world_size=chance.choice((0, size)),
            groups={"0": some(chance, size), "1": some(chance, size)},
        )
        for _ in range(chance.randint(0, 20)):
            value = chance.choice(
                (
                    Condition(chance.choice(kinds)),
                    Place(
                        collective=chance.choice(
                            ("all_reduce", "barrier", "perhaps the GPU, in item()")
                        )
                    ),
                    STUCK,
                    Motion(
                        chance.random() < 0.5, still_s=chance.choice((None, 5.0, 60.0))
                    ),
                    ProcessRank(size, chance.randint(0, 99)),
                    Entry(
                        0,
                        chance.choice("01"),
                        chance.randint(1, 4),
                        chance.choice(("", "all_reduce", "barrier")),
                    ),
                )
            )
            rank = chance.randrange(size)
            value = value._replace(rank=rank) if isinstance(value, Entry) else value
            told.facts.append(
                Fact(
                    rank,
                    value,
                    "a file",
                    float(chance.randint(0, 9)),
                    "node1",
                    chance.random() < 0.7,
                )
            )
        before = [replace(fact) for fact in told.facts]
        report = judge(told)
        assert report.exit_code in (0, 1, 2) and report.verdict, seed
        assert accused(report) <= set(range(size)) and told.facts == before, seed
