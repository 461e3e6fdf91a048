"""Where ranks that run one function may make different collectives: two ways, compared.

A function is followed once for each rank that its tests tell apart, and twice for each test that
data decide, with everything else left open. Where two ways make the same collectives, in the same
order, there is nothing to say.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from nemo_patches.tools.doctor.interpreter import (
    expressions,
    functions,
    invocations,
    knowledge,
    managers,
    statements,
)
from nemo_patches.tools.doctor.interpreter.interpreter import Interpreter, Visitors
from nemo_patches.tools.doctor.interpreter.members import negated, truths
from nemo_patches.tools.doctor.interpreter.names import is_loader
from nemo_patches.tools.doctor.interpreter.peer_messages import (
    Correspondence,
    one_sided,
)
from nemo_patches.tools.doctor.interpreter.skeleton import (
    BACKWARD,
    FORWARD,
    GENERATE,
    LOG,
    NORM,
    RECEIVED,
    UNUSED,
    Collective,
    Decision,
    Exit,
    MessageKind,
    PeerMessage,
    Tried,
    conditions_in,
    of_kind,
    served_in,
)
from nemo_patches.tools.doctor.interpreter.source_file import Definition, SourceFile
from nemo_patches.tools.doctor.interpreter.values import VARIES
from nemo_patches.tools.doctor.interpreter.way import (
    Caught,
    Decide,
    Event,
    Guards,
    Moment,
    Way,
    difference,
    either,
    on_member,
    reordered,
    undecided,
)
from nemo_patches.tools.doctor.syntax import last_part, nodes, words

# visit_If and others.
_VISITORS: Visitors = {
    "stmt": statements.statement,
    "expr": expressions.made_of,
    **{
        name.removeprefix("visit_"): each
        for module in (statements, managers, expressions, invocations)
        for name, each in vars(module).items()
        if name.startswith("visit_")
    },
}
# After which ranks may know each other's lengths.
_AGREEMENTS = ("all_gather", "all_reduce", "broadcast", "reduce")
# Collectives of a mesh, whose ranks may have the same batch; and a test for those of a group.
_OF_A_MESH = words("distribute_module distribute_tensor full_tensor redistribute")
_IN_GROUP = re.compile(r"\bin [\w.]*group")
_ANY_OF = re.compile(r"(?:not \()?(?:len\()?([\w.]+)(?:\)(?: [=!<>]=? 0)?)?\)?")
_READ_OFF = re.compile(
    r"(?=.*\b(?:bool|float|int|any|item|max|min|sum)\()(?:not )?\(?(?:bool\(|float\(|int\()?"
    r"([\w.]+?)(?:\.(?:any|item|max|min|sum)\(\))*\)*(?: [=!<>]=? -?[\d.]+)?\)?"
)
_WITHOUT_GRADIENTS = words("eval inference_mode no_grad")
# What is found under a guess, and not only left open by it.
_TOLD = ("the module is sharded", "a rank whose", knowledge.IN_A_GROUP)
_MOST_MEMBERS = 16
_MOST_TESTS = 100  # of one function on its data; NeMo's largest has 20
# Each knows what the one before has seen of attributes and wrapped modules.
_MOST_ROUNDS = 3
_MUCH_WORK = 15_000  # expressions of a round: the third one is left out


class Kind(Enum):
    """What parts the ranks."""

    BRANCH = "a test around the collective"
    ORDER = "a test that changes the order of collectives"
    EXIT = "a return, continue or break before it"
    ERROR = "an error that is caught"
    LOOP = "how often a loop goes round"
    NAME = "the name that it is logged under"
    MESSAGE = "a message without its other end"
    FIRST_RANK = "a function that runs on one rank"
    HOOK = "a method that runs on one rank"
    GRADIENTS = "a test that chooses whose gradients are reduced"
    ALARM = "an alarm that cannot end it"
    LOCK = "a lock that one process alone holds at a time"
    SET = "the order of a set"
    THREAD = "a thread that makes collectives beside this one's"
    SIZES = "how much it takes of each rank"
    BUFFER = "a buffer as large as this rank's batch"


# What may be wrong with a collective that something else is wrong with.
_BESIDE_OTHERS = (Kind.LOOP, Kind.ALARM, Kind.LOCK, Kind.SET, Kind.SIZES, Kind.THREAD)
_KINDS = {
    "for": Kind.LOOP,
    "filter": Kind.LOOP,
    "name": Kind.NAME,
}  # of conditions; of others a branch


@dataclass(frozen=True)
class Divergence:
    """Collectives that one rank of a function makes and another does not.

    cause: the test, the exception or the decorator, as it is written, and its line; about: what is
    known of it. by_rank: whether the rank decides. exit: of the early exit, with its line. trains:
    whether the function is a step of training. sure: whether it needs no guess that ranks differ.
    """

    function: str
    kind: Kind
    collectives: tuple[Collective, ...]
    cause: str
    line: int
    by_rank: bool = False
    exit: str = ""
    exit_line: int = 0
    trains: bool = False
    about: str = ""
    sure: bool = False

    def places(self) -> dict[Collective, object]:
        """By what a collective of it is known again: each is said once."""
        if self.kind in (Kind.EXIT, Kind.ERROR):
            place = (self.kind, self.exit_line or self.line)
            return dict.fromkeys(self.collectives, place)
        apart = self.kind if self.kind in _BESIDE_OTHERS else None
        return {
            each: (
                None if each.pairs_with == GENERATE else apart,
                each.place,
                each.line,
            )
            for each in self.collectives
        }


def divergences(tree: ast.Module) -> tuple[Divergence, ...]:
    """Those of all functions of a file, which plain_python.py has made, and of the module."""
    file = SourceFile(tree)
    read: list[Interpreter] = []
    known: object = None
    for _ in range(_MOST_ROUNDS):
        read = _read(file)
        is_known = known == file.attributes and not file.used_whole
        if is_known or (known is not None and file.work > _MUCH_WORK):
            break
        known = file.attributes
    said: dict[ast.AST, set[object]] = {}  # an inherited method is read again
    # The module last: what it calls is said in the functions.
    unpaired = _unpaired([*read[1:], read[0]], file)
    served = frozenset(kind for each in read for kind in served_in(each.items))
    return *unpaired, *(
        one
        for each in read
        for one in WaysCompared(each, served).divergences(
            said.setdefault(each.definition.node, set())
        )
    )


def _read(file: SourceFile) -> list[Interpreter]:
    file.begin_round()
    module = Interpreter(_VISITORS, file, Definition("the module", file.tree), file.env)
    module.block(file.tree.body)
    file.env = {
        name: each for name, each in module.env.items() if name not in file.changed
    }
    read = [module]
    for definition in file.definitions:
        reader = Interpreter(_VISITORS, file, definition, file.start(definition, {}))
        reader.alarm = functions.decorated_alarm(reader)
        reader.apart = bool(functions.one_rank(reader, definition))
        reader.block(definition.node.body)
        read.append(reader)
        if definition.owner:
            # Also where the object's class is not known.
            file.set_to.setdefault(last_part(definition.name), []).append(
                reader.returned
            )
            kept = functions.as_kept(reader.attributes_set, alone=reader.apart)
            file.of_classes.append((definition.owner.name, kept))
    file.attributes = {}
    for of_class, known in file.of_classes:
        file.keep_attributes(of_class, known)
    return read


def _unpaired(read: Sequence[Interpreter], file: SourceFile) -> Iterator[Divergence]:
    found: list[tuple[Interpreter, Correspondence]] = []
    for each in read:
        if any(of_kind(each.items, PeerMessage)):
            every = range(file.members.job)
            ways = [Way(on_member(number, len(file.members))) for number in every]
            for way in ways:
                way.follow(each.items)
            if not any(way.unseen for way in ways):
                found.append((each, Correspondence(ways, file.members)))
    # Of functions that no other one calls: what may be the other end of another one's.
    loose = {
        message
        for reader, messages in found
        if reader.definition.node not in file.calls_joined
        for message in messages.loose
    }
    posted = [
        each
        for _, messages in found
        for own in messages.posted.values()
        for each in own
    ]
    told = _all_told(read, len(found))
    said = set[int]()
    for reader, messages in found:
        others = {each.kind for each in loose if each.own_line not in messages.lines}
        wrong = messages.wrong[:1]  # mostly one fault, seen from both ends
        wrong = [each for each in wrong if not others - {each.message.kind}]
        if told:
            wrong += one_sided(reader.items, posted)
        for one in wrong:
            made = one.message
            if made.own_line in said:
                continue
            said.add(made.own_line)
            is_program = "__main__" in file.mentioned
            guess = "" if is_program or len(messages.kinds) > 1 else knowledge.ELSEWHERE
            yield Divergence(
                function=reader.definition.name,
                kind=Kind.MESSAGE,
                collectives=(
                    Collective(made.name, made.kind.value, made.line, guess=guess),
                ),
                cause=one.text,
                line=made.line,
            )


def _all_told(read: Sequence[Interpreter], found: int) -> bool:
    """Whether no message of the file may have another end, or be given up after an error."""
    made = [each.items for each in read if any(of_kind(each.items, PeerMessage))]
    every = [each for items in made for each in of_kind(items, PeerMessage)]
    blocks = [each for items in made for each in of_kind(items, Tried) if each.handlers]
    is_tried = any(of_kind(blocks, PeerMessage))
    is_other = any(each.kind is MessageKind.OTHER for each in every)
    return len(made) == found and not is_tried and not is_other


class WaysCompared:
    """The ways through one function."""

    def __init__(self, reader: Interpreter, served: frozenset[str]) -> None:
        self.reader = reader
        self.served = served  # what ranks make in a loop that serves another rank
        self.file = reader.file
        self.name = reader.definition.name
        self.items = reader.items
        self.job = reader.file.members.job
        by_key = {each.asked: each for each in conditions_in(self.items)}
        self.conditions = list(by_key.values())

    def divergences(self, said: set[object]) -> Iterator[Divergence]:
        for each in self._all():
            places = each.places()
            left = tuple(
                replace(one, guess=one.guess or knowledge.NOT_SERVED)
                if one.pairs_with in self.served
                else one
                for one, place in places.items()
                if place not in said
            )
            said.update(places.values())
            if left:
                yield replace(each, collectives=left, trains=self._trains)

    def _all(self) -> Iterator[Divergence]:
        for kind, made, line in self.reader.found:
            if kind == "BUFFER" and last_part(self.name) != "forward":
                continue  # what it is given is not known there
            yield Divergence(
                function=self.name,
                kind=Kind[kind],
                collectives=(made,),
                cause=Kind[kind].value,
                line=line,
            )
        yield from self._by_error()
        if not self._usual.events:
            return
        alone = functions.one_rank(self.reader, self.reader.definition)
        of_all = [each for each in self._usual.events if not each.made.of_some]
        if self.reader.in_hook and not alone:
            of_all = [each for each in of_all if not _of_all(each)]
        if of_all and (alone or self.reader.in_hook):
            yield Divergence(
                function=self.name,
                kind=Kind.FIRST_RANK if alone else Kind.HOOK,
                collectives=_made(of_all),
                cause=alone or last_part(self.name),
                line=self.reader.definition.node.lineno,
                by_rank=bool(alone),
            )
            return
        yield from self._by_rank()
        yield from self._by_data()

    @cached_property
    def _usual(self) -> Way:
        return self._follow(undecided)

    @cached_property
    def _attributes(self) -> frozenset[str]:
        names = nodes(self.reader.definition.node, ast.Attribute)
        return frozenset(each.attr for each in names)

    @cached_property
    def _trains(self) -> bool:
        """Whether it is a step, or runs the backward pass itself."""
        return self.name.endswith("_step") or "backward" in self._attributes

    def _follow(
        self, decide: Decide, caught: Caught | None = None, by_rank: bool = False
    ) -> Way:
        way = Way(decide, caught)
        way.follow(self.items)
        if by_rank:  # a rank that is in no group has to make nothing there
            way.events = [each for each in way.events if not each.made.of_some]
        return way

    def _by_rank(self) -> Iterator[Divergence]:
        members = self.file.members
        ranked = [
            each
            for each in self.conditions
            if each.kind != "for" and members.differ(each.value.at)
        ]
        columns = [
            truths(each.value.at, each.key, len(members))[: self.job] for each in ranked
        ]
        # One member for each different column of decisions.
        unlike: dict[tuple[object, ...], int] = {}
        for number in range(self.job):
            unlike.setdefault(tuple(column[number] for column in columns), number)
        ways = [
            self._follow(on_member(number, len(members)), by_rank=True)
            for number in list(unlike.values())[:_MOST_MEMBERS]
        ]
        for other in ways[1:]:
            yield from self._compared(ways[0], other, ranked, by_rank=True)
        # Those that a rank's number does not decide, such as rank == source.
        for each in self.conditions:
            if each.value.has("rank") and each not in ranked:
                yield from self._by_test(each, by_rank=True)

    def _by_data(self) -> Iterator[Divergence]:
        for each in self.conditions[:_MOST_TESTS]:
            gathered = self._is_gathered(each)
            guess = "" if gathered else self._guess_of_batches(each)
            varies = each.value.level == VARIES or gathered
            if guess or (varies and not each.value.has("rank")):
                yield from self._by_test(each, guess=guess)

    def _is_gathered(self, condition: Decision) -> bool:
        """Whether it asks if there is any of what is gathered from all ranks behind it, or how much
        of what they reduce there.
        """
        value = condition.value
        if value.has("agreed", "named") or value.at is not None:
            return False
        forms = (_ANY_OF, self.reader.gathered), (_READ_OFF, self.reader.reduced)
        return any(
            condition.line < lines.get(asked[1], 0)
            for form, lines in forms
            if (asked := form.fullmatch(condition.key))
        )

    def _by_test(
        self, condition: Decision, *, by_rank: bool = False, guess: str = ""
    ) -> Iterator[Divergence]:
        """Of the ways on which it holds and does not."""
        one, other = (
            self._follow(either(condition, holds), by_rank=by_rank)
            for holds in (True, False)
        )
        yield from self._compared(one, other, [condition], by_rank=by_rank, guess=guess)

    def _guess_of_batches(self, condition: Decision) -> str:
        """What must hold for ranks to differ in a test that they mostly agree in, which counts
        where the parts of a sharded model are gathered.
        """
        if condition.value.level == VARIES:
            is_even = condition.value.has("file") and condition.value.has("even")
            return knowledge.OTHER_FILES if is_even else ""
        if condition.value.has("lacks"):
            return "a rank's batch has none of it, and another's has"
        own = self._loads(condition)
        unlike = (
            "the ranks' loaders have unlike numbers of batches, as those of streams do"
        )
        return unlike if own else ""

    def _loads(self, condition: Decision) -> bool:
        """Whether it is an evaluation until this rank's own loader ends, where nothing shares the
        batches out.
        """
        return (
            condition.kind == "for"
            and is_loader(condition.text)
            and "DistributedSampler" not in self.file.mentioned
            and not _WITHOUT_GRADIENTS.isdisjoint(self._attributes)
        )

    def _by_error(self) -> Iterator[Divergence]:
        # A helper's are found in the helper.
        for tried in of_kind(self.items, Tried, helpers=False):
            for number, (condition, _) in enumerate(tried.handlers):
                if condition.value.level != VARIES or tried.harmless:
                    continue
                missing: list[Event] = []
                signals = _is_signal(condition.text, tried)
                for when in (Moment.RAISED,) if signals else Moment:
                    way = self._follow(undecided, (tried, number, when))
                    if when is not Moment.RAISED or self._differ_in(way.thrown):
                        missing = missing or difference(self._usual, way)
                if missing:
                    yield Divergence(
                        function=self.name,
                        kind=Kind.ERROR,
                        collectives=_made(missing),
                        cause=condition.text,
                        line=condition.line,
                    )

    def _differ_in(self, thrown: Iterable[Guards]) -> bool:
        """Whether ranks differ in the tests around a raise."""
        return any(
            each.key in one or negated(each.key) in one
            for each in self.conditions
            if each.value.level == VARIES or self.reader.by_rank(each.value)
            for one in thrown
        )

    def _compared(
        self,
        way: Way,
        other: Way,
        conditions: Sequence[Decision],
        *,
        by_rank: bool = False,
        guess: str = "",
    ) -> Iterator[Divergence]:
        """What two ways through it differ in. conditions: those that make them."""
        # A layer that is called at all has a gradient.
        used = [{each.made.pairs_with for each in one.events} for one in (way, other)]
        called = {each for each in used[0] & used[1] if knowledge.LAYER_AT.match(each)}
        missing = [
            each
            for each in difference(way, other)
            if each.made.name not in self.reader.settled
            and each.made.pairs_with not in called
        ]
        if by_rank:
            missing = _not_served(way, other, missing)
        else:
            missing = [each for each in missing if self._tells(each, conditions, guess)]
        keys = {each.asked for each in conditions}
        every = [each for each in conditions_in(self.items) if each.asked in keys]
        ended = way.raised or other.raised
        if every and not missing and not ended and not guess:
            unlike = _unlike_gradients(way, other)
            if unlike:
                yield self._parted(Kind.GRADIENTS, unlike, every[0], by_rank)
                return
        if every and not missing and not ended:
            made = _made(reordered(way, other))
            if len({each.line for each in made}) > 1:  # not by one call of a helper
                yield self._parted(Kind.ORDER, made, every[0], by_rank)
        for each in every:
            inside = [one for one in missing if each.around(one.made.line)]
            missing = [one for one in missing if one not in inside]
            pairs_with = {one.made.pairs_with for one in inside}
            of_a_group = by_rank and _IN_GROUP.search(each.key)
            if inside and not (of_a_group and pairs_with <= _OF_A_MESH):
                kind = Kind.BRANCH if by_rank else _KINDS.get(each.kind, Kind.BRANCH)
                made = self._guessed(inside, by_rank, guess)
                yield self._parted(kind, made, each, by_rank)
        if missing and not guess and not ended:
            yield from self._left_early(way, other, missing, every, by_rank)

    def _left_early(
        self,
        way: Way,
        other: Way,
        missing: Sequence[Event],
        conditions: Sequence[Decision],
        by_rank: bool,
    ) -> Iterator[Divergence]:
        exits = {*way.exits} ^ {*other.exits}
        for each in sorted(exits, key=lambda one: (one.sets, one.line)):
            around = next((one for one in conditions if one.around(each.line)), None)
            if around is not None:
                made = self._guessed(missing, by_rank, "")
                parted = self._parted(Kind.EXIT, made, around, by_rank)
                yield replace(parted, exit=each.text, exit_line=each.line)
                return

    def _parted(
        self,
        kind: Kind,
        made: tuple[Collective, ...],
        condition: Decision,
        by_rank: bool,
    ) -> Divergence:
        sure = condition.value.count == VARIES or self._raced(kind, made[0], condition)
        if condition.value.has("random") and self.file.seeded_by_rank:
            sure = True
        about = [condition.key, *sorted(condition.value.tags)]
        if self.file.samples and re.search(knowledge.WORD_OF_BATCH, condition.key):
            about.append(knowledge.BY_SAMPLER)
        return Divergence(
            function=self.name,
            kind=kind,
            collectives=made,
            cause=condition.text,
            line=condition.line,
            by_rank=by_rank,
            about=" ".join(about),
            sure=sure,
        )

    def _raced(self, kind: Kind, made: Collective, condition: Decision) -> bool:
        """Whether one rank may make what the others look for: where it is not there yet, the rank
        decides something before the collective.
        """
        behind = Kind.BRANCH if condition.key.startswith("not ") else Kind.EXIT
        return kind is behind and any(
            condition.line < each.line < made.line and self.reader.by_rank(each.value)
            for each in self.conditions
        )

    def _tells(self, event: Event, conditions: Sequence[Decision], guess: str) -> bool:
        """Whether it can be told that ranks differ in it: a loop may go round as often as they
        agreed on before.
        """
        made = event.made
        if made.pairs_with in _OF_A_MESH:
            return False
        if guess:
            sharded = "gathers" in made.why and not made.guess
            layer = made.pairs_with == NORM or knowledge.LAYER_AT.match(made.pairs_with)
            of_fields = bool(self.file.lacks_fields and layer)
            return sharded and (made.pairs_with in (FORWARD, UNUSED) or of_fields)
        for each in conditions:
            if each.kind == "for" and each.around(made.line):
                if each.value.has("keyed"):  # and as many may be others
                    return True
                return made.pairs_with != LOG and not self._agreed_before(each.line)
        return not made.guess or made.guess.startswith(_TOLD)

    def _agreed_before(self, line: int) -> bool:
        return any(
            each.made.line < line and each.made.pairs_with.startswith(_AGREEMENTS)
            for each in self._usual.events
        )

    def _guessed(
        self, events: Iterable[Event], by_rank: bool, guess: str
    ) -> tuple[Collective, ...]:
        return tuple(
            replace(each, guess=guess or self._guess(each, by_rank) or each.guess)
            for each in _made(events)
        )

    def _guess(self, made: Collective, by_rank: bool) -> str:
        """What must hold for ranks to differ in it, beside what must hold for it at all."""
        at_once = made.on_step
        if at_once is None:
            at_once = self.name.endswith("training_step")
        if by_rank or made.pairs_with != LOG or at_once or self.name.endswith("_end"):
            return ""
        # Reduced at the epoch's end.
        return "a rank does not come to it in all of an epoch"


def _unlike_gradients(way: Way, other: Way) -> tuple[Collective, ...]:
    """The backward passes that reduce one module on one way, and another on the other."""
    passes = [
        [each.made for each in one.events if each.made.pairs_with == BACKWARD]
        for one in (way, other)
    ]
    if len(passes[0]) != len(passes[1]):
        return ()
    for one, another in zip(*passes, strict=True):
        known = one.modules and another.modules
        if known and one.modules.isdisjoint(another.modules):
            return one, another
    return ()


def _of_all(event: Event) -> bool:
    """Whether it is made after an error that all ranks have."""
    asked = " ".join(each for each in event.guards if not each.startswith("not "))
    return not knowledge.ALL_RANKS.isdisjoint(re.findall(r"\w+", asked))


def _is_signal(text: str, tried: Tried) -> bool:
    """Whether it is no failure, and comes only where the block raises it: TrialPruned."""
    raised = {each.text for each in of_kind(tried.body, Exit)}
    return f"raise {text}" in raised and not text.endswith(("Error", "Exception"))


def _made(events: Iterable[Event]) -> tuple[Collective, ...]:
    return tuple(dict.fromkeys(each.made for each in events))


def _not_served(way: Way, other: Way, missing: Sequence[Event]) -> list[Event]:
    """Without what one side makes in an endless loop for those that wait for it."""
    served = [each for each in way.endless if each not in other.endless]
    served += [each for each in other.endless if each not in way.endless]
    return [
        each
        for each in missing
        if not each.made.pairs_with.startswith(RECEIVED)
        or not any(loop.around(each.made.line) for loop in served)
    ]
