"""Who is missing and what it does: each way to be missing, on real ranks, as every waiting rank
reports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

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
    ENDED,
    HELD_UP,
    LOST,
    NO_ANSWER,
    NOT_COME,
    UNREACHED,
    Answers,
    Silence,
)
from nemo_patches.channel.exchange import Exchange
from nemo_patches.channel.meeting import Member
from nemo_patches.channel.rounds import Latest
from nemo_patches.judging.found import Found
from nemo_patches.judging.judgement import Judge
from nemo_patches.judging.kinds import ANSWERS_NOTHING, UNANNOUNCED
from nemo_patches.judging.missing_rank import MissingRank, Stall
from nemo_patches.sync.encoder_rounds import Group, Round, WatchedRounds, listeners
from nemo_patches.sync.settings import Settings
from nemo_patches.watch import exits, late_rounds, report_file, stalls
from nemo_patches.watch.incidents import Incident, Incidents
from nemo_patches.watch.late_modules import LateModules
from nemo_patches.watch.late_rounds import _IS_SHORT, LateRounds
from nemo_patches.watch.looks import Look, Looks, Told
from nemo_patches.watch.membership import Absent, Gone, Roll
from nemo_patches.watch.stalls import SinceLastStep, Stalls
from nemo_patches.watch.training_notes import LastCall, TrainingNotes

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
    next(
        iter(
            DataLoader(
                SlowAudio(go_on),
                num_workers=workers,
                multiprocessing_context=CONTEXT[workers],
            )
        )
    )


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
    "loader without workers": lambda go_on: first_batch(go_on, 0),
    "loader with workers": lambda go_on: first_batch(go_on, 2),
    "endless loop": endless_loop,
    "holds the GIL": hold_the_gil,
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


def each_way(
    rank: int, size: int, folder: str, missing: tuple[int, ...]
) -> dict[str, Report | None]:
    """One encoder for each way to be missing."""
    said = Said()
    reports = {}
    for number, way in enumerate(WAYS, 1):
        reports[way] = one_way(
            rank, size, Path(folder, way.replace(" ", "_")), WAYS[way], missing
        )
        if rank in missing:
            wait_until(lambda n=number: len(said.lines) >= n)
        dist.barrier()
    return reports


def one_way(
    rank: int,
    size: int,
    go_on: Path,
    way: Callable[[Path], None],
    missing: tuple[int, ...],
) -> Report | None:
    forget_incidents()
    encoder = in_step(timeout=TIMEOUT)
    if rank in missing:
        way(go_on)
        encoders.sync(encoder, 200)
        dist.barrier()
        return None
    send = stopper(go_on) if way is be_stopped and rank == 0 else lambda number: None
    send(signal.SIGSTOP)
    wait_for_others(f"{go_on} begins", size - len(missing))
    report = reported(encoder, 200)
    wait_for_others(str(go_on), size - len(missing))
    go_on.touch()
    send(signal.SIGCONT)
    dist.barrier()
    wait_until(lambda: not nemo_patches.status().stalls)
    return report


EACH_WAY = Job(each_way, 3, Given.FOLDER, (1,))


@beside_others(EACH_WAY)
@pytest.mark.parametrize(
    ("way", "kind", "where"),
    [
        (
            "loader without workers",
            "elsewhere",
            r"read_audio (tests/test_stall_reports.py:",
        ),
        (
            "loader with workers",
            "elsewhere",
            r"_try_get_data (torch/utils/data/dataloader.py:",
        ),
        ("endless loop", "elsewhere", "endless_loop (tests/test_stall_reports.py:"),
        ("holds the GIL", "no heartbeat", ANSWERS_NOTHING),
        ("stopped", "no heartbeat", ANSWERS_NOTHING),
    ],
)
def test_each_way_to_be_missing_is_told_in_time(
    results: list[Result], way: str, kind: str, where: str
) -> None:
    for rank in (0, 2):
        report = results[rank].value[way]
        (missing,) = report.missing
        assert (missing.rank, missing.kind) == (1, kind)
        assert missing.pid > 0
        # Who does not answer does not say.
        assert (missing.calls > 0) == (kind == "elsewhere")
        assert where in missing.where
        assert len(missing.workers) == (2 if way == "loader with workers" else 0)
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
        assert (
            len(
                [
                    line
                    for line in recoveries
                    if "rank 1 had been in wait_until (" in line
                    and "read_audio (" in line
                ]
            )
            == 1
        )
        assert (
            len(
                [
                    line
                    for line in warnings
                    if "its data loader's workers: pids " in line
                ]
            )
            == 1
        )
    late = results[1].lines("WARNING")
    assert (
        len(late)
        == len(results[1].lines("other ranks waited for this one, and gave up"))
        == len(WAYS)
    )
    assert len(results[1].lines("it had been in wait_until (", "read_audio (")) == 1


def two_of_four(rank: int, size: int, folder: str) -> Report | None:
    way = be_stopped if rank in (0, 3) else endless_loop
    return one_way(rank, size, Path(folder, "two"), way, (1, 3))


@beside_others(Job(two_of_four, 4, Given.FOLDER))
def test_two_of_four_are_missing_for_different_reasons(results: list[Result]) -> None:
    for rank in (0, 2):
        report = results[rank].value
        kinds = [(missing.rank, missing.kind) for missing in report.missing]
        assert kinds == [(1, "elsewhere"), (3, "no heartbeat")]
        assert report.call < TIMEOUT + SLACK_S
        assert report.report < TIMEOUT + REPORT_S
        assert len(results[rank].lines("Missing: ranks 1, 3 of 4 | rank 1 (")) == 1


def the_store_goes_with_its_rank(rank: int, size: int, folder: str) -> Report | None:
    encoder = in_step(timeout=TIMEOUT)
    Path(folder, f"ready-{rank}").touch()
    wait_until(
        lambda: all(Path(folder, f"ready-{one}").exists() for one in range(size))
    )
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    report = reported(encoder, 200)
    Path(folder, f"said-{rank}").touch()
    wait_until(
        lambda: all(Path(folder, f"said-{one}").exists() for one in range(1, size))
    )
    return report


@beside_others(Job(the_store_goes_with_its_rank, 3, Given.FOLDER, dies=(0,)))
def test_the_rank_that_the_store_goes_with_is_named(results: list[Result]) -> None:
    for rank in (1, 2):
        report = results[rank].value
        assert [(missing.rank, missing.kind) for missing in report.missing] == [
            (0, "no heartbeat")
        ]
        assert report.call < TIMEOUT + SLACK_S
        assert report.report < TIMEOUT + REPORT_S
        assert len(results[rank].lines("gone: rank 0 of 3 | rank 0 (")) == 1


def two_come_one_after_the_other(rank: int, size: int, folder: str) -> Any:
    """Rank 1 comes when rank 0 has reported it and rank 2 as missing; then it waits for rank 2
    itself.
    """
    encoder = in_step(timeout=TIMEOUT)
    said = [Path(folder, f"said-{one}") for one in range(size)]
    if rank:
        wait_until(said[rank - 1].exists)
    encoders.sync(encoder, 200)
    if rank == 2:
        dist.barrier()
        return None
    wait_until(lambda: nemo_patches.status().stalls)
    missing = [(one.rank, one.kind) for one in nemo_patches.status().stalls[0].missing]
    said[rank].touch()
    dist.barrier()
    return missing


@beside_others(Job(two_come_one_after_the_other, 3, Given.FOLDER))
def test_a_rank_that_came_late_is_not_named_in_its_own_report(
    results: list[Result],
) -> None:
    first, second, _ = results
    assert first.value == [(1, "elsewhere"), (2, "elsewhere")]
    assert second.value == [(2, "elsewhere")]
    assert len(first.lines("Missing: ranks 1-2 of 3 | rank 1 (")) == 1
    assert len(second.lines("Missing: rank 2 of 3 | rank 2 (")) == 1


def gone(rank: int, size: int) -> Report | None:
    encoder = in_step(timeout=TIMEOUT)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    calls = [0.0]

    # What the killed rank had sent for a round may still serve the first of these calls.
    def call_on() -> bool:
        calls.append(encoders.sync(encoder, 200))
        return bool(nemo_patches.status().stalls)

    wait_until(call_on)
    report = time.monotonic() - began
    (stall,) = nemo_patches.status().stalls
    wait_for_others("said", 2)
    return Report(max(calls), report, stall.missing)


@beside_others(Job(gone, 3, dies=(1,)))
def test_a_killed_rank_is_named(results: list[Result]) -> None:
    for rank in (0, 2):
        report = results[rank].value
        assert [(missing.rank, missing.kind) for missing in report.missing] == [
            (1, "no heartbeat")
        ]
        assert report.call < TIMEOUT + SLACK_S
        assert report.report < TIMEOUT + REPORT_S
        assert (
            len(
                results[rank].lines(
                    ": rank 1 of 3 | rank 1 (", "): its process has gone"
                )
            )
            == 1
        )


def never_announced(rank: int, size: int, why: str) -> Report | None:
    encoder = encoders.conformer()
    wait_for_others("ready", size)
    if rank == 1 and why == "raised":
        raise ZeroDivisionError
    if rank == 1:  # stock NeMo waits in the default group
        with contextlib.suppress(RuntimeError):
            encoders.sync(encoder, 100)
        return None
    nemo_patches.apply(timeout=TIMEOUT)
    report = reported(encoder, 100)
    wait_for_others("said", 2)
    return report


@beside_others(
    Job(never_announced, 3, "raised", dies=(1,)),
    Job(never_announced, 3, "not patched", dies=(1,)),
)
def test_a_rank_that_never_announced_itself_is_named(results: list[Result]) -> None:
    for rank in (0, 2):
        report, said = results[rank].value, results[rank].lines()
        assert [(missing.rank, missing.kind) for missing in report.missing] == [
            (1, "unannounced")
        ], said
        assert report.call < TIMEOUT + SLACK_S
        assert report.report < TIMEOUT + REPORT_S
        # A busy machine's store may answer late, which is said; the rank is named once all the
        # same.
        lines = [
            line
            for line in results[rank].lines("WARNING")
            if "cannot see whether" not in line
        ]
        assert len(lines) == 1, "\n".join(lines)
        assert (
            "rank 1 has not announced itself: not patched, or not started" in lines[0]
        )


class Fake:
    """One rank without a process group: what it is told, is what the test says."""

    def __init__(self, size: int = 2, **exchange: Any) -> None:
        self.told: list[Told | None] = []  # in this order; None: not yet
        self.notes = TrainingNotes()
        now = time.monotonic()
        self.progress = SimpleNamespace(
            stepped_at=now, moved_at=now, anew_at=0.0, has_started=True
        )
        here: Any = {"is_joined": True, "is_whole": True, "any_died": False}
        here |= {"trouble": "", "over": "", "ended": {}, "members": [None] * size}
        here |= {"size": size, "any_failed": False, **exchange}
        self.exchange = SimpleNamespace(**here)
        self.begun: list[Look] = []
        self.latest = None
        self.incidents = Incidents(
            Group(0, size, 0),
            cast(Any, self.exchange),
            self.notes,
            cast(Any, self.progress),
            LateModules(),
            cast(Any, self),
        )

    def alone(self) -> Told:
        return told_of({})

    def begin(self) -> Look:
        look = Look(ends_at=math.inf)
        if self.told:
            look.told = self.told.pop(0)
            look.is_done = look.told is not None
        self.begun.append(look)
        return look

    def tick(self, is_last: bool = False) -> None:
        self.incidents.tick(is_last)


def told_of(
    silent: dict[int, str], *states: Any, late: tuple[str, int] | None = None
) -> Told:
    """What the rank that judges says of two ranks, and of a late round."""
    silences = {rank: Silence(how) for rank, how in silent.items()}
    states_of = {one.rank: one for one in states}
    if late is not None:
        key, number = late
        call = {key: (number, -1, -1, -1)}
        states_of = {rank: replace(one, late=call) for rank, one in states_of.items()}
    seen = Found(len(silences) + len(states_of), states_of, silences)
    return Told(silences, None, Judge().judgement(seen))


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
    stall = SinceLastStep(LastCall(), stepped_at=0.0, since=0.0)
    stall.take(told_of({}, state(0, still=1.0), state(1, still=-1.0)), now=100.0)
    stall.take(told_of({}, state(0, still=50.0), state(1, still=60.0)), now=101.0)
    assert stall.moved_at == {0: 99.0, 1: 100.0}
    stall.take(told_of({0: LOST}, state(1, still=0.0)), now=110.0)
    assert stall.moved_at == {0: 99.0, 1: 110.0}


def test_on_stalls_command_is_waited_for_also_where_the_process_ends_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """stall_exit has decided, and then training ends by the error of another rank's end."""
    settings = Settings.resolve({"stall_timeout": 1.0, "stall_exit": 2.0})
    for module in (exits, stalls):
        monkeypatch.setattr(module, "current", lambda: settings)
    monkeypatch.setattr(report_file.ReportFile, "write", lambda *_: None)
    ended = list[str]()
    monkeypatch.setattr(exits.os, "_exit", lambda code: ended.append(f"exit {code}"))
    fake = Fake()
    fake.ranks_here = lambda: None  # type: ignore[attr-defined]
    fake.notes.last = LastCall(calls=1)
    fake.progress.stepped_at = fake.progress.moved_at = time.monotonic() - 100
    both = [state(0, "f (a.py:1)", "barrier"), state(1, "read (b.py:2)")]
    waits = [replace(one, still=99.0) for one in both]
    fake.told = [told_of({}, *waits), told_of({}, *waits)]
    seen = Stalls(fake.incidents)
    leaving = exits.Exits(fake.incidents, seen)
    seen.find(time.monotonic(), is_last=False)
    assert seen.stall is not None
    command = SimpleNamespace(join=lambda _: ended.append("the command has ended"))
    seen.stall.command = cast(Any, command)
    fake.tick()
    assert leaving.leaves
    fake.tick(is_last=True)
    assert not leaving.leaves
    leaving.leave()
    assert ended == ["the command has ended", "exit 83"]


