"""Rounds that a rank stops, in any order of events: real exchanges, without threads and sockets.

A schedule says what happens next: a rank's first word, its deadline, an error, a kill, a message's
arrival, a lost connection. Each rank's program is that of options/checkpoints.py. However it goes,
no rank is left that waits without limit while another one goes on as stock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_patches.channel import meeting
from nemo_patches.channel.answers import ENDED
from nemo_patches.channel.exchange import Exchange
from nemo_patches.channel.link import Message
from nemo_patches.channel.rounds import RoundFailed, RoundsStopped

QUESTIONS = 3


class Wire:
    """One end of a connection."""

    is_ready = True
    is_suspect = False
    is_cut = False
    has_list = True  # all have joined

    def __init__(self, rank: int) -> None:
        self.rank = rank  # of the other end
        self.coming = deque[Message]()
        self.other: Wire

    def send(self, kind: int, key: int = 0, number: int = 0, value: int = 0) -> None:
        self.other.coming.append(Message(kind, key, number, value, b""))


class OwnExchange(Exchange):
    def post(self, call: Callable[[], object]) -> None:
        self._inbox.append(call)


class SimulatedRank:
    def __init__(self, job: Job, rank: int, habit: str) -> None:
        """habit: "agrees"; "stock", it never speaks; "errs", at its second question."""
        self.job = job
        self.exchange = OwnExchange(lambda: None, rank, job.size, lambda text: None)
        self.rank = rank
        self.habit = habit
        self.outcome = ""
        self.answers: list[int] = []
        self.has_deadline = False  # it waits in the first round
        self.is_late = False
        self.program = self._program()

    def _program(self) -> Iterator[None]:
        """As RankZero: a step after each yield, and the outcome."""
        if self.habit == "stock":
            self.outcome = "stock"
            return
        begin = self.exchange.rounds("begin")
        rounds = self.exchange.rounds("answers")
        try:
            begin.issue(0)
            yield
            self.has_deadline = True
            while begin.poll() is None:
                yield
                if self.is_late and self.has_deadline:
                    self.has_deadline = False
                    begin.give_up()
            self.has_deadline = False
            for question in range(QUESTIONS):
                yield
                if self.habit == "errs" and question == 1:
                    raise ValueError
                rounds.issue(10 * question + self.rank)
                while (answer := rounds.poll()) is None:
                    yield
                self.answers.append(answer)
            self.outcome = "agreed"
        except (RoundsStopped, ValueError):
            rounds.leave()
            self.outcome = "stock"
        except RoundFailed:
            self.outcome = "raised"

    def step(self) -> None:
        next(self.program, None)

    def miss_deadline(self) -> None:
        self.is_late = True
        self.step()

    def work(self) -> None:
        self.exchange._inbox.popleft()()

    def join(self) -> None:
        size = self.job.size
        member = meeting.Member("host", "127.0.0.1", 1, 1)
        self.exchange.members = [member] * size
        self.exchange._joined()


class Job:
    def __init__(self, habits: list[str]) -> None:
        self.size = len(habits)
        self.ranks = [SimulatedRank(self, *each) for each in enumerate(habits)]
        self.wires: dict[tuple[int, int], Wire] = {}
        self.parents = meeting.parents_of(["host"] * self.size)
        self.killed = set[int]()

    def living(self) -> list[SimulatedRank]:
        return [rank for rank in self.ranks if rank.rank not in self.killed]

    def connect(self, child: int) -> None:
        parent = self.parents[child]
        here, there = Wire(parent), Wire(child)
        here.other, there.other = there, here
        self.wires[child, parent], self.wires[parent, child] = here, there
        for rank, wire in ((child, here), (parent, there)):
            self.ranks[rank].exchange._is_ready(wire)  # type: ignore[arg-type]

    def disconnect(self, child: int) -> None:
        """What is on its way is lost."""
        for pair in ((child, self.parents[child]), (self.parents[child], child)):
            del self.wires[pair]
            del self.ranks[pair[0]].exchange._links[pair[1]]

    def deliver(self, pair: tuple[int, int]) -> None:
        wire: Any = self.wires[pair]
        self.ranks[pair[0]].exchange._hear(wire, wire.coming.popleft())

    def kill(self, rank: int) -> None:
        self.killed.add(rank)
        for child in range(1, self.size):
            if rank in (child, self.parents[child]) and self.is_connected(child):
                self.disconnect(child)

    def is_connected(self, child: int) -> bool:
        return (child, self.parents[child]) in self.wires

    def refused(self, child: int) -> bool:
        """Whether one end of this connection learns now that the other has ended."""
        ends = {child, self.parents[child]}
        news = False
        for end in ends - self.killed:
            exchange = self.ranks[end].exchange
            for dead in ends & self.killed - exchange._ended.keys():
                if exchange.is_joined and dead in exchange._neighbours():
                    exchange._has_ended(dead, ENDED)
                    news = True
        return news

    def events(self) -> list[Callable[[], object]]:
        """What may happen next by itself: it does, sooner or later."""
        found: list[Callable[[], object]] = []
        for rank in self.living():
            if not rank.outcome:
                found.append(rank.step)
            if rank.exchange._inbox:
                found.append(rank.work)
            if not rank.exchange.is_joined and self.ranks[0].exchange.is_joined:
                found.append(rank.join)
        for pair, wire in self.wires.items():
            if wire.coming:
                found.append(lambda pair=pair: self.deliver(pair))
        for child in range(1, self.size):
            ends = {child, self.parents[child]}
            can = self.ranks[child].exchange.is_joined and not ends & self.killed
            if can and not self.is_connected(child):
                found.append(lambda child=child: self.connect(child))
        return found

    def troubles(self) -> list[Callable[[], object]]:
        """What need not happen."""
        found: list[Callable[[], object]] = [
            rank.miss_deadline for rank in self.living() if rank.has_deadline
        ]
        if not self.ranks[0].exchange.is_joined:
            found.append(self.ranks[0].join)  # all have registered
        for child in range(1, self.size):
            if self.is_connected(child):
                found.append(lambda child=child: self.disconnect(child))
        return found

    def settle(self) -> None:
        """Until nothing more happens, all deadlines included."""
        for _ in range(100):
            for _ in range(10):
                for event in self.events():
                    event()
            for child in range(1, self.size):
                self.refused(child)
            for rank in self.living():
                if rank.has_deadline:
                    rank.miss_deadline()
            if all(rank.outcome for rank in self.living()):
                return

    def close(self) -> None:
        for rank in self.ranks:
            rank.exchange.forget()


@pytest.fixture(autouse=True)
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "FAN_OUT", 2)


def ran(habits: list[str], schedule: list[int], kills: int = -1) -> Job:
    job = Job(habits)
    try:
        for number, choice in enumerate(schedule):
            if number == kills:
                job.kill(choice % job.size)
            events = [*job.events(), *job.troubles()]
            if events:
                events[choice % len(events)]()
        job.settle()
    finally:
        job.close()
    return job


HABITS = st.lists(
    st.sampled_from(["agrees", "agrees", "agrees", "stock", "errs"]),
    min_size=2,
    max_size=6,
)
SCHEDULES = st.lists(st.integers(0, 10_000), max_size=120)


@settings(max_examples=1500, deadline=None)
@given(HABITS, SCHEDULES)
def test_no_rank_waits_for_one_that_goes_on_as_stock(
    habits: list[str], schedule: list[int]
) -> None:
    job = ran(habits, schedule)
    outcomes = [rank.outcome for rank in job.ranks]
    assert all(outcomes), (habits, outcomes)
    assert "raised" not in outcomes
    if any(habit == "stock" for habit in habits):
        assert set(outcomes) == {"stock"}
    if not any(habit == "errs" for habit in habits):
        assert len(set(outcomes)) == 1, outcomes  # all are alike
    # Rank by rank the same answers, and all stop at the same question, but for one with an error.
    longest = max((rank.answers for rank in job.ranks), key=len)
    assert all(rank.answers == longest[: len(rank.answers)] for rank in job.ranks)
    stopped = {
        len(rank.answers)
        for rank in job.ranks
        if rank.outcome == "stock" and rank.habit == "agrees"
    }
    assert len(stopped) <= 1


@settings(max_examples=1500, deadline=None)
@given(HABITS, SCHEDULES, st.integers(0, 119))
def test_where_one_is_killed_no_other_waits_without_limit(
    habits: list[str], schedule: list[int], kills: int
) -> None:
    job = ran(habits, schedule, kills)
    outcomes = [rank.outcome for rank in job.living()]
    assert all(outcomes), (habits, outcomes, job.killed)
