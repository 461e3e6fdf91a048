"""What a function comes to: its collectives, and the branches, loops, exits and handlers around."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import TypeVar

from nemo_patches.tools.doctor.interpreter.members import Column
from nemo_patches.tools.doctor.interpreter.values import IN_A_GROUP, Abstract

# Kinds of collectives that pair by something else than their names.
BACKWARD = "backward"
ENCODER = "encoder"
FORWARD = "forward"
GENERATE = "generate"
LOG = "log"
NORM = "batch norm"
UNUSED = "forward, and no backward"
RECEIVED = ("broadcast", "scatter")  # what one rank sends
WITHOUT_AGREEMENT = (ENCODER, BACKWARD, FORWARD, LOG, UNUSED)


class BlockEnd(Enum):
    """How a block ends that does not go on."""

    RETURN = "return"
    BREAK = "break"
    CONTINUE = "continue"
    RAISE = "raise"


@dataclass(frozen=True)
class Collective:
    """A call that every rank must make. pairs_with: its kind; why: what makes it one; guess: what
    must hold for that. of: the name that is used in it. on_step: of a log, whether it is reduced at
    once, where it says so. grouped: whether only the ranks of a group make it. modules: of a
    backward pass, those it is known to reduce. place: its own line and name, also where a helper
    makes it.
    """

    name: str
    pairs_with: str
    line: int
    why: str = ""
    guess: str = ""
    of: str = ""
    on_step: object = None
    grouped: bool = False
    modules: frozenset[str] = frozenset()
    place: tuple[int, str] | None = None

    @property
    def of_some(self) -> bool:
        """Whether only some ranks make it, which a group or a wrapped module has."""
        known = [each.endswith(IN_A_GROUP) for each in self.modules]
        return self.grouped or (bool(known) and all(known))


@dataclass(frozen=True)
class Decision:
    """What decides a branch or how often a loop goes round.

    text: as it is written; key: what it asks, the same wherever that is asked. kind: if, while,
    except, name, for, or filter, that of a comprehension.
    """

    text: str
    key: str
    value: Abstract
    kind: str
    line: int
    end: int

    @property
    def asked(self) -> tuple[str, int]:
        """By what it is known again: a helper's name may be that of something else."""
        return self.key, self.value.level

    def around(self, line: int) -> bool:
        return self.line <= line <= self.end


@dataclass(frozen=True)
class Choice:
    """One function or another, by a condition."""

    condition: Decision
    yes: object
    no: object


@dataclass(frozen=True, eq=False)
class Branch:
    condition: Decision
    yes: Items
    no: Items


@dataclass(frozen=True, eq=False)
class Loop:
    condition: Decision
    body: Items
    orelse: Items
    endless: bool = False


@dataclass(frozen=True)
class Exit:
    """text: as it is written, where that is no statement of its own."""

    end: BlockEnd
    line: int
    text: str = ""


@dataclass(frozen=True)
class Assigned:
    """A name of a training_step that is set, perhaps to nothing that backward could begin at."""

    name: str
    line: int
    text: str
    nothing: bool


@dataclass(frozen=True, eq=False)
class Tried:
    """first: the line of the first call, behind which an error may have come. harmless: whether
    only what all ranks fail in alike is tried.
    """

    body: Items
    handlers: list[tuple[Decision, Items]]
    orelse: Items
    final: Items
    first: int
    harmless: bool


@dataclass(frozen=True, eq=False)
class Inlined:
    """A helper of the same file, by its name as it is called. manages: whether it is a context
    manager, with its block in it.
    """

    name: str
    line: int
    body: Items
    guess: str = ""
    manages: bool = False


@dataclass(frozen=True, eq=False)
class Managed:
    """The block of a with statement, in its context manager; empty at a generator's yield."""

    body: Items


@dataclass(frozen=True)
class Unseen:
    """A method of another file that may make collectives, by its name."""

    name: str


class MessageKind(Enum):
    SEND = "send"
    RECEIVE = "recv"
    OTHER = "other"  # of a group, or of several at once: its other end is not known