def test_a_rank_that_is_silent_for_a_moment_is_asked_again_before_a_stall_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As while py-spy reads its stack. One that stays silent is said at the second question."""
    monkeypatch.setattr(report_file.ReportFile, "write", lambda *_: None)
    here = state(0, "train (train.py:80)", "barrier")
    there = state(1, "read (data.py:41)")
    for second in (told_of({}, here, there), told_of({1: NO_ANSWER}, here)):
        said = Said()
        fake = Fake()
        fake.told = [told_of({1: NO_ANSWER}, here), second]
        fake.progress.stepped_at = fake.progress.moved_at = time.monotonic() - 100
        Stalls(fake.incidents)
        fake.tick()
        assert said.lines == []
        fake.tick()
        (line,) = said.lines
        assert ("answers nothing" in line) == (1 in second.silent)
        assert ("rank 1 (node1, pid 101): read" in line) == (1 not in second.silent)
        assert len(fake.begun) == 2
        logging.getLogger("nemo_patches").removeHandler(said)
    # The line comes before the end of the process, whatever else.
    ends = Settings.resolve({"stall_exit": 60, "stall_timeout": 60})
    monkeypatch.setattr(stalls, "current", lambda: ends)
    said = Said()
    fake = Fake()
    fake.told = [told_of({1: NO_ANSWER}, here)]
    fake.progress.stepped_at = fake.progress.moved_at = time.monotonic() - 100
    Stalls(fake.incidents)
    fake.tick()
    assert "answers nothing" in said.lines[0]


def test_a_rank_that_a_report_names_is_not_named_again_where_there_had_been_trouble() -> (
    None
):
    said = Said()
    stalls = list[Stall]()
    fake = Fake(is_joined=False, trouble="no way")
    fake.notes.last = LastCall(calls=1, since=time.monotonic() - 60)
    late_rounds = SimpleNamespace(is_busy=True)
    fake.incidents.stalls = lambda: tuple(stalls)  # type: ignore[method-assign]
    absent = Absent(fake.incidents, cast(Any, late_rounds))
    fake.told = [told_of({0: LOST, 1: NOT_COME}) for _ in range(5)]
    fake.tick()
    (line,) = said.lines
    assert line.endswith("cannot see whether every rank is patched: no way")
    fake.exchange.trouble = ""

    def look_again() -> None:
        absent._next_look = 0.0
        fake.tick()

    look_again()
    look_again()
    stalls.append(
        Stall(
            "Encoder", 1, timedelta(seconds=60), (MissingRank(1, UNANNOUNCED),), 2, ""
        )
    )
    look_again()
    assert said.lines == [line]
    assert absent.missing == (1,)
    stalls.clear()
    late_rounds.is_busy = False
    look_again()
    assert said.lines == [line]  # it has been named


def test_an_absent_rank_that_no_report_names_is_named_once() -> None:
    said = Said()
    fake = Fake(size=3, is_joined=False)
    fake.notes.last = LastCall(calls=1, since=time.monotonic() - 60)
    absent = Absent(fake.incidents, cast(Any, SimpleNamespace(is_busy=False)))
    fake.told = [told_of({0: LOST, 1: NOT_COME, 2: UNREACHED}) for _ in range(2)]
    for _ in range(2):
        absent._next_look = 0.0
        fake.tick()
    absent_line, unreached_line = said.lines
    assert "rank 1 of 3 has not announced itself within 10 s" in absent_line
    assert "rank 2 of 3 is patched, and cannot be reached: " in unreached_line


@pytest.mark.parametrize("rank", [0, 9])
def test_of_many_ranks_rank_0_says_all_of_one_that_is_absent_or_late_and_each_says_who(
    rank: int,
) -> None:
    said = Said()
    fake = Fake(size=16, is_joined=False)
    fake.incidents.group = Group(rank, 16, 0)
    fake.notes.last = LastCall(calls=1, since=time.monotonic() - 60)
    Absent(fake.incidents, cast(Any, SimpleNamespace(is_busy=False)))
    fake.told = [told_of({8: NOT_COME})]
    fake.tick()
    (absent,) = said.lines
    assert "rank 8 of 16 has not announced itself within 10 s" in absent
    assert ("`nemo-patches status` there" in absent) == (rank == 0)
    logging.getLogger("nemo_patches").removeHandler(said)
    said = Said()
    fake = Fake(size=16)
    fake.incidents.group = Group(rank, 16, 0)
    one = OneEncoder(fake, waited_s=3600)
    one.gives_up()
    came = {"rounds": {"an encoder": 1}}
    states = [state(each, **came) for each in range(16) if each != 8]
    states.append(state(8, "read (data.py:41)"))
    fake.told = [told_of({}, *states, late=("an encoder", 1)) for _ in range(2)]
    LateRounds(fake.incidents)
    fake.tick()
    (line,) = said.lines
    assert ". Missing: rank 8 of 16 | " in line
    assert ("read (data.py:41)" in line) == (rank == 0)
    assert line.endswith(" | where: in rank 0's line") == (rank > 0)


@pytest.mark.parametrize(
    ("host", "named"), [("node2", "rank 0"), ("node0", "ranks 0, 2")]
)
def test_a_rank_that_ends_after_another_was_killed_is_named_where_both_shared_a_host(
    host: str, named: str
) -> None:
    """A question finds rank 2 gone, too: by Gloo's error, or killed with rank 0 and its host's."""
    hosts = ("node0", "node1", host)
    members = [Member(one, "127.0.0.1", 1, 100) for one in hosts]
    said = Said()
    fake = Fake(size=3, any_died=True, ended={0: Silence(ENDED)}, members=members)
    fake.incidents.group = Group(1, 3, 0)
    fake.told = [told_of({0: ENDED, 2: ENDED}, state(1))]
    Gone(fake.incidents)
    fake.tick()
    (line,) = said.lines
    assert f"this job: gone: {named} of 3 | rank 0 (node0, pid 100): its pro" in line


class WhileSaid(Said):
    """What `look` gives while each line is said."""

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__()
        self.look = look
        self.seen: list[object] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.look())


@pytest.mark.parametrize("kind", ["gone", "stall"])
def test_a_report_can_be_seen_once_its_line_is_said(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for it may look for the line at once, or end the process."""
    here = state(0, "train (train.py:80)", "barrier")
    fake = Fake(any_died=kind == "gone")
    fake.told = [told_of({1: ENDED}, here)]
    fake.progress.stepped_at = fake.progress.moved_at = time.monotonic() - 100
    Gone(fake.incidents) if kind == "gone" else Stalls(fake.incidents)
    monkeypatch.setattr(report_file.ReportFile, "write", lambda *_: None)
    said = WhileSaid(fake.incidents.stalls)
    fake.tick()
    logging.getLogger("nemo_patches").removeHandler(said)
    assert said.seen == [()]
    assert len(fake.incidents.stalls()) == 1


