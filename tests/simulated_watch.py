"""A job in simulated time, as its watches see it: on each rank the real loop (StallMonitor with its
reasons, looks and facts), and the real judge.

A table says what each rank does from which second on. The network, the clock, what a stack and /proc
show, and the ends of processes are made up. Nothing waits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, cast

import pytest

from nemo_patches.channel.answers import (
    ENDED,
    LEFT,
    NEVER_HEARD,
    NO_ANSWER,
    NOT_COME,
    NOT_HEARD,
    Answers,
    Silence,
)
from nemo_patches.channel.meeting import Member
from nemo_patches.channel.rounds import Latest
from nemo_patches.facts import RankFacts
from nemo_patches.limits import HERE_S
from nemo_patches.sync import length_sync
from nemo_patches.sync.encoder_rounds import Group, Round, WatchedRounds
from nemo_patches.sync.settings import Settings
from nemo_patches.watch import (
    at_work,
    exits,
    log_line,
    looks,
    on_stall,
    own_facts,
    place,
    report_file,
    stall_monitor,
)
from nemo_patches.watch.exits import Exits
from nemo_patches.watch.late_modules import LateModules
from nemo_patches.watch.stall_monitor import StallMonitor
from nemo_patches.watch.training_notes import LastCall, TrainingNotes
from nemo_patches.watch.training_thread import NumberedThread

_START = 1000.0  # of the clock: to the watch 0.0 is "not yet"
_SOON_S = 0.01  # until a rank that is woken looks
_WATCH = stall_monitor.__name__.rpartition(".")[0]


@dataclass(frozen=True)
class Doing:
    """What a rank does. In a collective it begins it. silent: how, if it is not there.

    comes: it calls its encoder, and waits in its round until that comes, or so many seconds. flag:
    what it says of its encoder. trouble: of its exchange. is_known: whether its end is heard of.
    """

    where: str = "step (train.py:9)"
    collective: str = ""
    activity: str = ""
    request: str = ""
    every_s: float = 0.0  # it begins a collective so often
    encodes: bool = False  # and then calls its encoder, too
    works: bool = False  # it takes a core
    polls: bool = False  # it runs now and then
    waits_for_child: bool = False  # for any
    comes: float = 0.0
    flag: str = "Encoder: flag=True"
    trouble: str = ""
    silent: str = ""
    is_known: bool = True


TRAINS = Doing(every_s=0.5, encodes=True)
STEPS = Doing(every_s=0.5)  # without an encoder
GRADIENTS = Doing(collective="backward, which reduces the gradients")
BARRIER = Doing("save (train.py:31)", collective="barrier")
GATHER = Doing("score (train.py:55)", collective="all_gather")
RECEIVES = Doing("next_request (serve.py:5)", collective="broadcast_object_list")
READS = Doing("read (data.py:41)")
POLLS = Doing("wait_for_file (data.py:7)", polls=True)
WORKS = Doing("decode (metric.py:12)", works=True)
SAVES = Doing("write (ckpt.py:3)", activity="a checkpoint")
GPU = Doing("item (train.py:11)", collective="perhaps the GPU, in item()")
ASKS = Doing("get (serve.py:2)", request="input()")
STOPPED = Doing(silent=NO_ANSWER)
KILLED = Doing(silent=ENDED)
HAS_LEFT = Doing(silent=LEFT)
ABSENT = Doing(silent=NOT_COME)

Row = tuple[float, Sequence[Doing]]  # from so many seconds on, what each rank does


class Line(NamedTuple):
    at: float
    level: str
    text: str


class Page(NamedTuple):
    """on_stall was run, and given this."""

    at: float
    command: str
    content: dict[str, Any]


class Exited(BaseException):
    """In place of the end of a process."""


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now = _START

    def monotonic(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class NoThread:
    """In place of a Daemon: what it would run is run at once, or not at all."""

    def __init__(self, *_: Any) -> None: ...

    def begin(self) -> str:
        return "a test has none"


class Rank:
    """One rank: its watch, what it does, and what it has said and done."""

    def __init__(self, job: Job, number: int, doing: Doing) -> None:
        self.job, self.number = job, number
        self.lines: list[Line] = []
        self.pages: list[Page] = []
        self.waited_for_page: list[float] = []  # when
        self.exited_at = math.inf
        self.was_looked_at = False  # for stall_exit
        self.next_at = job.clock.now
        self.notes = TrainingNotes()
        self.group = Group(number, job.size, 0)
        self.exchange: Any = SimpleNamespace(
            rank=number,
            size=job.size,
            members=[None] * job.size,
            is_joined=False,
            is_whole=False,
            is_closed=False,
            any_died=False,
            any_failed=False,
            trouble="",
            over="",
            ended={},
            start=lambda: None,
        )
        rounds: Any = SimpleNamespace(latest=Latest(), over="", issued=0)
        rounds.exchange = self.exchange
        rounds.has_come = lambda: rounds.latest.number >= rounds.issued
        late = "not every rank's length came within {waited:.2f} s"
        self.sync = WatchedRounds("Encoder", "key", self.group, rounds, late)
        self.waits_until = math.inf  # in a round
        self.monitor = StallMonitor(
            self.group, self.exchange, self.notes, LateModules()
        )
        # At its exit this process would end as it says.
        stall_monitor._monitors.discard(self.monitor)
        self.monitor._waker = cast(Any, SimpleNamespace(wake=self.wake))
        seen = self.monitor.progress
        seen._count = self.begun  # type: ignore[method-assign]
        seen.training_thread = cast(Any, self)
        self._begun = self._calls = 0
        self.do(doing)

    # What the watch sees of its training thread.

    def look(self, *_: Any) -> None: ...

    def known(self) -> NumberedThread:
        return NumberedThread(1, 1)

    works = property(lambda self: self.doing.works)
    has_run = property(lambda self: self.doing.works or self.doing.polls)
    busy_processes = frozenset[int]()

    def begun(self, *, is_wanted: bool = False) -> int:
        return self._begun + self._steps()

    def _steps(self) -> int:
        if not self.doing.every_s:
            return int(bool(self.doing.collective))
        return 1 + int((self.job.clock.now - self._since) / self.doing.every_s)

    def do(self, doing: Doing) -> None:
        now = self.job.clock.now
        if hasattr(self, "doing"):
            self._begun += self._steps()
            self._calls += self._steps() * self.doing.encodes
        self.doing, self._since = doing, now
        self.notes.encoder_flag = doing.flag
        self.exchange.trouble = doing.trouble
        if doing.comes:
            self._calls += 1
            self.sync.rounds.issued += 1
            call, rounds = self._calls, self.sync.rounds.issued
            issued = Round(rounds, call, True, 100, self.sync.in_time_at, now)
            self.sync.latest_call = call, (call - 1, 0)
            self.sync.was_issued(issued)
            self.notes.note(self.sync)
            self._call(now, call)
            self.sync.in_call = True
            self.waits_until = now + doing.comes

    def _call(self, now: float, call: int) -> None:
        clock = call - 1, 0
        self.notes.last = LastCall(self.sync, call, clock, call, now, 1, 1)

    def _wait(self, now: float) -> None:
        """In the round: until it comes, or not for longer."""
        if not self.sync.in_call:
            return
        sync = self.sync
        assert sync.round is not None
        has_come = sync.has_come(sync.round)
        until = sync.rounds.latest.came_at if has_come else now
        if until >= self.waits_until:
            sync.round.gave_up_at = self.waits_until
            sync.timed_out = sync.round
            sync.in_call = False
        elif has_come:
            sync.in_time_at = until
            sync.in_call = False
        elif sync.has_failed():
            sync.in_call = False

    def with_place(self, facts: RankFacts, is_away: bool) -> RankFacts:
        doing = self.doing
        seen = {
            "collective": facts.collective or doing.collective,
            "caller": doing.where if doing.collective else "",
            "activity": doing.activity,
        }
        if is_away:
            seen |= {
                "where": doing.where,
                "request": doing.request,
                "waits_for_child": doing.waits_for_child,
            }
        return replace(facts, **cast(Any, seen))

    # What its watch does.

    @property
    def is_heard(self) -> bool:
        return not self.doing.silent and math.isinf(self.exited_at)

    def wake(self) -> None:
        self.next_at = min(self.next_at, self.job.clock.now + _SOON_S)

    def tick(self, *, is_last: bool = False) -> None:
        """is_last: its process ends, as stall_monitor's `_at_exit` has it."""
        self.job.current = self
        now = self.job.clock.now
        self._wait(now)
        if self.doing.encodes:
            since = now - (now - self._since) % self.doing.every_s
            self._call(since, self._calls + self._steps())
        self.next_at = math.inf
        leaves = self.monitor.exits.leaves
        try:
            self.monitor._tick(is_last)
            if is_last and leaves:
                self.monitor.exits.leave()
        except Exited:
            self.exited_at = self.job.now
            self.job.has_ended(self, Silence(ENDED))
        self.next_at = min(self.next_at, self.job.clock.now + self.monitor._pause_s())
        stall = self.monitor.stall.stall
        self.was_looked_at |= stall is not None and stall.look_at > 0


