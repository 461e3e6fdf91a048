"""A job in simulated time: ranks that run schedules of calls, collectives and faults, each by the
real protocol.

Rounds and collectives pair by order, as Gloo's do. A schedule is what one rank does; a rank that
reaches the end of it without `Exit` waits there for ever, as in a collective that nobody else comes
to. Who wants to know more than what `Rank` has afterwards, gives it a `Listener`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from nemo_patches.sync.protocol import (
    CAME,
    ENDED,
    LOCAL,
    SERVED,
    UNWAITED,
    LengthProtocol,
)
from nemo_patches.sync.protocol import TIMEOUT as TIMED_OUT

TIMEOUT = timedelta(seconds=10)
LATENCY_S = 0.0005
STALL_S = 60.0
LAYERS_S = 0.016  # of an encoder call, after its length sync


class Call(NamedTuple):
    """One encoder call, `pause` seconds after what was before. stuck: the phase that it never
    leaves.

    raises: the exception's type.
    """

    length: int = 1000
    training: bool = True
    pause: float = 0.1
    stuck: str = ""
    dies: bool = False  # there, by SIGKILL
    raises: str = ""
    encoder: int = 0


@dataclass(frozen=True)
class Collective:
    """The next one of its group, where a rank waits for all others of it. lost: it never ends."""

    group: str = "0"
    kind: str = "all_reduce"
    lost: bool = False


_GRADIENTS = Collective("gradients")


@dataclass(frozen=True)
class Gradients:
    """The backward of the calls before, and in it the gradients' reduce, as under DDP."""


@dataclass(frozen=True)
class DdpForward(Gradients):
    """Where all wait for each other, as in DDP's broadcast of buffers; a call follows."""

    pause: float = 0.1


@dataclass(frozen=True)
class Away:
    """No encoder call for so many seconds, as in a checkpoint, a decode or the writing of a .nemo."""

    seconds: float


@dataclass(frozen=True)
class Killed:
    """SIGKILL. gone: the others' length sync ends at once; else it is only silent, as a stopped
    process is.
    """

    gone: bool = True


@dataclass(frozen=True)
class Exit:
    """The interpreter ends. error: the exception that ended it."""

    error: str = ""


Event = Call | Collective | Gradients | Away | Killed | Exit
STEP: tuple[Event, ...] = (Call(), Gradients())


def steps(count: int, pause: float = 0.1, length: int = 1000) -> list[Event]:
    """Training steps."""
    return [
        event
        for _ in range(count)
        for event in (Call(length, pause=pause), Gradients())
    ]


def evaluation(count: int) -> list[Event]:
    """Evaluation calls, which no collective follows."""
    return [Call(training=False, pause=0.05)] * count


class Sync(NamedTuple):
    """What came of one call's length sync."""

    outcome: str
    length: int
    left_at: float
    waited_s: float = 0.0


class Round:
    """One of an encoder's length sync, or a collective. ends_at: when it comes, or a rank's death
    has ended it.
    """

    def __init__(self, size: int) -> None:
        self.size = size  # so many ranks make it
        self.values: dict[int, int] = {}  # by rank
        self.kinds: set[str] = set()
        self.came = self.lost = False
        self.ends_at = math.inf
        # Where ranks run ahead of their collectives:
        self.earlier: list[Round] = []
        self.later: list[Round] = []

    def settle(self, now: float) -> None:
        """It comes where all ranks are in it, in the same kind, and what these have to end before
        has come.
        """
        if (
            self.lost
            or len(self.values) < self.size
            or len(self.kinds) > 1
            or not all(one.came for one in self.earlier)
        ):
            return
        self.ends_at, self.came = now + LATENCY_S, True
        for one in self.later:
            one.settle(self.ends_at)


@dataclass
class Encoder:
    """One encoder on one rank: its calls, and the rounds that they have issued."""

    calls: int = 0
    issued: int = 0