class AllAnnounced:
    """Notes what it is told of all ranks, and whether that was to be seen before."""

    def __init__(self, roll: Roll) -> None:
        self.events = list[tuple[int, tuple[str, ...]]]()
        self.roll = roll

    def told(self, size: int, differences: tuple[str, ...]) -> bool:
        assert not self.roll.is_done
        self.events.append((size, differences))
        return True


def test_what_differs_stands_in_the_line_of_all_ranks_however_late_it_is_known() -> (
    None
):
    """Rank 1 calls its first encoder only after that line was due."""
    now = time.monotonic()
    fake = Fake()
    fake.notes.last = LastCall(calls=1, since=now)
    roll = Roll(fake.incidents)
    told_of_all = AllAnnounced(roll)
    differs = "ranks differ in their settings: here ; rank 1: sync=local"
    told = [Told({}, one, None) for one in (None,) * 5 + ((differs,),) * 2]
    before_told, listeners.all_announced = listeners.all_announced, told_of_all.told
    incident = Incident("roll", now)
    try:
        for second in range(200):
            at = now + second
            if roll.find(at, is_last=False) and at >= roll.next_at(incident):
                roll.say(incident, told.pop(0), at)
            if second == 59:
                assert not told_of_all.events  # each may still be about to call one
            if second == 60:
                assert told_of_all.events == [(2, ())]
    finally:
        listeners.all_announced = before_told
    assert told_of_all.events == [(2, ()), (2, (differs,))]
    assert roll.is_done
    assert not told


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


