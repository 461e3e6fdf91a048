"""Who is missing and what it does, on real ranks, as every waiting rank reports it; and what a
verdict's way to each rank is. What is said when: test_late_decisions.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import encoders
import pytest
import torch
import torch.distributed as dist
from rank_states import state
from ranks import (
    REPORT_S,
    SLACK_S,
    Given,
    Job,
    Result,
    Said,
    all_have_come,
    beside_others,
    come_in,
    forget_incidents,
    in_step,
    join_group,
    wait_for_others,
    wait_until,
)
from torch.utils.data import DataLoader, Dataset

import nemo_patches
from nemo_patches.channel.answers import (
    HELD_UP,
    LOST,
    Answers,
    Silence,
)
from nemo_patches.facts import RankFacts
from nemo_patches.judging.found import Found
from nemo_patches.judging.judgement import Judge
from nemo_patches.judging.kinds import ANSWERS_NOTHING
from nemo_patches.judging.missing_rank import MissingRank
from nemo_patches.watch.late_modules import LateModules
from nemo_patches.watch.late_rounds import LateRounds
from nemo_patches.watch.looks import Looks, Told
from nemo_patches.watch.stalls import SinceLastStep
from nemo_patches.watch.training_notes import LastCall

# Nothing here depends on NeMo's version.
pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
TIMEOUT = 2.0


@dataclass(frozen=True)
class Report:
    """What one rank saw of one scenario."""

    call: float  # seconds of the encoder call
    report: float  # seconds from the call's begin until the report was there
    missing: tuple[MissingRank, ...]


# Linux's default, which a test's rank has not: it was itself forked by a server.
CONTEXT = {0: None, 2: "fork"}


class SlowAudio(Dataset[int]):
    def __init__(self, go_on: Path) -> None:
        self.go_on = go_on

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return read_audio(self.go_on)


def read_audio(go_on: Path) -> int:
    wait_until(go_on.exists)
    return 0


def first_batch(go_on: Path, workers: int) -> None:
    audio, context = SlowAudio(go_on), CONTEXT[workers]
    loader = DataLoader(audio, num_workers=workers, multiprocessing_context=context)
    batches = iter(loader)  # starts the workers, which a busy machine takes seconds for
    go_on.with_suffix(".waits").touch()
    next(batches)


def endless_loop(go_on: Path) -> None:
    while not os.path.exists(go_on):
        pass


def hold_the_gil(go_on: Path) -> None:
    """Until a child of this rank has it go on."""
    pipe, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            wait_until(go_on.exists)
        finally:
            os.write(told, b".")
            os._exit(0)
    # PyDLL keeps the lock during the call.
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    os.waitpid(child, 0)


def be_stopped(go_on: Path) -> None:
    """Until another rank, see `stopper`, has it go on."""
    go_on.with_suffix(".pid").write_text(str(os.getpid()))
    wait_until(go_on.exists)


def stopper(go_on: Path) -> Callable[[int], None]:
    process = go_on.with_suffix(".pid")
    wait_until(process.exists)
    wait_until(process.read_text)
    return lambda number: os.kill(int(process.read_text()), number)


WAYS: dict[str, Callable[[Path], None]] = {
    "loader": lambda go_on: first_batch(go_on, 2),
    "gil": hold_the_gil,
    "stopped": be_stopped,
}


def reported(encoder: torch.nn.Module, length: int) -> Report:
    """One call that not every rank comes to, until the report on it is there."""
    began = time.monotonic()
    call = encoders.sync(encoder, length)
    wait_until(lambda: nemo_patches.status().stalls)
    seconds = time.monotonic() - began
    (stall,) = nemo_patches.status().stalls
    return Report(call, seconds, stall.missing)


def each_way(rank: int, size: int, folder: str) -> dict[str, Report | None]:
    """One encoder for each way to be missing, which rank 1 is."""
    said = Said()
    reports = {}
    for number, way in enumerate(WAYS, 1):
        reports[way] = one_way(rank, size, Path(folder, way), WAYS[way])
        if rank == 1:
            wait_until(lambda n=number: len(said.lines) >= n)
        dist.barrier()
    return reports


def one_way(
    rank: int, size: int, go_on: Path, way: Callable[[Path], None]
) -> Report | None:
    forget_incidents()
    encoder = in_step(timeout=TIMEOUT)
    if rank == 1:
        way(go_on)
        encoders.sync(encoder, 200)
        dist.barrier()
        return None
    send = stopper(go_on) if way is be_stopped and rank == 0 else lambda number: None
    send(signal.SIGSTOP)
    if way is WAYS["loader"]:
        wait_until(go_on.with_suffix(".waits").exists)
    wait_for_others(f"{go_on} begins", size - 1)
    report = reported(encoder, 200)
    wait_for_others(str(go_on), size - 1)
    go_on.touch()
    send(signal.SIGCONT)
    dist.barrier()
    wait_until(lambda: not nemo_patches.status().stalls)
    return report


EACH_WAY = Job(each_way, 3, Given.FOLDER)


@beside_others(EACH_WAY)
@pytest.mark.parametrize(
    ("way", "kind", "where", "workers"),
    [
        (
            "loader",
            "elsewhere",
            "(torch/utils/data/dataloader.py:",
            2,
        ),  # it may still be giving out indices
        ("gil", "no heartbeat", ANSWERS_NOTHING, 0),
        ("stopped", "no heartbeat", ANSWERS_NOTHING, 0),
    ],
)
def test_each_way_to_be_missing_is_told_in_time(
    results: list[Result], way: str, kind: str, where: str, workers: int
) -> None:
    for rank in (0, 2):
        report = results[rank].value[way]
        (missing,) = report.missing
        assert (missing.rank, missing.kind) == (1, kind)
        assert missing.pid > 0
        # Who does not answer does not say.
        assert (missing.calls > 0) == (kind == "elsewhere")
        assert where in missing.where
        assert len(missing.workers) == workers
        assert report.call < TIMEOUT + SLACK_S
        assert report.report < TIMEOUT + REPORT_S


@beside_others(EACH_WAY)
def test_the_lines_are_one_warning_one_recovery_and_one_of_the_late_rank(
    results: list[Result],
) -> None:
    for rank in (0, 2):
        warnings = results[rank].lines(
            "WARNING", "not every rank's length came", "Missing: rank 1 of 3 | rank 1 ("
        )
        recoveries = results[rank].lines("WARNING", "recovered: rank 1 came")
        assert len(warnings) == len(recoveries) == len(WAYS)
        assert len(results[rank].lines("WARNING")) == 2 * len(WAYS)
        assert any("rank 1 had been in " in line for line in recoveries)
        assert any("its data loader's workers: pids " in line for line in warnings)
    late = results[1].lines("WARNING")
    gave_up = results[1].lines("other ranks waited for this one, and gave up")
    assert len(late) == len(gave_up) == len(WAYS)
    assert results[1].lines("it had been in ", "first_batch (")


class Asked:
    """One of two ranks without a network: a test carries what it says to the other."""

    def __init__(self, rank: int, *, asks: bool) -> None:
        self.heard: list[Told] = []
        self.asked_again = 0
        exchange: Any = SimpleNamespace(
            rank=rank, size=2, members=[None, None], trouble="", is_closed=False
        )
        exchange.ask = self.ask
        facts = state(rank, f"place_{rank} (train.py:1)", asks=asks)
        self.looks = Looks(
            exchange,
            LateModules(),
            lambda: facts,
            lambda: None,
            lambda told, own: self.heard.append(told),
        )

    def ask(self) -> None:
        self.asked_again += 1

    def answers(self, id_: str) -> Answers:
        answers = Answers()
        rank = self.looks._exchange.rank
        self.looks.asked(id_, lambda key, one, s: answers.add(key, {rank}, one, s))
        self.looks.tick(time.monotonic())
        return answers

    def judges(self, found: Answers) -> Any:
        verdicts: list[Any] = []
        self.looks.judge(found.to_json(), verdicts.append)
        self.looks.tick(time.monotonic())
        return json.loads(json.dumps(verdicts.pop()))

    def is_told(self, id_: str, verdict: Any) -> None:
        self.looks.told(id_, verdict)
        self.looks.tick(time.monotonic())


@pytest.mark.parametrize("is_in_time", [True, False])
def test_one_rank_judges_and_every_rank_has_its_verdict(is_in_time: bool) -> None:
    """Or each by itself, from the same answers, where that one does not in time."""
    ranks = [Asked(0, asks=False), Asked(1, asks=True)]
    look = ranks[1].looks.begin()
    found = Answers()
    for one in ranks:
        found.add_json(one.answers("id").to_json())
    verdict: Any = {"not judged": found.to_json()}
    if is_in_time:
        verdict = ranks[0].judges(found)
        assert ranks[0].looks._judge is not None
    for one in ranks:
        one.is_told("id", verdict)
    (first,), (second,) = (one.heard for one in ranks)
    assert first.judgement == second.judgement
    assert first.judgement is not None
    assert "rank 0 (node0, pid 100): place_0 (" in first.judgement.job.text()
    assert look.is_done and look.told is second
    assert (ranks[1].looks._judge is None) == is_in_time


def test_nothing_is_judged_where_nothing_is_wrong() -> None:
    """As where rank 0 compares settings: judging is not even imported then."""
    ranks = [Asked(0, asks=False), Asked(1, asks=False)]
    found = Answers()
    for one in ranks:
        found.add_json(one.answers("id").to_json())
    ranks[1].is_told("id", ranks[0].judges(found))
    assert ranks[1].heard == [Told({}, (), None)]
    assert ranks[0].looks._judge is None


def test_a_verdict_from_before_a_look_or_without_this_rank_is_not_its_result() -> None:
    here, there = Asked(0, asks=True), Asked(1, asks=True)
    found = here.answers("early")
    found.add_json(there.answers("early").to_json())
    look = here.looks.begin()
    here.is_told("early", there.judges(found))
    assert not look.is_done
    without_it = there.answers("late")
    here.answers("late")
    without_it.add_silent([0], Silence(HELD_UP))
    here.is_told("late", there.judges(without_it))
    assert not look.is_done
    assert here.asked_again == 3


def test_a_rank_that_was_seen_to_move_has_moved_whatever_an_older_answer_says() -> None:
    """stall_exit's: the answers of two questions may come in the other order."""

    def told(*states: RankFacts, silent: dict[int, Silence]) -> Told:
        by_rank = {one.rank: one for one in states}
        return Told(silent, None, Judge().judgement(Found(2, by_rank, silent)))

    stall = SinceLastStep(LastCall(), stepped_at=0.0, since=0.0)
    stall.take(told(state(0, still=1.0), state(1, still=-1.0), silent={}), now=100.0)
    stall.take(told(state(0, still=50.0), state(1, still=60.0), silent={}), now=101.0)
    assert stall.moved_at == {0: 99.0, 1: 100.0}
    stall.take(told(state(1, still=0.0), silent={0: Silence(LOST)}), now=110.0)
    assert stall.moved_at == {0: 99.0, 1: 110.0}