@dataclass
class Rounds:
    """Of all encoders of one rank."""

    protocol: LengthProtocol = field(default_factory=LengthProtocol)
    latest: Round | None = None
    issued: int = 0
    issued_at: float = 0.0
    # The longest that the protocol has taken a healthy round for.
    healthy: timedelta = timedelta(0)

    def take(self, round_: Round) -> int:
        """The result of a round that has come, and what it took, as Sequence tells it."""
        took = timedelta(seconds=round_.ends_at - self.issued_at)
        if took <= TIMEOUT:
            self.protocol.took(took.total_seconds())
            self.healthy = max(self.healthy, self.protocol.healthy)
        return max(round_.values.values())


class Job:
    """What the ranks have in common. groups: the ranks of a collective's group, where these are not
    all.
    """

    def __init__(
        self, size: int, groups: Mapping[str, list[int]] | None = None
    ) -> None:
        self.size = size
        self._sizes = {group: len(ranks) for group, ranks in (groups or {}).items()}
        self.syncs: list[Round] = []
        self.collectives: defaultdict[str, list[Round]] = defaultdict(list)  # by group
        self.gone: set[int] = set()  # their connections are closed
        self.silent: set[int] = set()

    def sync(self, number: int) -> Round:
        if number == len(self.syncs):
            self.syncs.append(Round(self.size))
        return self.syncs[number]

    def collective(self, group: str, number: int) -> Round:
        rounds = self.collectives[group]
        if number == len(rounds):
            rounds.append(Round(self._sizes.get(group, self.size)))
        return rounds[number]

    def lose(self, rank: int, now: float) -> None:
        """All length syncs end with it."""
        self.gone.add(rank)
        for round_ in self.syncs:
            if not round_.came:
                round_.ends_at = min(round_.ends_at, now)

    def waiting(self, now: float) -> set[int]:
        """Who is in a collective."""
        last = [rounds[-1] for rounds in self.collectives.values()]
        return {
            rank for round_ in last if now < round_.ends_at for rank in round_.values
        }


class Listener:
    """What happens on one rank, as it happens. This one does not listen."""

    def entered(self, rank: Rank, now: float, call: Call) -> None: ...
    def synced(self, rank: Rank, now: float, call: Call, sync: Sync) -> None: ...
    def grown(self, rank: Rank, now: float, call: Call, length: int) -> None: ...
    def left(self, rank: Rank, now: float, call: Call, length: int) -> None: ...
    def raised(self, rank: Rank, now: float, call: Call) -> None: ...
    def stalled(self, rank: Rank, now: float) -> None: ...
    def ended(self, now: float, error: str) -> None: ...


Pause = tuple[float, Round | None]  # until when; or, earlier, until the round ends
Pauses = Generator[Pause, float, float]  # is sent the time after each, and returns it
_FOREVER: Pause = (math.inf, None)