@dataclass
class Question:
    number: int
    ends_at: float
    waits_for: set[int]
    answers: Answers = field(default_factory=Answers)


class Network:
    """These ranks ask each other, one question at a time. A rank that is silent is waited for, as
    the real one is.
    """

    def __init__(self, job: Job, ranks: Sequence[Rank]) -> None:
        self.job, self.ranks = job, ranks
        self.question: Question | None = None
        self.is_wanted = False
        self._number = 0
        for rank in ranks:
            rank.exchange.ask = self.ask

    @property
    def next_at(self) -> float:
        return self.question.ends_at if self.question is not None else math.inf

    def ask(self) -> None:
        if self.question is not None:
            self.is_wanted = True
            return
        self._number += 1
        # One that has ended refuses a connection.
        waits_for = {
            rank.number
            for rank in self.ranks
            if rank.is_heard or rank.doing.silent == NO_ANSWER
        }
        ends_at = self.job.clock.now + HERE_S
        self.question = Question(self._number, ends_at, waits_for)
        for rank in self.ranks:
            if rank.is_heard:
                self._put(rank, self.question)

    def _put(self, rank: Rank, question: Question) -> None:
        def reply(key: str, state: Any, still: float) -> None:
            question.answers.add(key, {rank.number}, state, still)
            waits = question.waits_for - question.answers.heard
            if question is self.question and not waits:
                question.ends_at = self.job.clock.now

        rank.exchange.watch.asked(str(question.number), reply)

    def tick(self) -> None:
        """All that answer have, or the time is over."""
        question, self.question = self.question, None
        assert question is not None
        answers = question.answers
        for rank in self.ranks:
            answers.add_silent([rank.number], Silence(rank.doing.silent or ENDED))
        answers.add_silent(range(self.job.size), Silence(NOT_HEARD))
        heard = [rank for rank in self.ranks if rank.number in answers.heard]
        judge = next((rank for rank in heard if rank.is_heard), None)
        if judge is not None:
            judge.exchange.watch.judge(
                answers.to_json(), lambda verdict: self._tell(question, verdict)
            )
        if self.is_wanted:
            self.is_wanted = False
            self.ask()

    def _tell(self, question: Question, verdict: Any) -> None:
        for rank in self.ranks:
            if rank.is_heard:
                told = json.loads(json.dumps(verdict))
                rank.exchange.watch.told(str(question.number), told)