def raising(rank: int, size: int, folder: str) -> Any:
    from nemo_patches.sync.length_sync import LengthSyncTimeout

    encoder = in_step(timeout=4.0, on_timeout="raise")
    go_on = Path(folder, "raised")
    if rank == 1:
        read_audio(go_on)
        return None
    began = time.monotonic()
    try:
        encoders.sync(encoder, 200)
    except LengthSyncTimeout as error:
        found = (time.monotonic() - began, str(error))
    wait_until(lambda: nemo_patches.status().stalls)
    (stall,) = nemo_patches.status().stalls
    wait_for_others("raised", 2)
    go_on.touch()
    return (*found, stall.missing)


@beside_others(Job(raising, 3, Given.FOLDER))
def test_after_the_exception_the_log_and_the_status_say_who_is_missing_and_where_it_is(
    results: list[Result],
) -> None:
    for rank in (0, 2):
        seconds, text, missing = results[rank].value
        assert seconds < 4 + SLACK_S
        assert "not every rank's length came within" in text
        assert [(one.rank, one.kind) for one in missing] == [(1, "elsewhere")]
        assert "read_audio (tests/test_stall_reports.py:" in missing[0].where
        assert results[rank].lines("WARNING", "Missing: rank 1 of 3 | rank 1 (")


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