@dataclass(frozen=True)
class PeerMessage:
    """From one rank to another. waits: whether the call returns only when it has been received; at:
    the rank at the other end, on each member; loop: that over these ranks; wraps: whether it is
    counted round, so that each rank has one; own_line: also where a helper makes it.
    """

    name: str
    line: int
    kind: MessageKind
    waits: bool
    at: Column | None
    loop: str
    wraps: bool
    own_line: int


Item = (
    Collective
    | Branch
    | Loop
    | Exit
    | Assigned
    | Tried
    | Inlined
    | Managed
    | PeerMessage
    | Unseen
)
Items = list[Item]
_Item = TypeVar("_Item")


def inner_blocks(item: Item) -> list[Items]:
    if isinstance(item, Branch):
        return [item.yes, item.no]
    if isinstance(item, Tried):
        handlers = [body for _, body in item.handlers]
        return [item.body, *handlers, item.orelse, item.final]
    if isinstance(item, Loop):
        return [item.body, item.orelse]
    return [item.body] if isinstance(item, (Inlined, Managed)) else []


def inside(items: Iterable[Item], *, helpers: bool = True) -> Iterator[Item]:
    """All of them, with those in others. helpers: also what helpers make."""
    for each in items:
        yield each
        if helpers or not isinstance(each, Inlined) or each.manages:
            for block in inner_blocks(each):
                yield from inside(block, helpers=helpers)


def of_kind(
    items: Iterable[Item], kind: type[_Item], *, helpers: bool = True
) -> Iterator[_Item]:
    return (each for each in inside(items, helpers=helpers) if isinstance(each, kind))


def conditions_in(items: Iterable[Item]) -> Iterator[Decision]:
    around = (each for each in inside(items) if isinstance(each, (Branch, Loop)))
    return (each.condition for each in around)


def around_yields(items: Items) -> tuple[Items, Items]:
    """What a generator makes before its first yield, and what only if it is asked for more."""
    for number, each in enumerate(items):
        before, behind = items[:number], items[number + 1 :]
        if _yields(each):
            if isinstance(each, Tried):  # its finally is run in any case
                first, last = around_yields(each.body)
                return [*before, *first], [*last, *behind]
            return before, [each, *behind]
    return items, []


def _yields(item: Item) -> bool:
    return any(not each.body for each in of_kind([item], Managed))


def leaving(items: Items, by: Decision | None = None) -> Iterator[Decision]:
    """What decides whether a loop goes on behind these."""
    for each in items:
        if isinstance(each, Branch):
            yield from leaving([*each.yes, *each.no], each.condition)
        elif isinstance(each, (Managed, Tried)):
            for block in inner_blocks(each):
                yield from leaving(block, by)
        elif isinstance(each, Exit) and each.end in (BlockEnd.BREAK, BlockEnd.RETURN):
            yield from [by] if by else []


def served_in(items: Iterable[Item]) -> Iterator[str]:
    """What is made in an endless loop that begins with what another rank sends."""
    for each in of_kind(items, Loop):
        kinds = [made.pairs_with for made in of_kind(each.body, Collective)]
        waits = each.body and isinstance(each.body[0], (Collective, Inlined))
        if each.endless and waits and kinds and kinds[0].startswith(RECEIVED):
            yield from kinds


def as_called(made: Collective, call: Inlined) -> Collective:
    """A collective of a helper, where the helper is called."""
    return replace(
        made,
        name=call.name,
        line=call.line,
        why=made.why or f"which makes {made.name}",
        guess=made.guess or call.guess,
    )


def own_collectives(items: Iterable[Item]) -> Iterator[Collective]:
    """With a helper's first one in place of all of the helper's, where it is called."""
    for each in inside(items, helpers=False):
        if isinstance(each, Collective):
            yield each
        elif isinstance(each, Inlined) and not each.manages:
            for made in islice(of_kind(each.body, Collective), 1):
                yield as_called(made, each)
