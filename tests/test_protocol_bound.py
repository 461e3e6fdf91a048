"""The bound on waiting (docs/design.md, "Breaker"), over schedules in which incidents come again.

BOUND_SCHEDULES=100000 runs so many.
"""

from __future__ import annotations

import os
import random

import pytest
from simulated_job import Call, Event, Gradients
from simulated_ranks import run

from nemo_patches.sync import protocol

pytestmark = pytest.mark.one_nemo

SCHEDULES = int(os.environ.get("BOUND_SCHEDULES", "8000"))
# In place of a hundred: so that short schedules forget incidents, and have them again
CALM_ROUNDS = 4


def schedules(seed: int) -> list[list[Event]]:
    """Two or three ranks, lockstep after training calls; late, skipped and extra calls, uneven
    evaluations.
    """
    plan = random.Random(seed)
    trouble = plan.random() ** 2
    ranks: list[list[Event]] = [[] for _ in range(plan.randint(2, 3))]
    for _ in range(plan.randint(3, 14)):
        evaluations = plan.randint(1, 3) if plan.random() < 0.3 else 0
        for events in ranks:
            calls = 1 if plan.random() >= trouble / 3 else plan.choice((0, 0, 2))
            for _ in range(calls):
                late = plan.random() < trouble / 10
                events.append(
                    Call(
                        plan.randint(1, 5000),
                        True,
                        plan.random() * (40 if late else 0.5),
                    )
                )
            events.append(Gradients())
            uneven = plan.random() < trouble / 3
            for _ in range(evaluations + uneven):
                events.append(Call(plan.randint(1, 5000), False, plan.random() * 0.5))
    return ranks


def test_waits_in_vain_keep_the_bound_where_incidents_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "CALM_ROUNDS", CALM_ROUNDS)
    most = 0
    for seed in range(SCHEDULES):
        for rank in run(schedules(seed)):
            assert rank.waited_in_vain <= rank.bound(CALM_ROUNDS), seed
            most = max(most, len(rank.vain))
    assert most >= 5, "incidents did come again"