class OneEncoder:
    """Its round 1, which was issued so long ago."""

    def __init__(self, fake: Fake, waited_s: float) -> None:
        self.rounds = Exchange(lambda: None, 0, 2, print).rounds("an encoder")
        self.rounds.issued = 1
        self.waited_s = waited_s
        late = "late after {waited:.2f} s with {length}"
        key = "an encoder"
        self.sync = WatchedRounds(
            "Encoder", key, fake.incidents.group, self.rounds, late
        )
        self.round = Round(number=1, call=1, training=True, length=7)
        self.round.issued_at -= waited_s
        self.sync.round = self.round
        fake.notes._syncs = (self.sync,)

    def gives_up(self) -> None:
        self.round.gave_up_at = self.round.issued_at + self.waited_s
        self.sync.timed_out = self.round

    def comes(self) -> None:
        self.rounds.latest = Latest(1, came_at=time.monotonic())


def test_a_timeout_is_said_however_long_the_monitor_was_kept_from_running() -> None:
    """Also where the round has come meanwhile, and this process ends."""
    said = Said()
    fake = Fake()
    one = OneEncoder(fake, waited_s=0.0)
    one.gives_up()
    one.comes()
    LateRounds(fake.incidents)
    fake.tick(is_last=True)
    assert (
        f"Encoder: training call 1: late after 0.00 s with 7{_IS_SHORT}. Missing: "
        in said.lines[0]
    )


