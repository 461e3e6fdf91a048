"""One way through a skeleton: the collectives that a rank makes with some conditions decided."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from nemo_patches.tools.doctor.interpreter.members import Open, negated, truths
from nemo_patches.tools.doctor.interpreter.skeleton import (
    BACKWARD,
    ENCODER,
    Assigned,
    BlockEnd,
    Branch,
    Collective,
    Decision,
    Exit,
    Inlined,
    Item,
    Items,
    Loop,
    Managed,
    PeerMessage,
    Tried,
    Unseen,
    as_called,
    of_kind,
)

_LOOPS = ("for ", "while ")  # how their guards begin
Guards = tuple[str, ...]  # the texts of the open conditions around something
_ANY_ERROR = frozenset({"any", "Exception", "BaseException"})
_ONCE: Guards = ("once",)  # a loop that its first turn leaves
Decide = Callable[[Decision], Any]  # True, False, or an Open text
# Of an event: what it pairs with, its guards, and those under which it is not come to.
Key = tuple[str, Guards, frozenset[Guards]]


class Moment(Enum):
    """When an error comes: behind all of a block, behind its first call, or where it is raised."""

    LATE = 0
    EARLY = 1
    RAISED = 2


Caught = tuple[Tried, int, Moment]  # the block, which of its handlers, and when


@dataclass(frozen=True)
class Event:
    """A collective on a way. guards: the open conditions around it; after: those under which it is
    not come to.
    """

    made: Collective
    guards: Guards
    after: frozenset[Guards] = frozenset()

    @property
    def key(self) -> Key:
        return self.made.pairs_with, self.guards, self.after

    def behind(self, left: Iterable[Guards]) -> Event:
        """Behind these ways out, but those of a test that is decided the other way here."""
        opposite = set(map(negated, self.guards))
        others = (each for each in left if opposite.isdisjoint(each))
        return replace(self, after=self.after.union(others))


@dataclass(frozen=True)
class WayOut:
    """Of a function or a turn, or, of a training_step, a loss that is set to None: its text."""

    text: str
    line: int
    sets: bool
    guards: Guards


@dataclass
class Way:
    """decide: what each condition says on it. raised: whether it always ends in an error."""

    decide: Decide
    caught: Caught | None = None
    events: list[Event] = field(default_factory=list)
    exits: list[WayOut] = field(default_factory=list)
    unseen: set[str] = field(default_factory=set)
    # Whether it comes to each of them, and in which loops.
    messages: list[tuple[PeerMessage, bool, Guards]] = field(default_factory=list)
    endless: list[Decision] = field(default_factory=list)
    raised: bool = False
    thrown: tuple[Guards, ...] = ()  # the tests around the raises that a handler takes
    _guards: Guards = ()
    _left: Mapping[BlockEnd, tuple[Guards, ...]] = field(
        default_factory=lambda: {BlockEnd.RAISE: ()}
    )
    _call: Inlined | None = None
    _outside: list[Inlined | None] = field(
        default_factory=list
    )  # of the calls in each other
    _taken: Sequence[str] = ()  # the names of the errors that a handler takes
    _nothing: set[str] = field(default_factory=set)  # names without a gradient

    def follow(self, items: Items) -> BlockEnd | None:
        """Returns how they end; None where it goes on behind them."""
        for each in items:
            follow = getattr(self, f"_{type(each).__name__.lower()}")
            end: BlockEnd | None = follow(each)
            if end is not None:
                return end
        return None

    def _unseen(self, item: Unseen) -> None:
        self.unseen.add(item.name)

    def _collective(self, made: Collective) -> None:
        if made.of in self._nothing:
            return
        call = self._call
        if call and made.grouped:  # which group it is given is not told here
            return
        if call:
            made = as_called(made, call)
        left = (guards for each in self._left.values() for guards in each)
        self.events.append(Event(made, self._guards).behind(left))

    def _peermessage(self, item: PeerMessage) -> None:
        """The loop over the ranks that it goes to makes one for each."""
        guards = [each for each in self._guards if each != f"for {item.loop}"]
        loops = tuple(each for each in guards if each.startswith(_LOOPS))
        certain = len(loops) == len(guards) and not any(self._left.values())
        if self._call:
            item = replace(item, name=self._call.name, line=self._call.line)
        self.messages.append((item, certain, loops))

    def _exit(self, item: Exit) -> BlockEnd | None:
        if self._is_caught(item):
            self._leave(item.end)
        elif not self._call and item.end is not BlockEnd.RAISE:
            self._leave_by(item.text or item.end.value, item.line)
        return item.end

    def _is_caught(self, item: Item) -> bool:
        """Whether it raises what the handler takes that is asked about."""
        words = item.text.split() if isinstance(item, Exit) else []
        taken = _ANY_ERROR.union(words[1:])
        return words[:1] == ["raise"] and not taken.isdisjoint(self._taken)

    def _leave_by(self, text: str, line: int, sets: bool = False) -> None:
        self.exits.append(WayOut(text, line, sets, self._guards))

    def _assigned(self, item: Assigned) -> None:
        self._nothing.discard(item.name)
        if item.nothing and all(each.startswith(_LOOPS) for each in self._guards):
            self._nothing.add(item.name)
            self._leave_by(item.text, item.line, sets=True)

    def _branch(self, item: Branch) -> BlockEnd | None:
        decided = self.decide(item.condition)
        if not isinstance(decided, Open):
            before = self._left
            end = self.follow(item.yes if decided else item.no)
            always = end is BlockEnd.RAISE and self._left == before and not self._call
            self.raised = self.raised or always
            return end
        for side, other in ((item.yes, item.no), (item.no, item.yes)):
            # A rank that goes on is on the other one.
            if _only_raises(side) and not self._is_caught(side[-1]):
                return self.follow(other)
        yes = self._perhaps(item.yes, decided)
        no = self._perhaps(item.no, negated(decided))
        if yes is None or no is None:
            return None
        return yes if no is BlockEnd.RAISE else no

    def _perhaps(self, items: Items, guard: str) -> BlockEnd | None:
        """A block that may not be run: where it leaves, what follows is come to without it."""
        with self._under(guard):
            end = self.follow(items)
            if end is not None and end is not BlockEnd.RAISE:
                self._leave(end)
        return end

    def _leave(self, end: BlockEnd) -> None:
        self._left = {**self._left, end: (*self._left.get(end, ()), self._guards)}

    @contextmanager
    def _under(self, guard: str) -> Iterator[None]:
        outer = self._guards
        self._guards = (*outer, guard)
        yield
        self._guards = outer

    def _loop(self, item: Loop) -> BlockEnd | None:
        condition = item.condition
        if self.decide(condition) is False and not item.endless:
            return self.follow(item.orelse)
        if item.endless:
            self.endless.append(condition)
        first = len(self.events)
        outer = self._left
        with self._under(f"{condition.kind} {condition.key}"):
            end = self.follow(item.body)
            broken, returned = (
                self._left.get(each, ())[len(outer.get(each, ())) :]
                for each in (BlockEnd.BREAK, BlockEnd.RETURN)
            )
            ways_out = {*broken, *returned}
            if end in (BlockEnd.BREAK, BlockEnd.RETURN):
                ways_out.add(_ONCE)
            # The next turn is not come to, either.
            self.events[first:] = [
                each.behind(ways_out) for each in self.events[first:]
            ]
            already = outer.get(BlockEnd.RETURN, ())
            raised = self._left[BlockEnd.RAISE]
            self._left = {
                **outer,
                BlockEnd.RAISE: raised,
                BlockEnd.RETURN: (*already, *returned),
            }
            if end is BlockEnd.RETURN:
                self._leave(end)
        return self._otherwise(item, end, broken)

    def _otherwise(
        self, item: Loop, end: BlockEnd | None, broken: tuple[Guards, ...]
    ) -> BlockEnd | None:
        """The else of a loop: what no break has left. end: that of a turn."""
        outer = self._left.get(BlockEnd.BREAK, ())
        once = [_ONCE] if end is BlockEnd.BREAK else []
        self._left = {**self._left, BlockEnd.BREAK: (*outer, *broken, *once)}
        end = self.follow(item.orelse)
        self._left = {**self._left, BlockEnd.BREAK: outer}
        return end

    def _tried(self, item: Tried) -> BlockEnd | None:
        if self.caught is not None and self.caught[0] is item:
            end = self._error(item)
        else:
            end = self.follow(item.body)
            if end is None:
                end = self.follow(item.orelse)
            elif end is BlockEnd.RAISE and item.handlers:  # it may be caught
                end = None
        last = self.follow(item.final)
        return last if last is not None else end

    def _error(self, item: Tried) -> BlockEnd | None:
        """Follow the handler, after the collectives of the block that come before the error."""
        assert self.caught is not None
        _, number, when = self.caught
        condition, handler = item.handlers[number]
        taken = re.findall(r"[\w.]+", condition.text) if when is Moment.RAISED else ()
        tried = replace(
            self,
            events=[],
            exits=[],
            unseen=set(),
            _nothing=set(self._nothing),
            _taken=taken,
        )
        tried.follow(item.body)
        self.raised = tried.raised
        self.thrown = tried._left.get(BlockEnd.RAISE, ())
        self.events += [
            each
            for each in tried.events
            if each.after.isdisjoint(self.thrown)
            and _comes_before(each.made, item, when)
        ]
        before = self._left
        end = self.follow(handler)
        self.raised = self.raised or (end is BlockEnd.RAISE and self._left == before)
        return end

    def _inlined(self, item: Inlined) -> BlockEnd | None:
        left = self._left
        call = self._call
        self._outside = [*self._outside, call]
        self._left = {**left, BlockEnd.RETURN: left.get(BlockEnd.RETURN, ())}
        self._call = call or item
        end = self.follow(item.body)
        self._outside = self._outside[:-1]
        self._call = call
        if item.manages:
            return end
        self._left = {**left, BlockEnd.RAISE: self._left.get(BlockEnd.RAISE, ())}
        return end if end is BlockEnd.RAISE else None

    def _managed(self, item: Managed) -> BlockEnd | None:
        if not item.body:
            return None
        call = self._call
        self._call = self._outside[-1]
        end = self.follow(item.body)
        self._call = call
        return end


def _only_raises(items: Items) -> bool:
    last = items[-1] if items else None
    raises = isinstance(last, Exit) and last.end is BlockEnd.RAISE
    return raises and not any(of_kind(items, Collective))


def _comes_before(made: Collective, item: Tried, when: Moment) -> bool:
    """Whether a collective of a block was made when its error came."""
    if made.name == "the backward pass":
        return False
    if when is not Moment.EARLY:
        return True
    # Of a helper's calls it is not known which one fails; a backward pass has another before it.
    by_helper = made.place is not None and made.place[0] != made.line
    if by_helper and made.pairs_with == BACKWARD:
        return False
    return made.line <= item.first and (by_helper or made.pairs_with != ENCODER)


def difference(way: Way, other: Way) -> list[Event]:
    """What one way makes more often than the other, by line.

    A call that both make is the same one; what is left pairs with another call of its kind, or with
    one that cannot be seen here.
    """
    left = {}
    sides = [Counter(each.key for each in one.events) for one in (way, other)]
    surplus = [sides[0] - sides[1], sides[1] - sides[0]]
    _take_out(*surplus)
    _take_out(*reversed(surplus))
    for one, another, too_many in zip((way, other), (other, way), surplus, strict=True):
        # What a rank that has raised does not come to, nobody waits in: its launcher ends the job.
        if another.unseen - one.unseen or another.raised:
            continue
        for each in _surplus(one.events, another.events, too_many):
            place = each.made.name, each.made.line
            if not each.made.guess or place not in left:
                left[place] = each
    return sorted(left.values(), key=lambda each: each.made.line)


def _take_out(surplus: Counter[Key], others: Counter[Key]) -> None:
    """What one way makes on both sides of a test that the other way does not ask, or before it
    leaves a loop, and else behind it.
    """
    for yes in list(surplus):
        kind, guards, after = yes
        left = after & {guards, _ONCE}
        for number, guard in enumerate(guards):
            first, last = guards[:number], guards[number + 1 :]
            pairs = [((*first, negated(guard), *last), (*first, *last), after)]
            if left:
                pairs.append((first, first, after - left))
            for opposite, outside, after_both in pairs:
                no = kind, opposite, after
                either_way = kind, outside, after_both
                while surplus[yes] and surplus[no] and others[either_way]:
                    surplus.subtract((yes, no))
                    others.subtract((either_way,))


def _surplus(
    events: list[Event], others: list[Event], too_many: Counter[Key]
) -> Iterator[Event]:
    theirs = set(others)
    last_first = reversed(events)  # the last of several is the one too many
    for each in sorted(last_first, key=lambda one: one in theirs):
        if too_many[each.key]:
            too_many[each.key] -= 1
            yield each


def reordered(way: Way, other: Way) -> list[Event]:
    """Those that come in another order, if both make the same collectives and none of these is in
    a branch.
    """
    unlike = [
        pair
        for pair in zip(way.events, other.events, strict=False)
        if pair[0].key != pair[1].key
    ]
    same = Counter(each.key for each in way.events) == Counter(
        each.key for each in other.events
    )
    is_open = any(each.guards or each.after for pair in unlike for each in pair)
    return [one for one, _ in unlike] if same and not is_open else []


def undecided(condition: Decision) -> Any:
    return Open(condition.key)


def on_member(number: int, members: int) -> Decide:
    """The conditions as one member of a job decides them."""

    def decide(condition: Decision) -> Any:
        if condition.kind == "for":
            return Open(condition.key)
        return truths(condition.value.at, condition.key, members)[number]

    return decide


def either(asked: Decision, holds: bool) -> Decide:
    """One condition decided, wherever it is asked, and all others left open."""

    def decide(condition: Decision) -> Any:
        return holds if condition.asked == asked.asked else Open(condition.key)

    return decide
