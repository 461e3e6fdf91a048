"""Ranks that run the real protocol against a fake transport, in simulated time: rounds pair by order, as Gloo's do."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from nemo_patches.sync.protocol import LengthProtocol

TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class Call:
    """One encoder call: `pause` seconds of other work before it. An evaluation call has training=False."""

    length: int
    training: bool = True
    pause: float = 0.0


@dataclass(frozen=True)
class Gradients:
    """Where a rank waits for all others, as in DDP's backward."""


Event = Call | Gradients


@dataclass
class Round:
    values: dict[int, int] = field(default_factory=dict)
    came_at: float = math.inf


@dataclass
class Rank:
    """What one simulated rank has done: the length that each call got, and its waits that ran out of time."""

    number: int
    events: list[Event]
    protocol: LengthProtocol = field(default_factory=LengthProtocol)
    used: list[int] = field(default_factory=list)
    vain: list[timedelta] = field(default_factory=list)
    issued: int = 0
    healthy: timedelta = timedelta(0)  # the longest that the protocol has taken a healthy round for


class Pause(NamedTuple):
    """Until when a rank does not run: a time, or earlier where the round that it waits for comes in."""

    until: float
    round: Round | None = None

    @property
    def end(self) -> float:
        return self.until if self.round is None else min(self.until, self.round.came_at)


def run(schedules: list[list[Event]], latency: float = 0.001) -> list[Rank]:
    """Run each rank's events to the end; AssertionError on a deadlock or a round issued while one is outstanding."""
    ranks = [Rank(number, events) for number, events in enumerate(schedules)]
    rounds: list[Round] = []
    runners = {rank.number: _run_rank(rank, rounds, len(ranks), latency) for rank in ranks}
    pauses = {number: next(runner) for number, runner in runners.items()}
    now = 0.0
    while pauses:
        ends = {number: pause.end for number, pause in pauses.items()}
        if min(ends.values()) == math.inf:  # everyone is at the gradients
            ends = dict.fromkeys(pauses, now + latency)
            pauses = {number: Pause(end) for number, end in ends.items()}
        number = min(ends, key=ends.__getitem__)
        now = ends[number]
        assert now < math.inf, "deadlock"
        try:
            pauses[number] = runners[number].send(now)
        except StopIteration:
            del pauses[number]
    return ranks


def _run_rank(rank: Rank, rounds: list[Round], size: int, latency: float) -> Generator[Pause, float, None]:
    """One rank's life: yields each pause, and is sent the time at its end."""
    protocol = rank.protocol
    current: Round | None = None
    issued_at = 0.0
    now = yield Pause(0.0)
    for event in rank.events:
        if isinstance(event, Gradients):
            now = yield Pause(math.inf)
            continue
        now = yield Pause(now + event.pause)
        completed = wait = None
        timed_out = False
        if current is not None and current.came_at <= now:
            completed = take(rank, current, issued_at)
            current = None
        if protocol.begin(event.length, event.training, completed):
            assert current is None, "a round was issued while one is outstanding"
            if rank.issued == len(rounds):
                rounds.append(Round())
            current, issued_at = rounds[rank.issued], now
            rank.issued += 1
            current.values[rank.number] = protocol.value()
            if len(current.values) == size:
                current.came_at = now + latency
            wait = protocol.wait_limit(TIMEOUT)
            if wait is not None:
                now = yield Pause(now + wait.total_seconds(), current)
                if current.came_at <= now:
                    protocol.came_in_time(take(rank, current, issued_at), event.training)
                    current = None
                else:
                    protocol.timed_out()
                    timed_out = True
                    rank.vain.append(wait)
        used = event.length if timed_out else protocol.agreed()
        assert used >= event.length, "a call got less than its own length"
        rank.used.append(used)


def take(rank: Rank, round_: Round, issued_at: float) -> int:
    """The result of a round that has come, and what it took, as EncoderSync tells it."""
    took = timedelta(seconds=round_.came_at - issued_at)
    if took <= TIMEOUT:
        rank.protocol.took(took.total_seconds())
        rank.healthy = max(rank.healthy, rank.protocol.healthy)
    return max(round_.values.values())