@dataclass
class Rank:
    """One of the job's. sync and flag: as set. ahead: the first of so many collectives must end
    before it goes on.
    """

    number: int
    events: list[Event]
    job: Job
    listener: Listener
    layers_s: float = LAYERS_S
    sync: str = "bounded"
    flag: bool = True
    watched: bool = False
    ahead: int = 1
    rounds: Rounds = field(default_factory=Rounds)
    encoders: defaultdict[int, Encoder] = field(
        default_factory=lambda: defaultdict(Encoder)
    )
    # Each with its number in its group.
    joined: list[tuple[Collective, int, Round]] = field(default_factory=list)
    finished: bool = False  # with its events
    _made: Counter[str] = field(default_factory=Counter)  # collectives, by group

    def life(self) -> Pauses:
        now = yield 0.0, None
        called_at = 0.0
        for event in self.events:
            if isinstance(event, Call):
                now = called_at = yield now + event.pause, None
                now = yield from self._call(event, now)
            elif isinstance(event, Gradients):
                if isinstance(event, DdpForward):
                    now = yield now + event.pause, None
                now = yield from self._collective(_GRADIENTS, now)
            elif isinstance(event, Collective):
                now = yield from self._collective(event, now)
            elif isinstance(event, Away):
                until = now + event.seconds
                looks = (
                    called_at + STALL_S * 2**look for look in range(9) if self.watched
                )
                for due_at in looks:
                    if now < due_at < until:
                        now = yield due_at, None
                        self.listener.stalled(self, now)
                now = yield until, None
            elif isinstance(event, Killed):
                if event.gone:
                    self.job.lose(self.number, now)
                else:
                    self.job.silent.add(self.number)
                yield _FOREVER
            else:
                self.listener.ended(now, event.error)
                self.job.lose(self.number, now)
                break
        self.finished = True
        return now

    def _collective(self, event: Collective, now: float) -> Pauses:
        round_ = self.job.collective(event.group, self._made[event.group])
        self._made[event.group] += 1
        if self.joined and not (last := self.joined[-1][2]).came:
            last.later.append(round_)
            round_.earlier.append(last)
        self.joined.append((event, self._made[event.group], round_))
        round_.values[self.number] = 0
        round_.kinds.add(event.kind)
        round_.lost |= event.lost
        round_.settle(now)
        first = self.joined[-self.ahead][2] if len(self.joined) >= self.ahead else None
        if first is not None and now < first.ends_at:
            now = yield math.inf, first
        return now

    def _call(self, call: Call, now: float) -> Pauses:
        self.encoders[call.encoder].calls += 1
        self.listener.entered(self, now, call)
        if call.stuck == "length sync":
            yield _FOREVER
        sync = yield from self._length_sync(call, now)
        now = sync.left_at
        assert sync.length >= call.length, "a call got less than its own length"
        self.listener.synced(self, now, call, sync)
        self.listener.grown(self, now, call, sync.length)
        if call.stuck:
            if call.dies:
                self.job.lose(self.number, now)
            yield _FOREVER
        now = yield now + self.layers_s, None
        if call.raises:
            self.listener.raised(self, now, call)
            return now
        self.listener.left(self, now, call, sync.length)
        return now

    def _length_sync(self, call: Call, now: float) -> Generator[Pause, float, Sync]:
        """As EncoderSync.call does it."""
        rounds, protocol, completed = self.rounds, self.rounds.protocol, None
        if not self.flag or self.sync == "local":
            return Sync(LOCAL, call.length, now)
        if self.job.gone:
            return Sync(ENDED, call.length, now)
        if (
            protocol.outstanding
            and rounds.latest is not None
            and rounds.latest.ends_at <= now
        ):
            completed = rounds.take(rounds.latest)
        if protocol.begin(call.length, call.training, completed):
            assert not protocol.outstanding, (
                "a round was issued while one is outstanding"
            )
            rounds.latest = round_ = self.job.sync(rounds.issued)
            rounds.issued, rounds.issued_at = rounds.issued + 1, now
            self.encoders[call.encoder].issued += 1
            round_.values[self.number] = protocol.value()
            round_.settle(now)
            limit = protocol.wait_limit(TIMEOUT)
            if limit is not None:
                until = yield now + limit.total_seconds(), round_
                if round_.ends_at > until:
                    protocol.timed_out()
                    return Sync(TIMED_OUT, call.length, until, until - now)
                if not round_.came:
                    return Sync(ENDED, call.length, until, until - now)
                protocol.came_in_time(rounds.take(round_), call.training)
                return Sync(CAME, protocol.agreed(), until, until - now)
        if protocol.served:
            return Sync(SERVED, protocol.agreed(), now)
        return Sync(UNWAITED, call.length, now)


def run(ranks: Iterable[Rank]) -> float:
    """To where no rank can go on; when that is."""
    lives = {rank.number: rank.life() for rank in ranks}
    pauses = {number: next(life) for number, life in lives.items()}
    now = 0.0
    while True:
        number, end = -1, math.inf
        for one, (until, round_) in pauses.items():
            if round_ is not None and round_.ends_at < until:
                until = round_.ends_at
            if until < end:
                number, end = one, until
        if end == math.inf:
            return now
        now = end
        try:
            pauses[number] = lives[number].send(now)
        except StopIteration:
            del pauses[number]