def healthy(rank: int, size: int, port: int) -> tuple[int, set[str], int]:
    before = open_sockets()
    join_group(rank, size, port)
    nemo_patches.apply(timeout=30.0)
    encoder = encoders.conformer()
    for step in range(1000):
        encoders.sync(encoder, 100 + step % 7)
    dist.barrier()
    names = {thread.name for thread in threading.enumerate()}
    calls = nemo_patches.status().encoders[0].rounds
    here = open_sockets()
    child = os.fork()  # as a data loader's worker
    if child == 0:
        os._exit(open_sockets())
    there = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.destroy_process_group()
    wait_until(
        lambda: (
            "nemo_patches exchange"
            not in {thread.name for thread in threading.enumerate()}
        )
    )
    wait_until(lambda: open_sockets() <= before)
    return calls, names, here - there


def open_sockets() -> int:
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(descriptor).startswith("socket:") and is_tcp(
                int(descriptor.name)
            )
    return found


def is_tcp(descriptor: int) -> bool:
    import socket

    with socket.socket(fileno=os.dup(descriptor)) as one:
        return one.family in (socket.AF_INET, socket.AF_INET6)


@beside_others(Job(healthy, 2, Given.PORT, group=False))
def test_a_healthy_run_says_nothing_and_leaves_nothing(results: list[Result]) -> None:
    for result in results:
        calls, names, closed_in_child = result.value
        assert calls == 1000
        assert closed_in_child == 2  # its connections to the other, in both trees
        assert "nemo_patches stall monitor" in names
        assert result.lines("WARNING") == result.lines("ERROR") == []


