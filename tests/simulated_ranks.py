"""The protocol's invariants over simulated jobs: every call gets at least its own length, and no
schedule deadlocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta

import simulated_job
from simulated_job import TIMEOUT, Call, Event, Job, Listener, Rank, Sync

from nemo_patches.sync.protocol import CALM_ROUNDS, HEALTHY_ROUNDS
from nemo_patches.sync.protocol import TIMEOUT as TIMED_OUT


@dataclass
class Lengths(Listener):
    """What one rank's calls got, and its waits that ran out of time."""

    number: int
    used: list[int] = field(default_factory=list)
    vain: list[timedelta] = field(default_factory=list)
    # The longest that the protocol has taken a healthy round for.
    healthy: timedelta = timedelta(0)

    def synced(self, rank: Rank, now: float, call: Call, sync: Sync) -> None:
        self.used.append(sync.length)
        if sync.outcome == TIMED_OUT:
            self.vain.append(timedelta(seconds=sync.waited_s))

    @property
    def waited_in_vain(self) -> timedelta:
        return sum(self.vain, timedelta(0))

    def bound(self, calm_rounds: int = CALM_ROUNDS) -> timedelta:
        """The most that the waits of one rank that run out of time can add up to (docs/design.md,
        "Breaker").
        """
        healthy = HEALTHY_ROUNDS * self.healthy
        calls = len(self.used)
        series = (
            TIMEOUT
            + max(TIMEOUT / 8, healthy)
            + math.log2(max(calls, 2)) * max(TIMEOUT / 64, healthy)
        )
        # So many rounds in time forget the timeouts.
        return series * (1 + calls // calm_rounds)


def run(schedules: list[list[Event]]) -> list[Lengths]:
    """Run each rank's events to the end; AssertionError on a deadlock or a round issued while one
    is outstanding.
    """
    job = Job(len(schedules))
    lengths = [Lengths(number) for number in range(job.size)]
    ranks = [
        Rank(one.number, events, job, one, layers_s=0.0)
        for one, events in zip(lengths, schedules, strict=True)
    ]
    simulated_job.run(ranks)
    assert all(rank.finished for rank in ranks), "deadlock"
    for rank, one in zip(ranks, lengths, strict=True):
        one.healthy = rank.rounds.healthy
    return lengths
