"""NP309: the job's backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_ranks import ERROR, found, ranks

from nemo_patches.tools.doctor.ranks import Smoke

pytestmark = pytest.mark.one_nemo

WELL = dict.fromkeys(("all_reduce", "broadcast", "all_gather"), 0.01)


def test_all_came_through() -> None:
    well = {rank: Smoke(rank, "nccl", WELL) for rank in range(4)}
    told = replace(ranks(), smoke={**well, 2: Smoke(2, "nccl", {**WELL, "broadcast": 0.5})})
    assert found("NP309", told) == found("NP309", ranks()) == []
    assert "broadcast over nccl: 500.0 ms at most (rank 2)" in told.lines()


def test_who_did_not_come_through_and_where() -> None:
    stuck = Smoke(0, "nccl", {"all_reduce": 0.01}, "broadcast", "no end within 15 s")
    told = replace(ranks(), smoke={0: stuck, 1: replace(stuck, rank=1), 3: Smoke(3, "nccl", WELL)})
    absent, where = found("NP309", told)
    assert absent.severity is where.severity is ERROR
    assert "rank 2 answered" in absent.what
    assert "ranks 0-1: broadcast" in where.what
    told = replace(ranks(size=2), smoke={0: Smoke(0, "nccl", WELL), 1: Smoke(1, "gloo", WELL)})
    (mixed,) = found("NP309", told)
    assert "gloo, nccl differ" in mixed.what