def raising_for_a_killed_rank(rank: int, size: int) -> Any:
    from nemo_patches.sync.length_sync import LengthSyncTimeout

    encoder = in_step(timeout=6.0, on_timeout="raise")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        encoders.sync(encoder, 200)
    except LengthSyncTimeout as error:
        found = (time.monotonic() - began, str(error))
    wait_until(lambda: nemo_patches.status().stalls)
    (stall,) = nemo_patches.status().stalls
    wait_for_others("raised", 2)
    return (*found, [(one.rank, one.kind) for one in stall.missing])


@beside_others(Job(raising_for_a_killed_rank, 3, dies=(1,)))
def test_the_exception_comes_for_a_killed_rank_too(results: list[Result]) -> None:
    for rank in (0, 2):
        seconds, text, missing = results[rank].value
        assert seconds < 6 + SLACK_S
        assert missing == [(1, "no heartbeat")]
        assert "the length sync has ended at call 3" in text


def short_stalls(rank: int, size: int) -> tuple[int, int]:
    """Waits that run out of time and rounds that come, faster than the monitor looks; each on an
    encoder of its own.
    """
    nemo_patches.apply(timeout=0.02)
    # No warning where a wait was shortened, and all have come.
    said = Said(logging.INFO)
    timeouts = 0
    kept = [encoders.conformer() for _ in range(15)]
    for encoder in kept:
        for call in range(8):
            if rank == 1 and call == 4:
                time.sleep(0.03)
            encoders.sync(encoder, 100)
            dist.barrier()
    for counters in nemo_patches.status().encoders:
        timeouts += counters.timeouts > 0
    wait_until(
        lambda: (
            len([line for line in said.lines if "not every rank" in line]) >= timeouts
        )
    )
    dist.barrier()
    return timeouts, len([line for line in said.lines if "not every rank" in line])