@pytest.mark.parametrize(
    ("waited_s", "level"), [(0.05, logging.INFO), (10.0, logging.WARNING)]
)
def test_a_round_that_only_a_shortened_wait_did_not_see_come_is_no_warning(
    waited_s: float, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an incident, on a busy machine: all ranks are there, and nobody is missing."""
    monkeypatch.setattr(
        late_rounds, "current", lambda: Settings.resolve({"timeout": 10})
    )
    said = Said(logging.INFO)
    fake = Fake(size=3)
    one = OneEncoder(fake, waited_s)
    one.gives_up()
    states = [state(rank, rounds={"an encoder": 1}) for rank in range(3)]
    fake.told = [told_of({}, *states, late=("an encoder", 1))]
    LateRounds(fake.incidents)
    fake.tick()
    one.comes()
    fake.tick()
    text = (
        f"Encoder: training call 1: late after {waited_s:.2f} s with 7"
        f"{_IS_SHORT if waited_s < 10 else ''}. Every rank has come by now"
    )
    assert said.levels == [level, level]
    assert said.lines[0].endswith(text)
    assert "Encoder: recovered: the missing length came " in said.lines[1]


def test_a_process_that_was_stopped_asks_before_it_says_who_is_missing() -> None:
    """As a whole job is, by `scontrol suspend`: the report was due long ago when it is first
    thought of.
    """
    said = Said()
    fake = Fake()
    OneEncoder(fake, waited_s=3600)
    LateRounds(fake.incidents)
    fake.tick()
    assert not said.lines
    here = state(0, rounds={"an encoder": 1})
    fake.begun[-1].told = told_of({1: NOT_COME}, here, late=("an encoder", 1))
    fake.begun[-1].is_done = True
    fake.tick()
    assert "Missing: rank 1 of 2 | rank 1 has not announced itself" in said.lines[0]


def test_a_round_that_was_said_early_is_one_incident_until_it_comes() -> None:
    """After a shortened wait: not once more at the timeout."""
    said = Said()
    fake = Fake()
    one = OneEncoder(fake, waited_s=0.0)
    one.gives_up()
    here = state(0, rounds={"an encoder": 1})
    fake.told = [told_of({1: NOT_COME}, here, late=("an encoder", 1))]
    LateRounds(fake.incidents)
    for _ in range(3):
        fake.tick()
    assert len(said.lines) == 1
    one.comes()
    fake.tick()
    assert "recovered: rank 1 came " in said.lines[-1]
    assert len(said.lines) == 2


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


def rounds_shifted_by_a_late_rank(rank: int, size: int) -> list[str]:
    encoder = in_step(timeout=2 * TIMEOUT)
    said = Said()
    if rank == 0:
        encoders.sync(encoder, 200)  # rank 1 is late
        encoders.sync(encoder, 201)  # no round: the one before is still outstanding
    wait_for_others("rank 0 has made two calls", 2)
    if rank == 1:
        encoders.sync(encoder, 200)
        # Waits in vain for rank 0, which waits for this rank.
        encoders.sync(encoder, 201)
        wait_until(lambda: any("call 4: not every rank" in line for line in said.lines))
    dist.barrier()
    return said.lines


@beside_others(Job(rounds_shifted_by_a_late_rank, 2))
def test_a_rank_that_waits_itself_after_a_call_without_a_round_is_not_blamed(
    results: list[Result],
) -> None:
    _, late = results
    (line,) = [line for line in late.value if "call 4: not every rank" in line]
    assert line.endswith(". Every rank has come by now")


def blocked_elsewhere(rank: int, size: int, folder: str) -> Report | None:
    """The waiting ranks' training threads are in another collective while their round stays open."""
    encoder = in_step(timeout=TIMEOUT)
    go_on = Path(folder, "go on")
    if rank == 1:
        read_audio(go_on)
        encoders.sync(encoder, 200)
        dist.barrier()
        return None
    began = time.monotonic()
    call = encoders.sync(encoder, 200)
    seen: list[Any] = []

    def look() -> None:
        wait_until(lambda: nemo_patches.status().stalls)
        seen.extend([time.monotonic() - began, nemo_patches.status().stalls[0]])
        wait_for_others("seen", 2)
        go_on.touch()

    looking = threading.Thread(target=look)
    looking.start()
    dist.barrier()
    looking.join()
    return Report(call, seen[0], seen[1].missing)


@beside_others(Job(blocked_elsewhere, 3, Given.FOLDER))
def test_a_round_left_open_is_reported_while_the_training_thread_is_elsewhere(
    results: list[Result],
) -> None:
    for rank in (0, 2):
        report = results[rank].value
        assert [(one.rank, one.kind) for one in report.missing] == [(1, "elsewhere")]
        assert report.report < TIMEOUT + REPORT_S
        assert "read_audio (" in report.missing[0].where
        assert len(results[rank].lines("not every rank's length came")) == 1


def late_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if "not every rank's length came" in line]


