"""Messages from one rank to another: those without their other end, and rings that wait first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nemo_patches.tools.doctor.interpreter import knowledge
from nemo_patches.tools.doctor.interpreter.calls import Call
from nemo_patches.tools.doctor.interpreter.members import Column, Members
from nemo_patches.tools.doctor.interpreter.skeleton import (
    Decision,
    Items,
    MessageKind,
    PeerMessage,
    conditions_in,
)
from nemo_patches.tools.doctor.interpreter.values import VARIES
from nemo_patches.tools.doctor.interpreter.way import Guards, Way, either
from nemo_patches.tools.doctor.syntax import last_part

# By the name of a loop's variable: the loop, and what it goes over on each member.
Ranges = Mapping[str, tuple[str, Column]]
# A rank from here on may not exist, where a test on the rank says no more than "the others".
_PERHAPS = 2


_RINGS = {
    MessageKind.RECEIVE: "each rank waits in it for one that waits in it, too, before it sends",
    MessageKind.SEND: "each rank waits in it for one to receive that waits in it, too, unless the"
    " backend keeps what is sent: it does so up to some size",
}


@dataclass(frozen=True)
class Posted:
    """What one rank does. peers: who may be at the other end; None: anybody. certain: whether it
    comes to it; loops: those around it.
    """

    message: PeerMessage
    peers: frozenset[int] | None
    certain: bool
    loops: Guards

    def may_be(self, kind: MessageKind, peer: int) -> bool:
        named = self.peers is None or peer in self.peers
        return self.message.kind is kind and named


@dataclass(frozen=True)
class Unpaired:
    message: PeerMessage
    text: str


def message_of(call: Call, ranges: Ranges) -> PeerMessage | None:
    """What a call sends to another rank, or receives of it."""
    last = last_part(call.origin)
    kind = knowledge.MESSAGES.get(last)
    if kind is None or not call.origin.startswith(knowledge.MESSAGE_OWNERS):
        return None
    end = "dst" if kind == "send" else "src"
    nodes = {each.arg: each.value for each in call.node.keywords}
    nodes |= dict(zip(("tensor", end, "group"), call.node.args, strict=False))
    values = {
        **call.given,
        **dict(zip(("tensor", end, "group"), call.args, strict=False)),
    }
    others = [each for each in values if "group" in str(each)]
    if any(not values[each].has("nothing") for each in others):
        kind = "other"
    loop, at = ranges.get(getattr(nodes.get(end), "id", ""), ("", None))
    return PeerMessage(
        name=call.name,
        line=call.node.lineno,
        kind=MessageKind(kind),
        waits=not last.startswith("i"),
        at=at or (values[end].at if end in values else None),
        loop=loop,
        wraps=end in values and values[end].has("wraps"),
        own_line=call.node.lineno,
    )


class Correspondence:
    """The messages of all ranks in one function."""

    def __init__(self, ways: Sequence[Way], members: Members) -> None:
        self.posted = {
            members.every[number].rank: [
                Posted(message, _peers(message, number), certain, loops)
                for message, certain, loops in way.messages
            ]
            for number, way in enumerate(ways)
        }
        every = [each for own in self.posted.values() for each in own]
        self.kinds = {each.message.kind for each in every}
        self.wrong = [] if MessageKind.OTHER in self.kinds else list(self._wrong())
        # Those that may be another function's other ends.
        wrong = {each.message for each in self.wrong}
        self.loose = {
            each.message
            for each in every
            if not each.certain or each.peers is None or each.message in wrong
        }
        self.lines = {each.message.own_line for each in every}

    def _wrong(self) -> Iterator[Unpaired]:
        for kind, text in _RINGS.items():
            if all(self._waits_first(own, kind) for own in self.posted.values()):
                yield Unpaired(next(iter(self.posted.values()))[0].message, text)
                return
        said = set[PeerMessage]()
        for rank, own in self.posted.items():
            for each in own:
                message = each.message
                if message in said or not each.certain or not self._told(message):
                    continue
                if message.kind is MessageKind.RECEIVE and rank >= _PERHAPS:
                    continue
                text, alike = self._without_end(rank, each)
                if text:
                    said |= alike
                    yield Unpaired(message, text)

    def _waits_first(self, own: Sequence[Posted], kind: MessageKind) -> bool:
        """Whether a rank waits in a message of a kind, for a rank that it may have at the end of
        another one behind it.
        """
        if not own or not own[0].certain or not (own[0].peers or own[0].message.wraps):
            return False
        first = own[0].message
        both = any(each.message.kind is not kind for each in own)
        return both and first.kind is kind and first.waits

    def _told(self, message: PeerMessage) -> bool:
        """Whether the ranks are told apart in it: one does not make it, or it has both ends."""
        making = [
            any(each.message == message for each in own) for own in self.posted.values()
        ]
        return not all(making) or len(self.kinds) > 1

    def _without_end(self, rank: int, posted: Posted) -> tuple[str, set[PeerMessage]]:
        """What is said of a message whose other end is made less often, and of which ones; empty
        if none is.
        """
        sends = posted.message.kind is MessageKind.SEND
        opposite = MessageKind.RECEIVE if sends else MessageKind.SEND
        verbs = ("sends to", "receives") if sends else ("waits for", "sends")
        for peer in sorted(posted.peers or ()):
            if peer == rank or peer not in self.posted:
                continue
            kind = posted.message.kind
            here = [each for each in self.posted[rank] if each.may_be(kind, peer)]
            there = [each for each in self.posted[peer] if each.may_be(opposite, rank)]
            counted = all(each.certain and not each.loops for each in (*here, *there))
            said = f"{self._named(rank)} {verbs[0]} {self._named(peer)}"
            alike = {each.message for each in here}
            if not there:
                return f"{said}, which {verbs[1]} nothing here", alike
            if counted and len(there) < len(here):
                times = f"{len(here)} times, which {verbs[1]} {len(there)}"
                return f"{said} {times} here", alike
        return "", set()

    def _named(self, rank: int) -> str:
        return "the last rank" if rank == max(self.posted) else f"rank {rank}"


def one_sided(items: Items, every: Sequence[Posted]) -> Iterator[Unpaired]:
    """Of one function, what this rank's data decide, and whose other end asks for nothing: it is
    in the same loops, and nothing else is sent that way. every: those of the file.
    """
    for each in conditions_in(items):
        value = each.value
        if each.kind != "if" or value.level != VARIES or value.has("file", "rank"):
            continue
        for message, loops in _decided(items, each):
            same = [one for one in every if one.message.kind is message.kind]
            others = [one for one in every if one not in same]
            alone = len({one.message.own_line for one in same}) == 1
            whiles = any(one.startswith("while ") for one in loops)
            alike = [one for one in others if one.loops == loops]
            certain = all(one.certain for one in others)
            if alone and certain and alike and not whiles:
                other_end = f"its other end in line {alike[0].message.own_line}"
                text = f"`{each.text}` decides on it, and {other_end} waits in any case"
                yield Unpaired(message, text)


def _decided(items: Items, condition: Decision) -> Iterator[tuple[PeerMessage, Guards]]:
    """The messages that it decides on, with the loops around them, if no other is made instead."""
    ways = [Way(either(condition, holds)) for holds in (True, False)]
    for way in ways:
        way.follow(items)
    for way, other in (ways, ways[::-1]):
        theirs = [message for message, _, _ in other.messages]
        kinds = [each.kind for each in theirs]
        for message, _, loops in way.messages:
            own = [each.kind for each, _, _ in way.messages]
            fewer = kinds.count(message.kind) < own.count(message.kind)
            if fewer and message not in theirs:
                yield message, loops


def _peers(message: PeerMessage, number: int) -> frozenset[int] | None:
    known = message.at[number] if message.at else None
    if isinstance(known, int):
        return frozenset({int(known)})
    if isinstance(known, (range, list, tuple)):
        return frozenset(each for each in known if isinstance(each, int))
    return None
