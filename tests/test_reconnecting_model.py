"""What two ends of a lost connection say again: in any order of events every round comes, with its value, in order.

The real arithmetic of the side channel, over queues in place of sockets: messages are delivered, connections lost with
what is under way, either end learns of that first, and the child comes back, in many random orders.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest

from nemo_patches.channel.process import Process
from nemo_patches.channel.side_channel import Rounds, SideChannel

pytestmark = pytest.mark.one_nemo

PARENTS = (-1, 0, 0, 1, 1)
NAMES = ("a", "b")  # every rank issues a's round before b's
ROUNDS = 8


class End:
    """One end of a connection, as the side channel sees it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank  # at the other end
        self.process: Process | None = None
        self.is_cut = self.is_lost = self.waits = False
        self.socket = Mock()
        self.sent = deque[tuple[bytes, int, int]]()  # to the other end

    def send(self, key: bytes, number: int, value: int) -> None:
        if not self.is_lost:
            self.sent.append((key, number, value))


@dataclass
class Link:
    parents: End
    childs: End
    unseen: set[int] = field(default_factory=set)  # the ranks that do not know yet that it is lost

    def lose(self) -> None:
        if not self.parents.is_lost:
            self.parents.is_lost = self.childs.is_lost = True
            self.unseen = {self.parents.rank, self.childs.rank}


class Job:
    def __init__(self) -> None:
        self.channels = [SideChannel(Mock(server=None), rank, len(PARENTS), print) for rank in range(len(PARENTS))]
        self.rounds: list[list[Rounds]] = []
        self.links: dict[int, Link] = {}  # by the child
        self.came = [list[tuple[str, int]]() for _ in PARENTS]
        for rank, channel in enumerate(self.channels):
            channel._thread = Mock(ident=None)  # it needs none
            channel.selector = Mock()
            channel.say = Mock()  # type: ignore[method-assign]
            place: Any = channel.links.place
            place.parent, place.is_known = PARENTS[rank], True
            place.children = frozenset(child for child, parent in enumerate(PARENTS) if parent == rank)
            place.neighbours = place.children | ({place.parent} - {-1})
            self.rounds.append([channel.rounds(name) for name in NAMES])
        for child in range(1, len(PARENTS)):
            self.knock(child)

    def knock(self, child: int) -> None:
        """A child that has no connection comes (back)."""
        channel, parent = self.channels[child], self.channels[PARENTS[child]]
        if channel.links.parent is not None:
            return
        link = self.links[child] = Link(End(child), End(parent.rank))
        link.parents.process = Process(1, b"12345678")
        channel.links.parent = link.childs  # type: ignore[assignment]
        parent.links._let_in(link.parents)  # type: ignore[arg-type]
        self.look()

    def learn(self, child: int, parent_first: bool) -> None:
        """One end sees that the connection is lost, after it has read what had come before."""
        link = self.links[child]
        order = (PARENTS[child], child) if parent_first else (child, PARENTS[child])
        for rank in order:
            own, other = (link.childs, link.parents) if rank == child else (link.parents, link.childs)
            if own.rank in link.unseen:
                link.unseen.discard(own.rank)
                while other.sent:
                    self.channels[rank]._hear(self.channels[rank].links, own, *other.sent.popleft())  # type: ignore[arg-type]
                channel = self.channels[rank]
                if own in (*channel.links.connections.values(), channel.links.parent):  # else replaced already
                    channel.links.drop(own)  # type: ignore[arg-type]
                self.look()
                return

    def deliver(self, child: int, up: bool) -> bool:
        link = self.links[child]
        end, other, rank = (link.childs, link.parents, PARENTS[child]) if up else (link.parents, link.childs, child)
        channel = self.channels[rank]
        if not end.sent or other not in (*channel.links.connections.values(), channel.links.parent):
            return False
        channel._hear(channel.links, other, *end.sent.popleft())  # type: ignore[arg-type]
        self.look()
        return True

    def lose(self, child: int, keeps: int) -> None:
        """keeps: so many messages in each direction have come, and can still be read."""
        link = self.links[child]
        link.lose()
        for end in (link.parents, link.childs):
            while len(end.sent) > keeps:
                end.sent.pop()

    def issue(self, rank: int) -> None:
        """The rank's next round: of a, then of b, each once its last one has come."""
        first, second = self.rounds[rank]
        one = first if first.issued == second.issued else second
        if one.has_come() and one.issued < ROUNDS:
            one.issue(value_of(rank, one.issued + 1))
            self.look()

    def look(self) -> None:
        for rank, both in enumerate(self.rounds):
            for name, one in sorted(zip(NAMES, both, strict=True), key=lambda pair: pair[1].came_at):
                seen = [number for other, number in self.came[rank] if other == name]
                if one.done > len(seen):
                    assert one.done == len(seen) + 1
                    assert one.result == max(value_of(other, one.done) for other in range(len(PARENTS)))
                    self.came[rank].append((name, one.done))

    def finish(self) -> None:
        for _ in range(1000):
            for child in range(1, len(PARENTS)):
                self.learn(child, parent_first=True)
                self.learn(child, parent_first=True)
                self.knock(child)
                while self.deliver(child, up=True) or self.deliver(child, up=False):
                    pass
            for rank in range(len(PARENTS)):
                self.issue(rank)
            if all(one.done == ROUNDS for both in self.rounds for one in both):
                return
        raise AssertionError(self.came)


def value_of(rank: int, number: int) -> int:
    return 100 * number + (rank * 7 + number * 3) % 11


SCHEDULES, EVENTS = 1000, 150


def event(job: Job, chance: random.Random) -> None:
    child = chance.randrange(1, len(PARENTS))
    kind = chance.random()
    if kind < 0.3:
        job.issue(chance.randrange(len(PARENTS)))
    elif kind < 0.8:
        job.deliver(child, chance.random() < 0.5)
    elif kind < 0.85:
        job.lose(child, chance.randrange(3))
    elif kind < 0.92:
        job.learn(child, chance.random() < 0.5)
    else:
        job.knock(child)


def test_every_round_comes_once_with_its_value_and_in_order() -> None:
    for seed in range(SCHEDULES):
        job, chance = Job(), random.Random(seed)
        for _ in range(EVENTS):
            event(job, chance)
        job.finish()
        for came in job.came:
            assert came == [(name, number) for number in range(1, ROUNDS + 1) for name in NAMES], seed
