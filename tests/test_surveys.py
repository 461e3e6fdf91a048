"""Surveys over both trees: every rank is told where all are, whoever asks, and who is stopped, killed or held up."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from light_ranks import LONG, SOON_S, Rank, reset_some, run
from ranks import wait_until

from nemo_patches.channel.links import VANISHED
from nemo_patches.channel.side_channel import SideChannel
from nemo_patches.channel.store import JobStore
from nemo_patches.channel.survey import HELD_UP, LOST, SILENT, Combined, Verdict, combined

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]

VERDICT_S = 3.0  # ACK, and the patience of a tree of so few levels; SOON_S for a busy machine


class Places:
    """Where each rank is: ranks by place. Equal places are one."""

    def __init__(self, place: str) -> None:
        self.place, self.verdicts = place, queue.SimpleQueue[Verdict]()
        self.replies, self.merges = True, True
        self.rank = -1

    def asked(self, id_: str, reply: Callable[[Any], None]) -> None:
        if self.replies:
            reply({self.place: [self.rank]})

    def merge(self, answers: list[Any]) -> Any:
        if not self.merges:
            raise RuntimeError("of the test's")
        found: dict[str, set[int]] = {}
        for answer in answers:
            for place, ranks in answer.items():
                found.setdefault(place, set()).update(ranks)
        return {place: sorted(ranks) for place, ranks in found.items()}

    def told(self, verdict: Verdict) -> None:
        self.verdicts.put(verdict)


def connect(rank: Rank, place: str = "barrier") -> Places:
    """With both trees whole."""
    places = Places(place)
    places.rank = rank.number
    job_store = JobStore(rank.store, rank.number)
    rank.channel = SideChannel(job_store, rank.number, rank.size, rank.said.append)  # type: ignore[misc]
    assert rank.channel.take_surveys(places)
    rank.hold_rounds()
    wait_until(lambda: all(links.is_whole() for links in rank.channel._trees))
    rank.meet("both trees are whole")
    return places


def told(rank: Rank, places: Places, is_enough: Callable[[Combined], bool]) -> Combined:
    """The latest verdict of each tree, together, once they are enough."""
    latest: dict[bool, Verdict] = {}
    while True:
        verdict = places.verdicts.get(timeout=LONG.total_seconds())
        latest[verdict.is_mirrored] = verdict
        both = combined(latest.values(), rank.size, places.merge)
        if not both.behind and is_enough(both):
            return both


def everybody(rank: Rank) -> set[int]:
    return set(range(rank.size))


def healthy(rank: Rank, askers: str) -> float:
    places = connect(rank, "barrier" if rank.number % 2 else f"place {rank.number % 6}")
    began = time.monotonic()
    if askers == "all" or rank.number == min(rank.size // 2 + 1, rank.size - 1):
        rank.channel.ask()
    verdict = told(rank, places, lambda both: both.heard == everybody(rank))
    took = time.monotonic() - began
    assert verdict.silent == {}
    assert verdict.answer["barrier"] == list(range(1, rank.size, 2))
    assert sorted(one for ranks in verdict.answer.values() for one in ranks) == list(range(rank.size))
    rank.meet("told")
    rank.hold_rounds()
    rank.meet("the end")
    return took


@pytest.mark.parametrize("askers", ["one", "all"])
@pytest.mark.parametrize("size", [2, 8, 64])
def test_every_rank_is_told_where_all_are(size: int, askers: str) -> None:
    assert max(rank.value for rank in run(healthy, size, askers, fan_out=16)) < VERDICT_S + SOON_S


def stopped(rank: Rank, victim: int) -> float:
    places = connect(rank)
    if rank.number == victim:
        rank.store.set("pid", str(os.getpid()))
        rank.meet("in step")
        os.kill(os.getpid(), signal.SIGSTOP)
        took = 0.0
    else:
        rank.meet("in step")
        pid = int(rank.store.get("pid"))
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        began = time.monotonic()
        rank.channel.ask()
        without = set(range(rank.size)) - {victim}
        verdict = told(rank, places, lambda both: both.heard == without)
        took = time.monotonic() - began
        assert {rank_: one.how for rank_, one in verdict.silent.items()} == {victim: SILENT}
        rank.meet("told", rank.size - 1)
        if rank.number == (0 if victim else 1):
            os.kill(pid, signal.SIGCONT)
    rank.hold_rounds()
    rank.meet("it goes on")
    while not places.verdicts.empty():
        places.verdicts.get()
    if rank.number == 1:
        rank.channel.ask()
    assert told(rank, places, lambda both: both.heard == everybody(rank)).silent == {}
    rank.meet("the end")
    return took


@pytest.mark.parametrize(("size", "victim"), [(8, 5), (8, 0), (64, 40), (64, 1), (64, 0), (64, 63)])
def test_a_stopped_rank_is_silent_and_hides_nobody(size: int, victim: int) -> None:
    assert max(rank.value for rank in run(stopped, size, victim, fan_out=16)) < VERDICT_S + SOON_S


def killed(rank: Rank, victim: int) -> None:
    places = connect(rank)
    if rank.number == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(lambda: rank.channel.error)
    rank.meet("known", rank.size - 1)
    wait_until(lambda: not any(links.away for links in rank.channel._trees))
    rank.meet("by all", rank.size - 1)
    if rank.number == (1 if victim == 2 else 2):
        rank.channel.ask()
    without = set(range(rank.size)) - {victim}
    verdict = told(rank, places, lambda both: both.heard == without)
    assert {rank_: one.how for rank_, one in verdict.silent.items()} == {victim: VANISHED}
    rank.meet("the end", rank.size - 1)


@pytest.mark.parametrize(("size", "victim"), [(8, 5), (8, 0), (64, 40), (64, 1), (64, 0)])
def test_a_killed_rank_has_gone_and_hides_nobody(size: int, victim: int) -> None:
    run(killed, size, victim, dies=(victim,), fan_out=16)


def holds_the_lock(rank: Rank) -> None:
    places = connect(rank)
    if rank.number == 1:
        rank.store.set("held", "1")
        ctypes.PyDLL(None).sleep(4)  # with Python's lock, as a long call of an extension
    else:
        rank.store.wait(["held"], LONG)
        time.sleep(0.1)  # for the call to begin: else it answers, and nothing is tried
        rank.channel.ask()
        verdict = told(rank, places, lambda both: both.heard == set(range(rank.size)) - {1})
        assert {rank_: one.how for rank_, one in verdict.silent.items()} == {1: SILENT}
    rank.meet("it goes on")
    rank.hold_rounds()
    if rank.number == 0:
        rank.channel.ask()
    assert told(rank, places, lambda both: both.heard == everybody(rank)).silent == {}
    rank.meet("the end")


def test_a_rank_whose_python_is_held_is_silent_and_well_again_after() -> None:
    run(holds_the_lock, 8, fan_out=4)


def monitor_is_held_up(rank: Rank) -> None:
    places = connect(rank)
    places.replies = rank.number != 1
    rank.meet("set")
    if rank.number == 3:
        rank.channel.ask()
    verdict = told(rank, places, lambda both: both.heard == set(range(rank.size)) - {1})
    assert {rank_: one.how for rank_, one in verdict.silent.items()} == {1: HELD_UP}
    rank.hold_rounds()
    rank.meet("the end")


def test_a_rank_whose_answer_does_not_come_is_held_up_and_hides_nobody() -> None:
    run(monitor_is_held_up, 8, fan_out=4)


def error_of_a_survey(rank: Rank) -> None:
    places = connect(rank)
    places.merges = rank.number != 1
    rank.meet("set")
    if rank.number == 3:
        rank.channel.ask()
    if rank.number == 1:
        wait_until(lambda: rank.said)
        (line,) = rank.said
        assert "surveys have ended by an error of their own" in line and "of the test's" in line
    rank.hold_rounds(50)
    assert not rank.channel.error
    rank.meet("the end")


def test_an_error_in_a_survey_ends_surveys_and_never_rounds() -> None:
    run(error_of_a_survey, 8, fan_out=4)


def surveys_and_resets_in_rounds(rank: Rank) -> None:
    places = connect(rank)
    for number in range(30):
        if rank.number == number % rank.size:
            rank.channel.ask()
        if number % 5 == 0:
            reset_some(rank.channel)
        rank.hold_rounds(10)
    rank.meet("calm")
    wait_until(lambda: all(links.is_whole() for links in rank.channel._trees))
    rank.meet("whole")
    while True:  # a survey of before may be under way
        if rank.number == 0:
            rank.channel.ask()
        verdict = places.verdicts.get(timeout=LONG.total_seconds())
        if not [one for one in verdict.silent if one.how != LOST]:
            break
    rank.meet("the end")


def test_rounds_go_on_beside_surveys_and_connections_that_are_reset() -> None:
    run(surveys_and_resets_in_rounds, 8, fan_out=4)


def nobody_asks(rank: Rank) -> None:
    connect(rank)
    since = time.monotonic()
    time.sleep(1.5)  # nothing is to come: that is no event to wait for
    for links in rank.channel._trees:
        assert all(connection.heard_at < since for connection in links.connections.values())
    rank.meet("the end")


def test_nothing_is_sent_while_nobody_asks() -> None:
    run(nobody_asks, 8, fan_out=4)