@beside_others(Job(short_stalls, 2))
def test_no_timeout_is_too_short_to_be_said(results: list[Result]) -> None:
    for result in results:
        timeouts, said = result.value
        assert said >= timeouts
    assert results[0].value[0] >= 1  # on later encoders of the kind, calls wait no more


def monitor_that_fails(rank: int, size: int) -> list[str]:
    encoder = in_step(timeout=TIMEOUT)
    said = Said()
    if rank == 0:
        LateRounds.find = None  # type: ignore[method-assign, assignment]  # any bug of ours
        wait_until(lambda: said.lines)
        encoders.sync(encoder, 200)
    wait_for_others("the late one may come", 2)
    if rank == 1:
        encoders.sync(encoder, 200)
    come_in(encoder)
    for _ in range(3):
        encoders.sync(encoder, 300)
        come_in(encoder)
    return said.lines


@beside_others(Job(monitor_that_fails, 2))
def test_without_the_monitor_the_sync_itself_says_once_that_a_rank_was_late(
    results: list[Result],
) -> None:
    ended, late, recovered = results[0].value
    assert "the stall monitor has ended by an error of its own" in ended
    assert (
        "ConformerEncoder: training call 3: not every rank's length came within" in late
    )
    assert "using this rank's own, 200" in late
    assert "ConformerEncoder: recovered: the missing length came" in recovered


def differing(rank: int, size: int) -> None:
    if rank == 2:
        sys.modules["nemo"].__version__ = "2.7.3"
    others = (
        {}
        if rank == 0
        else {"timeout": 20.0, "metrics": "deferred", "stop_together": "training"}
    )
    nemo_patches.apply(**{"timeout": 30.0, **others})
    encoder = encoders.conformer()
    encoders.sync(encoder, 100)
    wait_until(all_have_come)
    dist.barrier()


@beside_others(Job(differing, 3))
def test_ranks_that_differ_in_versions_or_settings_are_said_once(
    results: list[Result],
) -> None:
    (line,) = results[0].lines("patched on all 3 ranks: ")
    assert results[0].lines("WARNING") == [line]
    versions, settings = line.split("; ranks differ in their settings: ")
    assert (
        f"; ranks differ in their versions: here nemo_patches {nemo_patches.__version__}, nemo "
        in versions
    )
    assert versions.endswith(
        f"; rank 2: nemo_patches {nemo_patches.__version__}, nemo 2.7.3"
    )
    more = "on_timeout=fallback, stall_timeout=60 s"
    others = (
        f"ranks 1-2: sync=bounded, timeout=20 s, {more}; metrics=deferred,"
        " stop_together=training"
    )
    assert settings.endswith(f"here sync=bounded, timeout=30 s, {more}; {others}")
    assert results[1].lines("WARNING") == results[2].lines("WARNING") == []