def permanent(rank: int, size: int, folder: str) -> list[str]:
    late_rounds.FIRST_REPEAT_S = 1.0  # a minute, for a test that can wait
    said = Said()
    encoder = in_step(timeout=1.0)
    go_on = Path(folder, "go on")
    if rank == 1:
        read_audio(go_on)
    else:
        calls = threading.Event()

        def call_on() -> None:
            while not calls.is_set():
                encoders.sync(encoder, 100)
                time.sleep(0.001)

        calling = threading.Thread(target=call_on)
        calling.start()
        # At once, and after 1, 3 and 7 s.
        wait_until(lambda: len(late_lines(said.lines)) >= 4)
        calls.set()
        calling.join()
        go_on.touch()
    encoders.sync(encoder, 100)
    dist.barrier()
    return said.lines


@beside_others(Job(permanent, 2, Given.FOLDER))
def test_a_permanent_stall_is_repeated_with_growing_pauses_and_not_on_every_call(
    results: list[Result],
) -> None:
    first, _ = results
    reports = late_lines(first.value)[:4]
    assert ["still" in line for line in reports] == [False, True, True, True]
    assert all("rank 1 (" in line and "read_audio (" in line for line in reports)
    ages = [int(line.split("still (after 0:00:")[1][:2]) for line in reports[1:]]
    assert ages[1] - ages[0] >= 2 and ages[2] - ages[1] >= 4


def left(rank: int, size: int) -> Any:
    encoder = in_step(timeout=TIMEOUT)
    if rank == 1:
        dist.destroy_process_group()
        return None
    encoders.sync(encoder, 200)
    wait_until(lambda: nemo_patches.status().stalls)
    (stall,) = nemo_patches.status().stalls
    wait_for_others("said", 2)
    return [(one.rank, one.kind) for one in stall.missing]


@beside_others(Job(left, 3))
def test_a_rank_that_has_left_is_told_from_one_that_was_killed(
    results: list[Result],
) -> None:
    assert results[0].value == results[2].value == [(1, "left")]
    assert (
        len(
            results[0].lines(
                "rank 1 (", "has left: it ended, or destroyed its process group"
            )
        )
        == 1
    )


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
    flag = "ConformerEncoder: sync_max_audio_length=True, its config is not known"
    others = (
        f"ranks 1-2: sync=bounded, timeout=20 s, {more}; metrics=deferred,"
        f" stop_together=training; {flag}"
    )
    assert settings.endswith(
        f"here sync=bounded, timeout=30 s, {more}; {flag}; {others}"
    )
    assert results[1].lines("WARNING") == results[2].lines("WARNING") == []
