"""Where ranks that run one function may make different collectives:
by a branch, an early exit, a loop or an error.

Each function is followed twice, with one test decided either way (a test on the rank: as on one
rank and on another), and everything else left open. Where the two ways make the same collectives,
in the same order, there is nothing to say.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import islice

from nemo_patches.tools.doctor import batch_data
from nemo_patches.tools.doctor.batch_data import Branching, DataFlow, Test
from nemo_patches.tools.doctor.collectives import (
    BACKWARD,
    ENCODER,
    FORWARD,
    LOG,
    UNUSED,
    Collective,
    Names,
    Surroundings,
)
from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.finding import Finding, Severity, at
from nemo_patches.tools.doctor.rank_tests import FIRST, Member, RankTests
from nemo_patches.tools.doctor.syntax import (
    LOOPS,
    TESTED,
    Function,
    dotted,
    functions,
    last_part,
    nodes,
    own_nodes,
    text_of,
    words,
)
from nemo_patches.tools.doctor.ways import Decisions, End, Event, Way

_MOST_HELPERS = 6  # that call each other
_MOST_OF_ONE_HELPER = 20  # collectives
_NO_BATCH = re.compile(r"\b(batch(es)?|data|samples?) is (not )?None\b")
_FILES = re.compile(r"exists\(|is_file\(|isfile\(|is_dir\(|isdir\(|listdir\(")
_NO_GRADIENT = re.compile(r"\bgrads\b|\bgrad\w*\b.{0,12} is (not )?None")
# What must hold for ranks to differ in a test that they mostly agree in, by what the test says.
_GUESSES = {
    _NO_GRADIENT.pattern: "a rank's batches leave parameters without a gradient",
    r"\brandom\.|\brand\(": (
        "the ranks draw other random numbers, as they do without a seed"
    ),
    _NO_BATCH.pattern: "the loader gives some ranks None for a batch",
    _FILES.pattern: "the ranks' hosts, or moments, see other files",
}
_OF_ONE_RANK = words(
    "main_process_only master_only on_last_process on_local_main_process"
    " on_main_process rank_zero_only"
)
# A test for the members of a group, which the collectives of a mesh may be for.
_IN_GROUP = re.compile(r"\bin [\w.]*group")
_OF_A_MESH = words(
    "distribute_module distribute_tensor full_tensor redistribute"
)  # whose ranks may have the same batch
_WITHOUT_GRADIENTS = words("eval inference_mode no_grad")
# After which ranks may know each other's lengths.
_AGREEMENTS = ("all_gather", "all_reduce", "broadcast", "reduce")
_RECEIVED = ("broadcast", "scatter")
_MOST_NAMED = 3  # collectives of a finding
# Of one function on the rank, and as many on its data; NeMo's largest has 20.
_MOST_TESTS = 100


class Kind(Enum):
    BRANCH = "a test around the collective"
    EXIT = "a return, continue or break before it"
    ERROR = "an error that is caught"
    LOOP = "how often a loop goes round"
    NAME = "the name that it is logged under"
    FIRST_RANK = "a function that runs on one rank"


@dataclass(frozen=True)
class Divergence:
    """Collectives that one rank of a function makes and another does not.

    cause: the test, the exception or the decorator, as it is written, and its line. exit_line: of
    the early exit.
    by_rank: whether the rank decides. reordered: whether both make them, in another order. trains:
    whether the
    function is a step of training. origin: what the names in the cause are assigned.
    """

    function: str
    kind: Kind
    collectives: tuple[Collective, ...]
    cause: str
    line: int
    by_rank: bool = False
    exit: str = ""
    exit_line: int = 0
    reordered: bool = False
    trains: bool = False
    origin: str = ""

    @property
    def names(self) -> str:
        """For sentences: the collectives, and what makes the first one, where its name does not say
        so.
        """
        names = list(dict.fromkeys(each.name for each in self.collectives))
        why = self.collectives[0].why
        if len(names) == 1:
            return f"{names[0]} ({why})" if why else names[0]
        if len(names) > _MOST_NAMED:
            names[_MOST_NAMED:] = [f"{len(names) - _MOST_NAMED} more"]
        return f"{', '.join(names[:-1])} and {names[-1]}"

    @property
    def places(self) -> tuple[Value, ...]:
        """Where the collectives are, and the cause."""
        return (
            *(at(each.name, each.line) for each in self.collectives),
            at(self.cause, self.line),
        )

    @property
    def are(self) -> str:
        """The verb after `names`."""
        return "is" if len({each.name for each in self.collectives}) == 1 else "are"

    @property
    def guess(self) -> str:
        """What must hold for a guess to be right, at the end of a sentence; empty where it is
        none.
        """
        guesses = [each.guess for each in self.collectives]
        # That a batch may be None.
        expected = self.function.endswith("_step") or self.exit == End.CONTINUE.value
        said = f"{self.cause} {self.origin}"
        if _NO_GRADIENT.search(said):
            expected = self.trains
        if not self.by_rank and not (expected and _NO_BATCH.search(said)):
            guesses = [
                text for pattern, text in _GUESSES.items() if re.search(pattern, said)
            ] or guesses
        return f". A guess: {guesses[0]}" if all(guesses) else ""

    @property
    def severity(self) -> Severity:
        return Severity.NOTE if self.guess else Severity.WARNING

    def finding(
        self,
        what: str,
        read: tuple[Value, ...],
        instead: str,
        severity: Severity | None = None,
    ) -> Finding:
        worth = self.severity if severity is None else severity
        return Finding(
            severity=worth, what=f"{what}{self.guess}", read=read, instead=instead
        )


def divergences(tree: ast.Module) -> tuple[Divergence, ...]:
    """The divergences of all functions of a file, and of its module-level code."""
    module = _Scope(
        Surroundings(Names(tree)),
        functions(tree),
    )
    found = [
        _Function(module, tree, "the module"),
        *(
            _Function(scope, node, name)
            for name, node, scope in _functions(tree, "", module)
        ),
    ]
    return tuple(one for each in found for one in each.divergences())


def _functions(
    parent: ast.AST, prefix: str, scope: _Scope
) -> Iterator[tuple[str, Function, _Scope]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef):
            methods = {
                f"{owner}.{name}": each
                for base in reversed(_bases(node, scope))
                for name, each in functions(base).items()
                for owner in ("self", "cls", node.name)
            }
            surroundings = Surroundings(scope.surroundings.names, node)
            inner = _Scope(surroundings, {**scope.helpers, **methods})
            yield from _functions(node, f"{prefix}{node.name}.", inner)
        elif isinstance(node, Function):
            inside = nodes(node, Function)
            own = {each.name: each for each in inside if each is not node}
            inner = scope
            if own:
                inner = _Scope(scope.surroundings, {**scope.helpers, **own})
            yield f"{prefix}{node.name}", node, inner
            yield from _functions(node, f"{prefix}{node.name}.", inner)
        elif not isinstance(node, ast.expr):
            yield from _functions(node, prefix, scope)


def _bases(node: ast.ClassDef, scope: _Scope) -> list[ast.ClassDef]:
    """A class and its base classes in the same file, the nearest first."""
    classes = {
        each.name: each
        for each in scope.surroundings.names.tree.body
        if isinstance(each, ast.ClassDef)
    }
    found = [node]
    for inner in found:
        bases = (classes.get(dotted(each)) for each in inner.bases)
        found += [each for each in bases if each and each not in found]
    return found


@dataclass
class _Scope:
    """What calls in a function may lead to: helpers of the same file, by the name that they are
    called by.
    """

    surroundings: Surroundings
    helpers: Mapping[str, Function]
    _functions: dict[str, _Function] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)

    def made_by(self, call: ast.Call) -> tuple[Collective, ...]:
        """The collectives of a call: its own, or those of a helper in the same file, a few calls
        deep.
        """
        own = self.surroundings.collective(call)
        if own is not None:
            return (own,)
        name = dotted(call.func)
        name = "self.forward" if name == "self" else name
        surroundings = self.surroundings
        of_parameters = "param_groups" in surroundings.names.mentioned
        of_a_group = surroundings.of_a_group(call) and not of_parameters
        with self._opened(name) as helper:
            made = helper.summary if helper else ()
        return tuple(
            replace(
                each,
                name=f"{dotted(call.func)}()",
                line=call.lineno,
                why=each.why or f"which makes {each.name}",
                guess="its group has all ranks" if of_a_group else each.guess,
            )
            for each in made
        )

    def agrees(self, call: ast.Call) -> bool:
        """Whether a call gives all ranks the same: a collective, or a helper that makes one."""
        return any(
            each.pairs_with not in (ENCODER, BACKWARD, FORWARD, LOG, UNUSED)
            for each in self.made_by(call)
        )

    def decides(self, call: ast.Call) -> bool:
        """Whether a call is one of a helper that decides by what it is given."""
        with self._opened(dotted(call.func)) as helper:
            return helper is not None and helper.decides

    @contextmanager
    def _opened(self, name: str) -> Iterator[_Function | None]:
        """A helper while it is read; None for another name, and for one that calls itself, or many
        others in turn.
        """
        function = self.helpers.get(name)
        if function is None or name in self._open or len(self._open) >= _MOST_HELPERS:
            yield None
            return
        self._open.append(name)
        try:
            yield self._functions.setdefault(name, _Function(self, function, ""))
        finally:
            self._open.pop()


def _calls_on_some_ranks(name: str, names: Names) -> bool:
    """Whether a decorator of this file calls what it is given only under a test on the rank."""
    decorator = functions(names.tree).get(name)
    if decorator is None or not decorator.args.args:
        return False
    given = decorator.args.args[0].arg
    tests = RankTests(names, names.assigned)
    calls = {call for call in nodes(decorator, ast.Call) if dotted(call.func) == given}
    inside = {
        call
        for branch in nodes(decorator, ast.If)
        if tests.about_rank(branch.test)
        for each in branch.body
        for call in nodes(each, ast.Call)
    }
    return bool(calls) and calls <= inside


@dataclass(frozen=True)
class _Function:
    """One function, or the module-level code."""

    scope: _Scope
    node: Function | ast.Module
    name: str

    @cached_property
    def _flow(self) -> DataFlow:
        flow = DataFlow(
            self.scope.agrees,
            self.scope.decides,
            self.scope.surroundings.accumulated,
            self._on_several,
            frozenset(map(id, self.rank_tests)),
        )
        flow.walk(self.node)
        return flow

    @cached_property
    def decides(self) -> bool:
        """Whether what it returns is read off its arguments."""
        returned = [
            node.value
            for node in own_nodes(self.node)
            if isinstance(node, ast.Return) and node.value
        ]
        return bool(self._flow.tests) or any(map(self._flow.is_data, returned))

    @cached_property
    def summary(self) -> tuple[Collective, ...]:
        """Those that it makes as a helper, on the first rank where ranks differ."""
        yields = any(nodes(self.node, ast.Yield, ast.YieldFrom))
        if self._on_one_rank or yields:
            return ()
        events = self.follow(self.of_rank(FIRST)).events
        guess = "it is called for the first time" if self._once else ""
        return tuple(
            replace(each.collective, guess=guess)
            for each in events[:_MOST_OF_ONE_HELPER]
            if not each.collective.guess
        )

    @cached_property
    def _on_one_rank(self) -> str:
        """What makes Lightning run it on one rank only; empty if nothing does."""
        if not isinstance(self.node, Function):
            return ""
        surroundings = self.scope.surroundings
        names = surroundings.names
        for node in self.node.decorator_list:
            name = names.origin(node.func if isinstance(node, ast.Call) else node)
            if last_part(name) in _OF_ONE_RANK or _calls_on_some_ranks(name, names):
                return f"@{text_of(node)}"
        prepares = self.node.name == "prepare_data" and surroundings.lightning
        return "prepare_data" if prepares else ""

    @cached_property
    def _once(self) -> bool:
        """Whether it leaves at once where a global variable says that it has been called before."""
        kept = self.scope.surroundings.names.changed
        return any(
            isinstance(each, ast.If)
            and isinstance(each.body[-1], ast.Return)
            and not kept.isdisjoint(name.id for name in nodes(each.test, ast.Name))
            for each in self.node.body
        )

    @cached_property
    def _ranks(self) -> RankTests:
        names = self.scope.surroundings.names
        given = (
            {each.arg for each in nodes(self.node.args, ast.arg)}
            if isinstance(self.node, Function)
            else set()
        )
        known = {**names.assigned, **self._assigned}
        unknown = (given - self._assigned.keys()) | names.changed
        return RankTests(names, {name: known[name] for name in known.keys() - unknown})

    @cached_property
    def _on_several(self) -> Decisions:
        """The tests that it decides whether there are several ranks: where there is one, there is
        nobody to wait.
        """
        return {
            id(node): self._ranks.decided_on_several(_test(node))
            for node in own_nodes(self.node)
            if isinstance(node, TESTED)
        }

    @cached_property
    def rank_tests(self) -> list[ast.If | ast.While | ast.IfExp | ast.BoolOp]:
        found = [
            node
            for node in own_nodes(self.node)
            if isinstance(node, TESTED) and self._ranks.about_rank(_test(node))
        ]
        return sorted(found, key=lambda each: (each.lineno, each.col_offset))

    def of_rank(self, member: Member) -> Decisions:
        """How each test on the rank is decided on this one."""
        return {
            id(node): self._ranks.decided(_test(node), member)
            for node in self.rank_tests
        }

    def follow(
        self,
        decisions: Decisions,
        caught: tuple[ast.Try, ast.ExceptHandler, bool] | None = None,
    ) -> Way:
        way = Way(
            node=self.node,
            name=self.name,
            surroundings=self.scope.surroundings,
            made_by=self.scope.made_by,
            decisions={**self._on_several, **decisions},
            caught=caught,
        )
        way.walk()
        return way

    def divergences(self) -> Iterator[Divergence]:
        """The divergences of all functions of a file, and of its module-level code."""
        said: set[tuple[object, ...]] = set()
        for each in self._all():
            loop = each.kind is Kind.LOOP
            places: dict[Collective, tuple[object, ...]] = {
                one: (loop, one.name, one.line) for one in each.collectives
            }
            if each.kind in (Kind.EXIT, Kind.ERROR):
                places = dict.fromkeys(places, (each.kind, each.exit_line or each.line))
            left = tuple(one for one, place in places.items() if place not in said)
            said |= {*places.values()}
            if left:
                yield replace(
                    each,
                    collectives=left,
                    trains=self._trains,
                    origin=self._origin(each),
                )

    def _origin(self, each: Divergence) -> str:
        """What the names in its cause are assigned, and of what these are made the files."""
        if each.by_rank:
            return ""
        made_of = batch_data.assignments(self.node, drawn=True)
        texts = dict[str, bool]()
        waiting = [(each.cause, False)]
        for text, later in waiting:
            for name in re.findall(r"\w+", text):
                for made in map(text_of, made_of.get(name, ())):
                    if made not in texts:
                        texts[made] = later
                        waiting.append((made, True))
        return " ".join(
            made for made, later in texts.items() if not later or _FILES.search(made)
        )

    @cached_property
    def _assigned(self) -> Mapping[str, list[ast.expr]]:
        return batch_data.assignments(self.node)

    @cached_property
    def _trains(self) -> bool:
        """Whether it is a step, or runs the backward pass itself."""
        calls = (dotted(each.func) for each in nodes(self.node, ast.Call))
        backward = any(name.endswith(".backward") for name in calls)
        return self.name.endswith("_step") or backward

    @cached_property
    def _usual(self) -> Way:
        return self.follow({})

    def _all(self) -> Iterator[Divergence]:
        yield from self._by_error()
        if not self._usual.events:
            return
        yield from self._on_first_rank()
        for each in self._by_rank():
            in_group = " in " in each.cause and _IN_GROUP.search(each.cause)
            meshes = {one for one in each.collectives if one.pairs_with in _OF_A_MESH}
            if not in_group or not meshes.issuperset(each.collectives):
                yield each
        yield from self._by_data()
        yield from self._by_loader()
        yield from self._by_name()

    def _on_first_rank(self) -> Iterator[Divergence]:
        cause = self._on_one_rank
        events = self.follow(self.of_rank(FIRST)).events if cause else []
        if events and isinstance(self.node, Function):
            yield Divergence(
                function=self.name,
                kind=Kind.FIRST_RANK,
                collectives=_of(events),
                cause=cause,
                line=self.node.lineno,
                by_rank=True,
            )

    def _by_rank(self) -> Iterator[Divergence]:
        if not self.rank_tests or self._on_one_rank:
            return
        members = self._ranks.members(map(_test, self.rank_tests))
        decisions = [self.of_rank(member) for member in members]
        ways = list(map(self.follow, decisions))
        for other in ways[1:]:
            yield from self._compared(
                ways[0], other, nodes=self.rank_tests, by_rank=True
            )
        # Those that a rank's number does not decide, such as rank == source.
        left: list[Test] = [
            (_test(node), node)
            for node in self.rank_tests
            if all(isinstance(each[id(node)], str) for each in decisions)
        ]
        yield from self._decided_either_way(left, by_rank=True)

    def _by_data(self) -> Iterator[Divergence]:
        for each in self._decided_either_way(self._flow.tests, by_rank=False):
            left = tuple(
                self._guessed(one)
                for one in each.collectives
                if not self._is_open(one, each)
            )
            if left:
                yield replace(each, collectives=left)

    def _by_loader(self) -> Iterator[Divergence]:
        """An evaluation of a sharded model until each rank's own loader ends, where nothing shares
        the batches out.
        """
        used = {last_part(dotted(each)) for each in ast.walk(self.node)}
        shares = "DistributedSampler" in self.scope.surroundings.names.mentioned
        if shares or used.isdisjoint(_WITHOUT_GRADIENTS):
            return
        loops: list[Test] = [
            (node.iter, node)
            for node in own_nodes(self.node)
            if isinstance(node, ast.For) and batch_data.is_loader(node.iter)
        ]
        guess = (
            "the ranks' loaders have unlike numbers of batches, as those of streams do"
        )
        for each in self._decided_either_way(loops, by_rank=False):
            sharded = tuple(
                replace(one, guess=guess)
                for one in each.collectives
                if one.pairs_with in (FORWARD, UNUSED) and not one.guess
            )
            if sharded and each.kind is Kind.LOOP:
                yield replace(each, collectives=sharded)

    def _decided_either_way(
        self, tests: Iterable[Test], by_rank: bool
    ) -> Iterator[Divergence]:
        """The same test in several places is decided the same way."""
        by_text: dict[str, list[Branching]] = {}
        for test, node in tests:
            by_text.setdefault(text_of(test), []).append(node)
        for text, branches in islice(by_text.items(), _MOST_TESTS):
            yes, no = (
                self.follow({id(node): decided for node in branches})
                for decided in (True, False)
            )
            yield from self._compared(
                yes, no, nodes=branches, by_rank=by_rank, text=text
            )

    def _is_open(self, collective: Collective, divergence: Divergence) -> bool:
        """Whether it cannot be told that ranks differ in it: a loop may go round as often as they
        agreed on before.
        """
        if collective.pairs_with in _OF_A_MESH:
            return True
        if divergence.kind is Kind.LOOP:
            return collective.pairs_with == LOG or any(
                each.collective.line < divergence.line
                and each.collective.pairs_with.startswith(_AGREEMENTS)
                for each in self._usual.events
            )
        sharded = collective.guess.startswith("the module is sharded")
        return bool(collective.guess) and not sharded

    def _guessed(self, collective: Collective) -> Collective:
        """A log reduced at the epoch's end diverges only if a rank never makes it: say so as a
        guess.
        """
        at_once = (
            self.name.endswith("training_step")
            if collective.on_step is None
            else collective.on_step
        )
        if collective.pairs_with != LOG or at_once or self.name.endswith("_end"):
            return collective
        return replace(
            collective, guess="a rank does not come to it in all of an epoch"
        )

    def _by_name(self) -> Iterator[Divergence]:
        for call, part in self._flow.named:
            made = self.scope.surroundings.collective(call)
            if made is not None and made.pairs_with == LOG:
                yield Divergence(
                    function=self.name,
                    kind=Kind.NAME,
                    collectives=(made,),
                    cause=ast.unparse(part),
                    line=call.lineno,
                )

    def _compared(
        self,
        way: Way,
        other: Way,
        *,
        nodes: Sequence[Branching],
        by_rank: bool,
        text: str = "",
    ) -> Iterator[Divergence]:
        """What two ways through it differ in. nodes: the tests that make them."""
        if way.raised or other.raised:
            return  # that rank ends, and its launcher ends the others
        missing = _difference(way, other)
        if by_rank:  # one side serves those that wait for it
            served = way.endless ^ other.endless
            missing = [
                each
                for each in missing
                if not each.collective.pairs_with.startswith(_RECEIVED)
                or not any(_inside(each.collective.line, loop) for loop in served)
            ]

        def divergence(
            kind: Kind, events: Iterable[Event], node: Branching
        ) -> Divergence:
            test = _test(node)
            return Divergence(
                function=self.name,
                kind=kind,
                collectives=_of(events),
                cause=text or ast.unparse(test),
                line=test.lineno,
                by_rank=by_rank,
            )

        if not missing and _reordered(way.events, other.events):
            yield replace(divergence(Kind.BRANCH, way.events, nodes[0]), reordered=True)
        for node in nodes:
            inside = [each for each in missing if _inside(each.collective.line, node)]
            missing = [each for each in missing if each not in inside]
            if inside:
                loop = isinstance(node, LOOPS)
                yield divergence(Kind.LOOP if loop else Kind.BRANCH, inside, node)
        exits = {*way.exits} ^ {*other.exits} if missing else ()
        for each in sorted(exits, key=lambda one: ("=" in one.text, one.line)):
            around = next((one for one in nodes if _inside(each.line, one)), None)
            if around is not None:
                left_out = divergence(Kind.EXIT, missing, around)
                yield replace(left_out, exit=each.text, exit_line=each.line)
                return

    def _by_error(self) -> Iterator[Divergence]:
        for node in own_nodes(self.node):
            if not isinstance(node, ast.Try) or _only_collectives(
                node.body, self.scope
            ):
                continue
            for handler in filter(_of_one_rank, node.handlers):
                for early in (False, True):
                    caught = self.follow({}, (node, handler, early))
                    if caught.raised:
                        break
                    missing = _difference(self._usual, caught)
                    if missing:
                        kind = handler.type
                        yield Divergence(
                            function=self.name,
                            kind=Kind.ERROR,
                            collectives=_of(missing),
                            cause=text_of(kind) if kind else "any error",
                            line=handler.lineno,
                        )
                        break


def _only_collectives(body: list[ast.stmt], scope: _Scope) -> bool:
    """Whether nothing is tried but collectives and what torch makes for them: their errors are all
    ranks'.
    """
    calls = [call for statement in body for call in nodes(statement, ast.Call)]
    origins = [scope.surroundings.names.origin(each.func) for each in calls]
    return any(map(scope.agrees, calls)) and all(
        scope.agrees(call) or origin.startswith("torch.") or origin in _HARMLESS
        for call, origin in zip(calls, origins, strict=True)
    )


def _of_one_rank(handler: ast.ExceptHandler) -> bool:
    """Whether it takes errors that come from one rank's batch or memory, not from what all ranks
    share.
    """
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(last_part(dotted(each)) not in _OF_ALL_RANKS for each in types)


_OF_ALL_RANKS = words("""
    AssertionError AttributeError ConnectionError FileNotFoundError ImportError KeyError
    KeyboardInterrupt LookupError ModuleNotFoundError NameError NotImplementedError OSError
    StopIteration SystemExit TimeoutError TypeError UnicodeDecodeError Empty Full
    """)
_HARMLESS = ("float", "getattr", "int", "len")


def _difference(way: Way, other: Way) -> list[Event]:
    """The events that one way has more often than the other, by line.

    A call that both make is the same one; what is left pairs with another call of its kind, or with
    one that cannot be seen here.
    """
    left = [
        event
        for one, another in ((way, other), (other, way))
        if not another.unseen - one.unseen
        for event in _surplus(one.events, another.events)
    ]
    unique = {(each.collective.name, each.collective.line): each for each in left}
    return sorted(unique.values(), key=lambda each: each.collective.line)


def _surplus(events: Sequence[Event], others: Sequence[Event]) -> list[Event]:
    too_many = Counter(each.key for each in events)
    too_many -= Counter(each.key for each in others)
    theirs = set(others)
    last_first = reversed(events)  # the last of several is the one too many
    left = []
    for each in sorted(last_first, key=lambda one: one in theirs):
        if too_many[each.key]:
            too_many[each.key] -= 1
            left.append(each)
    return left


def _reordered(events: Sequence[Event], others: Sequence[Event]) -> bool:
    """Whether two ways make the same collectives in another order, none of them in a branch."""
    own = [each.key for each in events]
    theirs = [each.key for each in others]
    is_open = any(each.guards or each.after for each in events)
    return own != theirs and Counter(own) == Counter(theirs) and not is_open


def _of(events: Iterable[Event]) -> tuple[Collective, ...]:
    return tuple(dict.fromkeys(each.collective for each in events))


def _test(node: Branching) -> ast.expr:
    """What decides a branch, or how often a loop goes round."""
    if isinstance(node, LOOPS):
        return node.iter
    return node.values[0] if isinstance(node, ast.BoolOp) else node.test


def _inside(line: int, node: Branching) -> bool:
    if isinstance(node, ast.comprehension):  # has no lines
        return True
    return node.lineno <= line <= (node.end_lineno or node.lineno)