class Job:
    """rows: the table. is_cut: no rank can ask another. lag_s: until the result of a round is there."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        is_cut: bool = False,
        lag_s: float = 0.0,
        ranks_of_a_host: int = 1,
    ) -> None:
        self.clock = Clock()
        self.lag_s = lag_s
        self._arriving: list[tuple[float, int]] = []
        self.ranks_of_a_host = ranks_of_a_host
        self.rows = list(rows)
        self.size = len(rows[0][1])
        self.is_cut = is_cut
        self.current: Rank
        self.ranks: list[Rank] = []

    @property
    def now(self) -> float:
        """Seconds since its begin."""
        return self.clock.now - _START

    def has_ended(self, rank: Rank, how: Silence) -> None:
        for one in self.ranks:
            one.exchange.ended[rank.number] = how
            one.exchange.any_died |= how.how == ENDED
            one.exchange.over = f"rank {rank.number} has ended"
            one.wake()

    def run(self, until: float, **settings: Any) -> Job:
        """until: seconds from its begin."""
        with self._in_place(settings):
            self.ranks = [Rank(self, *one) for one in enumerate(self.rows[0][1])]
            together = [[rank] for rank in self.ranks] if self.is_cut else [self.ranks]
            networks = [Network(self, ranks) for ranks in together]
            self._meet()
            rows = self.rows[1:]
            while True:
                row_at = rows[0][0] + _START if rows else math.inf
                looks_at = [rank.next_at for rank in self.ranks if rank.is_heard]
                arrives_at = [at for at, _ in self._arriving[:1]]
                told_at = [network.next_at for network in networks]
                at = min([row_at, *told_at, *arrives_at, *looks_at])
                if at > until + _START:
                    return self
                self.clock.now = max(at, self.clock.now)
                if row_at <= self.clock.now:
                    self._begin(rows.pop(0)[1])
                self._arrive()
                for network in networks:
                    if network.next_at <= self.clock.now:
                        network.tick()
                for rank in self.ranks:
                    if rank.is_heard and rank.next_at <= self.clock.now:
                        rank.tick()

    def _begin(self, row: Sequence[Doing]) -> None:
        for rank, doing in zip(self.ranks, row, strict=True):
            if doing is not rank.doing:
                rank.do(doing)
                if doing.silent == LEFT:
                    rank.tick(is_last=True)
                if doing.silent in (ENDED, LEFT) and doing.is_known:
                    self.has_ended(rank, Silence(doing.silent))
        self._meet()
        came = min(rank.sync.rounds.issued for rank in self.ranks)
        self._arriving.append((self.clock.now + self.lag_s, came))

    def _arrive(self) -> None:
        """The results of rounds."""
        while self._arriving and self._arriving[0][0] <= self.clock.now:
            _, number = self._arriving.pop(0)
            for rank in self.ranks:
                if number > rank.sync.rounds.latest.number:
                    rank.sync.rounds.latest = Latest(number, 0, self.clock.now)

    def _meet(self) -> None:
        """Once all have come, each knows all."""
        if any(rank.doing.silent in NEVER_HEARD for rank in self.ranks):
            return
        ranks = range(self.size)
        members = [Member(self.host(rank), "", 1, 100 + rank) for rank in ranks]
        for rank in self.ranks:
            rank.exchange.is_joined = rank.exchange.is_whole = True
            rank.exchange.members = members

    def host(self, rank: int) -> str:
        return f"node{rank // self.ranks_of_a_host}"

    @contextlib.contextmanager
    def _in_place(self, settings: dict[str, Any]) -> Iterator[None]:
        """Of the machine."""
        logger = logging.getLogger("nemo_patches")
        handler = logging.Handler()
        handler.emit = self._say  # type: ignore[method-assign]
        before = length_sync.process._settings
        with pytest.MonkeyPatch.context() as patch:
            for name, module in list(sys.modules.items()):
                if name.startswith(_WATCH) and getattr(module, "time", None) is time:
                    patch.setattr(module, "time", self.clock)
            begin = looks.Look
            patch.setattr(looks, "Look", lambda ends_at: begin(ends_at, self.clock.now))
            patch.setattr(own_facts, "host_name", self._own_host)
            patch.setattr(own_facts, "os", SimpleNamespace(getpid=self._own_pid))
            patch.setattr(log_line, "Daemon", NoThread)
            patch.setattr(exits, "Daemon", NoThread)
            patch.setattr(exits, "os", SimpleNamespace(_exit=self._exit))
            patch.setattr(Exits, "_end_what_it_has_started", lambda _: None)
            patch.setattr(at_work, "AtWork", lambda *_: self.current)
            patch.setattr(place, "with_place", self._with_place)
            patch.setattr(on_stall, "start", self._page)
            patch.setattr(report_file.ReportFile, "write", lambda *_: None)
            logger.addHandler(handler)
            length_sync.use(Settings.resolve(settings))
            try:
                yield
            finally:
                logger.removeHandler(handler)
                length_sync.process._settings = before

    def _say(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        line = Line(self.now, record.levelname, str(record.args[1]))
        self.current.lines.append(line)

    def _own_host(self) -> str:
        return self.host(self.current.number)

    def _own_pid(self) -> int:
        return 100 + self.current.number

    def _exit(self, code: int) -> NoReturn:
        assert code == exits.EXIT_CODE
        raise Exited

    def _with_place(self, facts: RankFacts, *_: Any, is_away: bool) -> RankFacts:
        return self.current.with_place(facts, is_away)

    def _page(self, command: str, text: str) -> Any:
        self.current.pages.append(Page(self.now, command, json.loads(text)))
        rank = self.current
        return SimpleNamespace(join=lambda _: rank.waited_for_page.append(self.now))
