"""The judge over entries, on the records of jobs that are played through: who stopped is known there,
and who waits.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pytest
from simulated_job import Collective, Event, Job, Listener, Rank, run

from nemo_patches.tools.diagnose import entries as j
from nemo_patches.tools.diagnose.entries import Entry, EntryJudgement, judge

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

# 100,000 take some minutes.
JOBS = int(os.environ.get("NEMO_PATCHES_TEST_JOBS", "3000"))
KINDS = ("all_reduce", "broadcast", "all_gather", "barrier")


@dataclass(frozen=True)
class Hang:
    """What a job left that came to where nobody can go on."""

    groups: dict[str, list[int]]
    entries: list[Entry]
    stopped: set[int]  # ranks that are in no collective, and never come to their next
    waits: dict[int, Entry]  # by rank that is in one

    def absent(self, rank: int) -> set[int]:
        """Whom a rank that waits waits for."""
        entry = self.waits[rank]
        entered = {
            one.rank
            for one in self.entries
            if (one.group, one.number) == (entry.group, entry.number)
        }
        return set(self.groups[entry.group]) - entered


def hang_of(
    groups: dict[str, list[int]],
    programs: list[list[Event]],
    stop: Collection[int],
    ahead: Sequence[int],
    tells_completion: bool = True,
) -> Hang:
    """Of a job in which each rank makes the collectives of its program. stop: ranks of which it is
    cut short.
    """
    job = Job(len(groups["0"]), groups)
    ranks = [
        Rank(number, program, job, Listener(), ahead=ahead[number])
        for number, program in enumerate(programs)
    ]
    run(ranks)
    entries, waits = [], {}
    stopped = {number for number in stop if ranks[number].finished}
    for rank in ranks:
        for event, number, round_ in rank.joined:
            done, completed = (
                (round_.came, round_.came) if tells_completion else (None, False)
            )
            entries.append(
                Entry(
                    rank.number,
                    event.group,
                    number,
                    event.kind,
                    done=done,
                    completed=completed,
                )
            )
            if not round_.came and rank.number not in stopped:
                waits[rank.number] = entries[-1]
    return Hang(groups, entries, stopped, waits)


def played(
    chance: random.Random, stops: int = 0, swaps: int = 0, tells_completion: bool = True
) -> Hang:
    """A job of some ranks and groups, to the point where nobody can go on.

    stops: so many ranks stop somewhere. swaps: so many ranks make two of their collectives in the
    other order.
    """
    world = chance.randint(2, 6)
    groups = {"0": list(range(world))}
    for number in range(1, chance.randint(1, 4)):
        groups[str(number)] = sorted(
            chance.sample(range(world), chance.randint(2, world))
        )
    steps = [
        Collective(name, chance.choice(KINDS))
        for name in chance.choices(sorted(groups), k=chance.randint(1, 25))
    ]
    programs: list[list[Event]] = [
        [step for step in steps if rank in groups[step.group]] for rank in range(world)
    ]
    for rank in chance.sample(range(world), swaps):
        program = programs[rank]
        if len(program) > 1:
            at = chance.randrange(len(program) - 1)
            program[at : at + 2] = reversed(program[at : at + 2])
    for rank in (stop := chance.sample(range(world), stops)):
        del programs[rank][chance.randint(0, len(programs[rank])) :]
    return hang_of(groups, programs, stop, [1] * world, tells_completion)


def accused(found: list[EntryJudgement]) -> set[int]:
    return {rank for one in found for rank in one.accused}


def of(job: Hang, chance: random.Random) -> list[EntryJudgement]:
    """The judgement on its entries in any order."""
    return judge(chance.sample(job.entries, len(job.entries)), job.groups)


@pytest.mark.parametrize("tells_completion", [True, False])
def test_who_stopped_is_named_and_nobody_who_waits(tells_completion: bool) -> None:
    named = 0
    for seed in range(JOBS):
        chance = random.Random(seed)
        job = played(
            chance, stops=chance.randint(1, 2), tells_completion=tells_completion
        )
        found = of(job, chance)
        assert accused(found) <= job.stopped, (seed, found)
        # In the first collective that not all have come to, for whoever stopped before it
        if job.waits:
            assert accused(found), (seed, found)
            named += 1
        for one in found:
            for rank in one.accused:
                assert any(
                    rank in job.absent(other)
                    for other in one.waiting
                    if other in job.waits
                ), (seed, one)
    assert named > JOBS / 3


def test_where_all_end_in_good_order_there_is_nothing() -> None:
    for seed in range(JOBS):
        chance = random.Random(seed)
        job = played(chance)
        assert not job.waits and not job.stopped
        assert of(job, chance) == [], seed


@pytest.mark.parametrize("tells_completion", [True, False])
def test_where_all_made_as_many_nobody_made_fewer(tells_completion: bool) -> None:
    """Collectives in another order: all wait, in as many collectives of each group or not, and
    nobody is missing.
    """
    for seed in range(JOBS):
        chance = random.Random(seed)
        job = played(
            chance, swaps=chance.randint(1, 2), tells_completion=tells_completion
        )
        found = of(job, chance)
        assert not accused(found), (seed, found)
        counts = {
            group: {
                sum(s.rank == r and s.group == group for s in job.entries)
                for r in ranks
            }
            for group, ranks in job.groups.items()
        }
        assert all(
            one.id != j.MISSING or len(counts[one.entry.group]) > 1 for one in found
        ), (seed, found)


def test_records_that_are_not_there_or_lost_their_beginning_accuse_nobody_who_waits() -> (
    None
):
    for seed in range(JOBS):
        chance = random.Random(seed)
        job = played(chance, stops=chance.randint(0, 2), swaps=chance.randint(0, 1))
        here = set(
            chance.sample(
                range(len(job.groups["0"])), chance.randint(1, len(job.groups["0"]))
            )
        )
        keeps = {rank: chance.choice((1, 2, 5, 100)) for rank in here}
        kept = [
            entry
            for rank in here
            for entry in [one for one in job.entries if one.rank == rank][
                -keeps[rank] :
            ]
        ]
        whole = {rank for rank in here if keeps[rank] == 100}
        members = {
            group: [
                rank
                for rank in ranks
                if rank in whole
                or any((s.rank, s.group) == (rank, group) for s in kept)
            ]
            for group, ranks in job.groups.items()
        }
        found = judge(kept, members)
        assert not accused(found) & job.waits.keys(), (seed, found)


def test_records_of_different_moments_accuse_nobody() -> None:
    """A collective that is completed had every rank in it."""
    late = [Entry(0, "0", number, done=True, completed=True) for number in range(1, 9)]
    early = [Entry(1, "0", number, done=True, completed=True) for number in range(1, 6)]
    (found,) = judge([*late, *early], {"0": [0, 1]})
    assert (found.id, found.accused, found.absent, found.entry.number) == (
        j.OLDER,
        (),
        (1,),
        6,
    )


def test_of_records_with_one_entry_each_the_last_is_named_where_it_is_told_where_they_begin() -> (
    None
):
    """As RAS tells: rank 2 has launched 60 operations, rank 1 62, rank 0 64."""
    entries = [
        Entry(0, "0", 64, done=None),
        Entry(1, "0", 62, done=None),
        Entry(2, "0", 60, done=None),
    ]
    (found,) = judge(entries, {"0": [0, 1, 2]}, {("0", rank): 60 for rank in range(3)})
    assert (found.id, found.accused, found.entry.number) == (j.MISSING, (2,), 62)


@pytest.mark.parametrize(
    ("kind", "may_differ"),
    [
        ("nccl:all_reduce", False),
        ("nccl:_reduce_scatter_base", False),
        ("ALLGATHER", False),
        ("nccl:gather", True),
        ("gloo:scatter", True),
        ("nccl:all_to_all", True),
        ("ALLTOALL_BASE", True),
        ("nccl:coalesced", True),
    ],
)
def test_in_some_collectives_ranks_may_give_unlike_sizes(
    kind: str, may_differ: bool
) -> None:
    found = judge([Entry(rank, "0", 1, kind, f"[{rank}]") for rank in range(2)], {})
    assert [one.id for one in found] == [j.ALL_IN if may_differ else j.SIZES]


def test_who_waits_in_a_group_of_which_nobody_else_is_known_is_not_missing() -> None:
    entries = [Entry(0, "tp", 1), Entry(1, "0", 1)]
    (found,) = judge(entries, {"0": [0, 1]})
    assert (found.id, found.accused, found.absent) == (j.CROSSED, (), (0,))
