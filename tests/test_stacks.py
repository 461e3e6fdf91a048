"""Stacks of stock jobs that really hang: what is seen of each rank, and the verdict over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import stock_hangs as jobs

from nemo_patches.judging.kinds import CHECKPOINT
from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.collect.host_jobs import HostJob, jobs_here, look
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.rank_facts import (
    Condition,
    Evidence,
    Fact,
    Motion,
    Place,
    ProcessRank,
)
from nemo_patches.tools.diagnose.running import is_told
from nemo_patches.tools.diagnose.sources.stack_files import of_samples
from nemo_patches.tools.diagnose.verdicts import CHILD, LOADER, LOCK

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]

STUCK_AFTER_S = 1.0
LIMIT_S = 90.0
LENGTH_SYNC = "all_reduce of the length sync (conformer_encoder.py:"
OUT_OF_STEP = (ids.SKIPPED, ids.OUT_OF_STEP, ids.FEWER_BATCHES)


@dataclass(frozen=True)
class Hang:
    """What there is to be seen. waiting: by rank, how its wait begins. elsewhere: by rank, the
    function that it is in.

    accused: by the verdict; nobody where all wait. words: of the verdict.
    """

    scenario: Callable[[jobs.Rank], Any]
    waiting: dict[int, str]
    elsewhere: dict[int, str] = field(default_factory=dict)
    activity: str = ""
    condition: str = conditions.RUNS
    details: str = ""
    verdict: tuple[str, ...] = (ids.MISSING_RANK,)
    words: tuple[str, ...] = ()
    reaching: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.waiting) + len(self.elsewhere)


LATE = {0: LENGTH_SYNC, 2: LENGTH_SYNC}
HANGS = [
    Hang(
        jobs.late,
        LATE,
        {1: "ask_metadata_server"},
        words=("ask_metadata_server (stock_hangs.py:",),
    ),
    Hang(
        jobs.late_for_buffers,
        dict.fromkeys((1, 2), "DDP's buffer broadcast of run (encoders.py:"),
        {0: "ask_metadata_server"},
    ),
    Hang(
        jobs.never_came,
        dict.fromkeys((0, 2), "init_process_group of join_group (ranks.py:"),
        {1: "ask_metadata_server"},
    ),
    Hang(
        jobs.worker_in_fifo,
        {0: LENGTH_SYNC, 1: LENGTH_SYNC},
        {2: "worker_in_fifo"},
        activity=LOADER,
        words=(
            "it waits for its data loader",
            "__getitem__ (stock_hangs.py:",
            f"/{jobs.FIFO}",
        ),
    ),
    Hang(
        jobs.worker_spins,
        {0: LENGTH_SYNC, 1: LENGTH_SYNC},
        {2: "worker_spins"},
        activity=LOADER,
        words=(
            "it waits for its data loader: its worker (pid",
            "spin (stock_hangs.py:",
            ", computing",
        ),
    ),
    Hang(
        jobs.child_of_a_pool_is_killed,
        LATE,
        {1: "at_step"},
        activity=CHILD,
        words=(
            "its multiprocessing.Pool has nothing to do: the child that had the task was killed",
        ),
    ),
    Hang(
        jobs.keeps_gil,
        LATE,
        {1: "decode_with_c_extension"},
        details="it holds Python's lock (GIL) in a C call",
        words=("decode_with_c_extension", "GIL"),
    ),
    Hang(
        jobs.stopped,
        LATE,
        {1: "<lambda>"},
        condition=conditions.STOPPED,
        verdict=(ids.STOPPED,),
    ),
    Hang(
        jobs.deadlock,
        LATE,
        {1: "take_lock"},
        activity=LOCK,
        details="its thread 'prefetcher' is in take_feed (stock_hangs.py:",
        words=("take_lock", "take_feed"),
    ),
    Hang(
        jobs.spins,
        LATE,
        {1: "spin"},
        details="it computes (",
        words=("spin (stock_hangs.py:",),
    ),
    Hang(jobs.polls, LATE, {1: "poll_for"}, words=("poll_for (stock_hangs.py:",)),
    Hang(
        jobs.pool,
        LATE,
        {1: "at_step"},
        activity=LOCK,
        details="its thread 'reader_0' is in open (pathlib.py:",
        words=("read_audio (stock_hangs.py:",),
    ),
    Hang(
        jobs.logger_at_the_end,
        dict.fromkeys((0, 2), "all_reduce of logger_at_the_end (stock_hangs.py:"),
        {1: "logger_at_the_end"},
        activity=LOCK,
        details="its thread 'uploader' is in open (pathlib.py:",
        words=("uploader",),
    ),
    Hang(
        jobs.child,
        LATE,
        {1: "decode_with_sox"},
        activity=CHILD,
        details=f"/{jobs.FIFO}",
        words=("it waits for a process that it has started", "its child cat (pid"),
    ),
    Hang(
        jobs.collective_of_a_thread,
        dict.fromkeys(
            (0, 2), "all_reduce of collective_of_a_thread.<lambda> (stock_hangs.py:"
        ),
        {1: "ask_metadata_server"},
    ),
    Hang(
        jobs.two_missing,
        LATE,
        {1: "ask_metadata_server", 3: "poll_for"},
        words=(
            "Ranks 1, 3",
            "rank 1: it is in ask_metadata_server",
            "rank 3: it is in poll_for",
        ),
    ),
    Hang(
        jobs.checkpoint_on_rank_0,
        {
            0: "barrier of save_checkpoint (stock_hangs.py:",
            1: LENGTH_SYNC,
            2: LENGTH_SYNC,
        },
        activity=CHECKPOINT,
        verdict=OUT_OF_STEP,
        words=("rank 0 in barrier of save_checkpoint", "= 2"),
        reaching=(0,),
    ),
    Hang(
        jobs.barrier_on_one,
        {**LATE, 1: "barrier of barrier_on_one"},
        verdict=OUT_OF_STEP,
        words=("rank 1 in barrier of",),
        reaching=(1,),
    ),
    Hang(
        jobs.other_order,
        {
            0: "broadcast of other_order",
            1: "all_gather of other_order",
            2: "broadcast of other_order",
        },
        verdict=OUT_OF_STEP,
        words=("rank 1 in all_gather", "ranks 0, 2 in broadcast"),
        reaching=(0, 1, 2),
    ),
    Hang(
        jobs.objects,
        {**LATE, 1: "all_gather_object of objects"},
        verdict=OUT_OF_STEP,
        words=("rank 1 in all_gather_object",),
        reaching=(1,),
    ),
    Hang(
        jobs.swallowed,
        {
            0: "backward, which reduces the gradients",
            1: LENGTH_SYNC,
            2: "backward, which reduces the gradients",
        },
        verdict=(ids.SKIPPED,),
        words=(
            "rank 1 is at i of swallowed (stock_hangs.py) = 3",
            "ranks 0, 2 at 2",
            "rank 1 went on without",
        ),
        reaching=(1,),
    ),
    Hang(
        jobs.fewer_batches,
        {**LATE, 1: "all_gather of validate (stock_hangs.py:"},
        verdict=(ids.FEWER_BATCHES,),
        words=("rank 1 had fewer batches",),
        reaching=(1,),
    ),
    Hang(
        jobs.one_evaluation_batch_more,
        {0: "all_gather of validate (stock_hangs.py:", 1: LENGTH_SYNC, 2: LENGTH_SYNC},
        verdict=OUT_OF_STEP,
        words=(
            "rank 0 in all_gather of validate",
            "ranks 1-2 went on",
            "at j of evaluate (stock_hangs.py) = 4: fewer",
        ),
        reaching=(0, 1, 2),
    ),
    Hang(
        jobs.fewer_in_nemos_validation,
        {0: "", 1: ""},
        verdict=(ids.FEWER_BATCHES,),
        words=("rank 1 had fewer batches", "batch_idx of run (evaluation_loop.py)"),
        reaching=(0, 1),
    ),
    Hang(
        jobs.loader_without_len,
        {0: "", 1: LENGTH_SYNC},
        verdict=OUT_OF_STEP,
        words=("has_len_all_ranks", "is at line"),
        reaching=(0, 1),
    ),
]


def looked_at(
    pids: Sequence[int], until: Callable[[list[Fact]], bool]
) -> tuple[HostJob, list[Fact]]:
    """The samples that show it; a busy machine takes its time until a job hangs."""
    [ranks] = jobs_here(pids=pids)
    deadline = time.monotonic() + LIMIT_S
    while True:
        job = look(
            ranks,
            lambda job: is_told(job, STUCK_AFTER_S),
            between_s=0.5,
            at_most_s=10.0,
        )
        facts = of_samples(job)
        if until(facts) or time.monotonic() > deadline:
            return job, facts


def of(facts: Sequence[Fact], rank: int, kind: type[Any]) -> Any:
    return next(
        (
            fact.value
            for fact in facts
            if fact.rank == rank and isinstance(fact.value, kind)
        ),
        None,
    )


def waits(facts: Sequence[Fact], rank: int, at_least_s: float = STUCK_AFTER_S) -> bool:
    motion = of(facts, rank, Motion)
    return (
        bool(of(facts, rank, Place).collective)
        and not motion.moved
        and (motion.still_s or 0) >= at_least_s
    )


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.scenario.__name__)
def test_what_is_seen_of_a_hang_and_the_verdict(hang: Hang, tmp_path: Path) -> None:
    reaching = hang.reaching or tuple(hang.elsewhere)
    with jobs.running(hang.scenario, hang.size, tmp_path, *reaching) as pids:
        _, facts = looked_at(
            pids, lambda facts: all(waits(facts, rank) for rank in hang.waiting)
        )
    for rank in range(hang.size):
        assert of(facts, rank, ProcessRank) == ProcessRank(hang.size, pids[rank])
    for rank, title in hang.waiting.items():
        assert of(facts, rank, Place).wait.startswith(title), facts
        assert waits(facts, rank)
    for rank, function in hang.elsewhere.items():
        place = of(facts, rank, Place)
        assert not place.collective, facts
        assert f"{function} (stock_hangs.py:" in place.where
        assert hang.activity in (place.activity, "")
        assert hang.details in "\n".join(place.details)
        assert of(facts, rank, Condition).kind == hang.condition
    assert all(fact.cite.endswith(f", pid {pids[fact.rank]}") for fact in facts)
    report = judge(Evidence(facts, world_size=hang.size), stuck_after_s=STUCK_AFTER_S)
    first = report.findings[0]
    assert first.id in hang.verdict, report.verdict
    assert first.ranks == tuple(hang.elsewhere)
    for word in hang.words:
        assert word.lower() in report.verdict.lower(), report.verdict


def test_a_script_that_ended_before_one_of_its_threads_is_told_as_that(
    tmp_path: Path,
) -> None:
    with jobs.running(jobs.thread_left, 2, tmp_path, 1) as pids:
        _, facts = looked_at(pids, lambda facts: waits(facts, 0))
    first = judge(Evidence(facts, world_size=2), stuck_after_s=STUCK_AFTER_S).findings[
        0
    ]
    assert first.ranks == (1,)
    assert (
        "its script has come to its end, and waits for its other threads" in first.text
    )
    assert (
        "its thread 'uploader' is in ask_metadata_server (stock_hangs.py:" in first.text
    )


def test_a_checkpoint_that_is_being_written_is_no_hang(tmp_path: Path) -> None:
    with jobs.running(jobs.writes_checkpoint, 2, tmp_path, 0) as pids:
        _, facts = looked_at(pids, lambda facts: waits(facts, 1))
    report = judge(Evidence(facts, world_size=2), stuck_after_s=STUCK_AFTER_S)
    assert report.exit_code == 0, report.verdict
    assert report.verdict.startswith("So far no hang: rank 0: it writes a checkpoint")
    assert "It has not entered barrier of writes_checkpoint" in report.verdict
    assert "it wrote" in report.verdict


@pytest.mark.parametrize(
    "scenario",
    [jobs.healthy, jobs.straggling, jobs.pausing],
    ids=lambda one: one.__name__,
)
def test_nobody_of_a_job_that_goes_on_is_accused(
    scenario: Callable[[jobs.Rank], Any], tmp_path: Path
) -> None:
    with jobs.running(scenario, 3, tmp_path, 0, 1, 2) as pids:
        [ranks] = jobs_here(pids=pids)
        for _ in range(3):
            job = look(ranks, lambda job: is_told(job, 30.0), between_s=0.5)
            report = judge(Evidence(of_samples(job), world_size=3))
            assert not report.findings, report.verdict
            assert report.exit_code == 0
