"""Where ranks that run one function may make different collectives: by a branch, an early exit, a loop or an error.

Each function is followed twice, with one test decided either way (a test on the rank: as on one rank and on another),
and everything else left open. Where the two ways make the same collectives, in the same order, there is nothing to say.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from nemo_patches.tools.doctor import batch_data
from nemo_patches.tools.doctor.batch_data import Branching, DataFlow
from nemo_patches.tools.doctor.collectives import BACKWARD, ENCODER, LOG, Collective, Names, Surroundings, dotted
from nemo_patches.tools.doctor.finding import Severity
from nemo_patches.tools.doctor.rank_tests import RANKS, RankTests

_MOST_HELPERS = 6  # that call each other
_MOST_OF_ONE_HELPER = 20  # collectives
_NO_BATCH = re.compile(r"\bis (not )?None\b")
# What must hold for ranks to differ in a test that they mostly agree in, by what the test says.
_GUESSES = {
    r"\brandom\.|\brand\(": "the ranks draw other random numbers, as they do without a seed",
    _NO_BATCH.pattern: "the loader gives some ranks None for a batch",
    r"exists\(|is_file\(|isfile\(|is_dir\(|isdir\(|listdir\(": "the ranks' hosts, or moments, see other files",
}
_MOST_NAMED = 2  # collectives of a finding, beside the first
_MOST_TESTS = 200  # of one function

Function = ast.FunctionDef | ast.AsyncFunctionDef
Decisions = Mapping[int, "bool | str"]  # by the id of a node: how its test is decided, or what is left of it


class Kind(Enum):
    """What makes ranks differ."""

    BRANCH = "a test around the collective"
    EXIT = "a return, continue or break before it"
    ERROR = "an error that is caught"
    LOOP = "how often a loop goes round"
    FIRST_RANK = "a function that runs on one rank"


@dataclass(frozen=True)
class Divergence:
    """Collectives that one rank of a function makes and another does not.

    cause: the test, the exception or the decorator, as it is written, and its line. exit_line: of the early exit.
    by_rank: whether the rank decides. reordered: whether both make them, in another order.
    """

    function: str
    kind: Kind
    collectives: tuple[Collective, ...]
    cause: str
    line: int
    by_rank: bool
    exit: str = ""
    exit_line: int = 0
    reordered: bool = False

    @property
    def names(self) -> str:
        """For sentences: the collectives, and what makes the first one, where its name does not say so."""
        first, *others = dict.fromkeys(each.name for each in self.collectives)
        why = self.collectives[0].why
        more = others if len(others) <= _MOST_NAMED else [*others[:_MOST_NAMED], f"{len(others) - _MOST_NAMED} more"]
        if not more:
            return first + (f", {why}," if why else "")
        return ", ".join([first, *more[:-1]]) + f" and {more[-1]}"

    @property
    def are(self) -> str:
        """The verb after `names`."""
        return "is" if len({each.name for each in self.collectives}) == 1 else "are"

    @property
    def guess(self) -> str:
        """What must hold for a guess to be right, at the end of a sentence; empty where it is none."""
        guesses = [each.guess for each in self.collectives]
        expected = self.function.endswith("_step") or self.exit == _End.CONTINUE.value  # that a batch may be None
        if not self.by_rank and not (expected and _NO_BATCH.search(self.cause)):
            guesses = [text for pattern, text in _GUESSES.items() if re.search(pattern, self.cause)] or guesses
        return f". A guess: {guesses[0]}" if all(guesses) else ""

    @property
    def severity(self) -> Severity:
        """Of a finding about it."""
        return Severity.NOTE if self.guess else Severity.WARNING


@dataclass(frozen=True)
class _Event:
    """A collective on the way through a function. guards: the open tests around it; after: those under which it is
    not come to."""

    collective: Collective
    guards: tuple[str, ...]
    after: frozenset[tuple[str, ...]]

    @property
    def key(self) -> tuple[object, ...]:
        return self.collective.pairs_with, self.guards, self.after


class _End(Enum):
    """How a block ends."""

    RETURN = "return"
    BREAK = "break"
    CONTINUE = "continue"
    RAISE = "raise"


@dataclass(frozen=True)
class _Exit:
    """A way out of a function or a turn, or, of a training_step, a loss that is set to None: its text and its line."""

    text: str
    line: int
    guards: tuple[str, ...]


def divergences(tree: ast.Module) -> tuple[Divergence, ...]:
    """Of all functions of a file, and of what the file itself runs."""
    names = Names(tree)
    found: list[Divergence] = []
    module = _Scope(Surroundings(names), {each.name: each for each in tree.body if isinstance(each, Function)})
    found += _Function(module, tree, "the module").divergences()
    for name, node, scope in _functions(tree, "", module):
        found += _Function(scope, node, name).divergences()
    return tuple(found)


def _functions(parent: ast.AST, prefix: str, scope: _Scope) -> Iterator[tuple[str, Function, _Scope]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef):
            own_methods = [each for each in node.body if isinstance(each, Function)]
            methods = {f"{owner}.{each.name}": each for owner in ("self", "cls", node.name) for each in own_methods}
            surroundings = Surroundings(scope.surroundings.names, node)
            inner = _Scope(surroundings, {**scope.helpers, **_inherited(node, scope), **methods})
            yield from _functions(node, f"{prefix}{node.name}.", inner)
        elif isinstance(node, Function):
            own = {each.name: each for each in ast.walk(node) if isinstance(each, Function) and each is not node}
            inner = _Scope(scope.surroundings, {**scope.helpers, **own}) if own else scope
            yield f"{prefix}{node.name}", node, inner
            yield from _functions(node, f"{prefix}{node.name}.", inner)
        elif not isinstance(node, ast.expr):
            yield from _functions(node, prefix, scope)


def _inherited(node: ast.ClassDef, scope: _Scope) -> dict[str, Function]:
    """Methods of its bases in the same file, the nearest first."""
    classes = {each.name: each for each in scope.surroundings.names.tree.body if isinstance(each, ast.ClassDef)}
    found: dict[str, Function] = {}
    waiting, seen = [node], {node.name}
    while waiting:
        for base in map(dotted, waiting.pop(0).bases):
            if base in classes and base not in seen:
                seen.add(base)
                waiting.append(classes[base])
                methods = {f"self.{each.name}": each for each in classes[base].body if isinstance(each, Function)}
                found = {**methods, **found}
    return found


@dataclass
class _Scope:
    """What calls in a function may lead to: helpers of the same file, by the name that they are called by."""

    surroundings: Surroundings
    helpers: Mapping[str, Function]
    _summaries: dict[str, tuple[Collective, ...]] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)

    def made_by(self, call: ast.Call) -> tuple[Collective, ...]:
        """The collectives of a call: its own, or those of a helper in the same file, a few calls deep."""
        own = self.surroundings.collective(call)
        if own is not None:
            return (own,)
        name = dotted(call.func)
        name = "self.forward" if name == "self" else name
        return tuple(
            replace(each, name=f"{dotted(call.func)}()", line=call.lineno, why=each.why or f"which makes {each.name}")
            for each in self._of_helper(name)
        )

    def agrees(self, call: ast.Call) -> bool:
        """Whether a call gives all ranks the same: a collective, or a helper that makes one."""
        return any(each.pairs_with not in (ENCODER, BACKWARD, LOG) for each in self.made_by(call))

    def decides(self, call: ast.Call) -> bool:
        """Whether a call is one of a helper that decides by what it is given."""
        name = dotted(call.func)
        function = self.helpers.get(name)
        if function is None or name in self._open or len(self._open) >= _MOST_HELPERS:
            return False
        self._open.append(name)
        try:
            return _Function(self, function, "").decides
        finally:
            self._open.pop()

    def _of_helper(self, name: str) -> tuple[Collective, ...]:
        function = self.helpers.get(name)
        if function is None or name in self._open or len(self._open) >= _MOST_HELPERS:
            return ()
        if name not in self._summaries:
            self._open.append(name)
            try:
                self._summaries[name] = self._summary(function)
            finally:
                self._open.pop()
        return self._summaries[name]

    def _summary(self, function: Function) -> tuple[Collective, ...]:
        if _first_rank_only(function, self.surroundings) or _is_generator(function):
            return ()
        reading = _Function(self, function, "")
        events = reading.follow(reading.of_rank(RANKS[0])).events if reading.rank_tests else reading.follow({}).events
        return tuple(each.collective for each in events[:_MOST_OF_ONE_HELPER] if not each.collective.guess)


def _first_rank_only(function: ast.AST, surroundings: Surroundings) -> str:
    """What makes Lightning run a function on one rank only; empty if nothing does."""
    if not isinstance(function, Function):
        return ""
    for node in function.decorator_list:
        if surroundings.names.origin(node).rpartition(".")[2] == "rank_zero_only":
            return f"@{ast.unparse(node)}"
    prepares = function.name == "prepare_data" and surroundings.lightning
    return "prepare_data" if prepares else ""


def _is_generator(function: Function) -> bool:
    return any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in ast.walk(function))


@dataclass(frozen=True)
class _Function:
    """One function, or what a module itself runs."""

    scope: _Scope
    node: Function | ast.Module
    name: str

    @cached_property
    def _flow(self) -> DataFlow:
        flow = DataFlow(self.scope.agrees, self.scope.decides, self.scope.surroundings.accumulated)
        flow.walk(self.node)
        return flow

    @property
    def decides(self) -> bool:
        """Whether what it returns is read off its arguments."""
        returned = [
            node.value for node in batch_data.own_nodes(self.node) if isinstance(node, ast.Return) and node.value
        ]
        return bool(self._flow.tests) or any(map(self._flow.is_data, returned))

    @cached_property
    def _ranks(self) -> RankTests:
        return RankTests(self.scope.surroundings.names, batch_data.assignments(self.node))

    @cached_property
    def rank_tests(self) -> list[ast.If | ast.While | ast.IfExp | ast.BoolOp]:
        """Those on the rank."""
        found: list[ast.If | ast.While | ast.IfExp | ast.BoolOp] = []
        for node in batch_data.own_nodes(self.node):
            if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.BoolOp)) and self._ranks.about_rank(_test(node)):
                found.append(node)
        return sorted(found, key=lambda each: (each.lineno, each.col_offset))

    def of_rank(self, rank: int) -> Decisions:
        """How the tests on the rank are decided on one."""
        return {id(node): self._ranks.decided(_test(node), rank) for node in self.rank_tests}

    def follow(self, decisions: Decisions) -> _Way:
        """The collectives on the way through it."""
        way = _Way(self, decisions)
        way.walk()
        return way

    def divergences(self) -> Iterator[Divergence]:
        """Of this function; each collective once."""
        if not self._interesting:
            return
        said: set[tuple[str, int]] = set()
        for each in self._all():
            left = tuple(one for one in each.collectives if (one.name, one.line) not in said)
            said |= {(one.name, one.line) for one in left}
            if left:
                yield replace(each, collectives=left)

    @cached_property
    def _interesting(self) -> bool:
        return bool(self.follow({}).events)

    def _all(self) -> Iterator[Divergence]:
        yield from self._on_first_rank()
        yield from self._by_rank()
        yield from self._by_data()
        yield from self._by_error()

    def _on_first_rank(self) -> Iterator[Divergence]:
        cause = _first_rank_only(self.node, self.scope.surroundings)
        events = self.follow(self.of_rank(0)).events if cause else []
        if events:
            line = self.node.lineno if isinstance(self.node, Function) else 1
            yield Divergence(self.name, Kind.FIRST_RANK, _of(events), cause, line, True)

    def _by_rank(self) -> Iterator[Divergence]:
        if not self.rank_tests or _first_rank_only(self.node, self.scope.surroundings):
            return
        ways = [self.follow(self.of_rank(rank)) for rank in RANKS]
        for other in ways[1:]:
            yield from self._compared(ways[0], other, self.rank_tests, True)
        for text, nodes in _by_text(self._open_rank_tests).items():
            yes, no = (self.follow({id(node): decided for node in nodes}) for decided in (True, False))
            yield from self._compared(yes, no, nodes, True, text)

    @property
    def _open_rank_tests(self) -> list[tuple[ast.expr, Branching]]:
        """Those that a rank's number does not decide, such as rank == source."""
        return [
            (_test(node), node)
            for node in self.rank_tests
            if all(isinstance(self._ranks.decided(_test(node), rank), str) for rank in RANKS)
        ]

    def _by_data(self) -> Iterator[Divergence]:
        tests = [(each.test, each.node) for each in self._flow.tests[:_MOST_TESTS]]
        for text, nodes in _by_text(tests).items():
            yes, no = (self.follow({id(node): decided for node in nodes}) for decided in (True, False))
            for each in self._compared(yes, no, nodes, False, text):
                left = tuple(self._guessed(one) for one in each.collectives if not self._is_open(one, each))
                if left:
                    yield replace(each, collectives=left)

    def _is_open(self, collective: Collective, divergence: Divergence) -> bool:
        """Whether it cannot be told that ranks differ in it: a loop may go round as often as they agreed on before."""
        agreed = any(each.line < divergence.line for each in self._agreements)
        loop = divergence.kind is Kind.LOOP
        return (loop and (agreed or collective.pairs_with == LOG)) or (not loop and bool(collective.guess))

    def _guessed(self, collective: Collective) -> Collective:
        """Of a log at the epoch's end counts only whether a rank has ever made it."""
        at_once = self.name.endswith("training_step") if collective.on_step is None else collective.on_step
        if collective.pairs_with != LOG or at_once or self.name.endswith("_end"):
            return collective
        return replace(collective, guess="a rank does not come to it in all of an epoch")

    @cached_property
    def _agreements(self) -> list[Collective]:
        made = _of(self.follow({}).events)
        return [each for each in made if each.pairs_with not in (ENCODER, BACKWARD, LOG)]

    def _logs_later(self, collective: Collective) -> bool:
        """Whether it reduces at the epoch's end, where it counts only whether a rank has ever logged it."""
        at_once = self.name.endswith("training_step") if collective.on_step is None else collective.on_step
        return collective.pairs_with == LOG and not at_once and not self.name.endswith("_end")

    def _compared(
        self, way: _Way, other: _Way, nodes: Sequence[Branching], by_rank: bool, text: str = ""
    ) -> Iterator[Divergence]:
        """What two ways through it differ in. nodes: the tests that make them."""
        if way.raised or other.raised:
            return  # that rank ends, and its launcher ends the others
        missing = _difference(way.events, other.events)

        def divergence(kind: Kind, events: Iterable[_Event], node: Branching) -> Divergence:
            test = _test(node)
            return Divergence(self.name, kind, _of(events), text or ast.unparse(test), test.lineno, by_rank)

        if not missing and _reordered(way.events, other.events):
            yield replace(divergence(Kind.BRANCH, way.events, nodes[0]), reordered=True)
        for node in nodes:
            inside = [each for each in missing if _inside(each.collective.line, node)]
            missing = [each for each in missing if each not in inside]
            if inside:
                loop = isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension))
                yield divergence(Kind.LOOP if loop else Kind.BRANCH, inside, node)
        for each in sorted({*way.exits} ^ {*other.exits}, key=lambda one: one.line):
            around = next((one for one in nodes if _inside(each.line, one)), None)
            if missing and around is not None:
                yield replace(divergence(Kind.EXIT, missing, around), exit=each.text, exit_line=each.line)
                return

    def _by_error(self) -> Iterator[Divergence]:
        for node in batch_data.own_nodes(self.node):
            if not isinstance(node, ast.Try) or _only_collectives(node.body, self.scope):
                continue
            for handler in node.handlers:
                if not _of_one_rank(handler):
                    continue
                usual = self.follow({})
                for early in (False, True):
                    caught = _Way(self, {}, caught=(node, handler, early))
                    caught.walk()
                    if caught.raised:
                        break
                    missing = _difference(usual.events, caught.events)
                    if missing:
                        cause = ast.unparse(handler.type) if handler.type else "any error"
                        yield Divergence(self.name, Kind.ERROR, _of(missing), cause, handler.lineno, False)
                        break


@dataclass
class _Way:
    """One way through a function, with some tests decided. caught: an error that a handler takes, and whether it comes
    before the collectives of the block that it is raised in."""

    function: _Function
    decisions: Decisions
    caught: tuple[ast.Try, ast.ExceptHandler, bool] | None = None
    events: list[_Event] = field(default_factory=list)
    exits: list[_Exit] = field(default_factory=list)
    raised: bool = False
    _left: list[tuple[str, ...]] = field(default_factory=list)  # the tests under which it has been left before
    _left_turn: list[tuple[str, ...]] = field(default_factory=list)  # the same of a loop's turn
    _left_loop: list[tuple[str, ...]] = field(default_factory=list)
    _unsynced: int = 0
    _nothing: set[str] = field(default_factory=set)
    _failing: int = 0
    _tried: int = 0

    def walk(self) -> None:
        """Follow it to its end."""
        self._block(self.function.node.body, ())

    # --- statements

    def _block(self, body: Iterable[ast.stmt], guards: tuple[str, ...]) -> _End | None:
        for statement in body:
            end = self._statement(statement, guards)
            if end is not None:
                return end
        return None

    def _statement(self, node: ast.stmt, guards: tuple[str, ...]) -> _End | None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return None
        if isinstance(node, ast.If):
            self._expression(node.test, guards)
            return self._either(node, node.test, node.body, node.orelse, guards)
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self._expression(node.iter, guards)
            return self._loop(f"for {ast.unparse(node.iter)}", node, guards)
        if isinstance(node, ast.While):
            self._expression(node.test, guards)
            return self._loop(f"while {ast.unparse(node.test)}", node, guards)
        if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            return self._try(node, guards)  # type: ignore[arg-type]
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._expression(item.context_expr, guards)
            unsynced = any(_calls(item.context_expr, "no_sync") for item in node.items)
            self._unsynced += unsynced
            end = self._block(node.body, guards)
            self._unsynced -= unsynced
            return end
        if isinstance(node, ast.Match):
            self._expression(node.subject, guards)
            ends = [self._branch(case.body, (*guards, ast.unparse(case.pattern))) for case in node.cases]
            return ends[-1] if ends and all(ends) and ends[-1] is not None else None
        if isinstance(node, ast.Return):
            return self._return(node, node.value, guards)
        if isinstance(node, (ast.Break, ast.Continue)):
            end = _End.BREAK if isinstance(node, ast.Break) else _End.CONTINUE
            self.exits.append(_Exit(end.value, node.lineno, guards))
            return end
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and _ends_process(node.value)):
            return _End.RAISE
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, guards)
        if isinstance(node, ast.Assign):
            self._set(node, guards)
        return None

    def _set(self, node: ast.Assign, guards: tuple[str, ...]) -> None:
        """Keep in mind which names hold nothing that a backward pass could begin at."""
        for target in map(dotted, node.targets):
            if self._without_gradient(node.value) and not guards:
                self._nothing.add(target)
                self.exits.append(_Exit(ast.unparse(node), node.lineno, guards))
            else:
                self._nothing.discard(target)

    def _either(
        self, node: ast.AST, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt], guards: tuple[str, ...]
    ) -> _End | None:
        decided = self._decided(node, test, guards)
        if isinstance(decided, bool):
            return self._taken(body if decided else orelse, guards)
        yes = self._branch(body, (*guards, decided))
        no = self._branch(orelse, (*guards, f"not ({decided})"))
        if yes is None or no is None:
            return None
        return yes if no is _End.RAISE else no

    def _decided(self, node: ast.AST, test: ast.expr, guards: tuple[str, ...]) -> bool | str:
        """Whether a test holds, or its text where it is open: one that is asked again within its branch is not."""
        decided = self.decisions.get(id(node), ast.unparse(test))
        if isinstance(decided, str) and (decided in guards or f"not ({decided})" in guards):
            return decided in guards
        return decided

    def _taken(self, body: list[ast.stmt], guards: tuple[str, ...]) -> _End | None:
        """The block that is taken on this way: where it raises, whatever else holds, the rank ends."""
        before = len(self._left) + len(self._left_turn) + len(self._left_loop)
        end = self._block(body, guards)
        left = len(self._left) + len(self._left_turn) + len(self._left_loop) > before
        in_loops_only = all(guard.startswith(_LOOPS) for guard in guards)
        self.raised = self.raised or (end is _End.RAISE and in_loops_only and not left and not self._tried)
        return end

    def _branch(self, body: list[ast.stmt], guards: tuple[str, ...]) -> _End | None:
        """A block that may not be run: where it ends the function or the turn, what follows is come to without it."""
        end = self._block(body, guards)
        if end is _End.RETURN:
            self._left.append(guards)
        elif end is _End.CONTINUE:
            self._left_turn.append(guards)
        elif end is _End.BREAK:
            self._left_loop.append(guards)
        return end

    def _loop(self, text: str, loop: ast.For | ast.AsyncFor | ast.While, guards: tuple[str, ...]) -> _End | None:
        if self.decisions.get(id(loop)) is False:
            return self._block(loop.orelse, guards)
        first, left = len(self.events), len(self._left)
        outer = self._left_turn, self._left_loop
        self._left_turn, self._left_loop = [], []
        end = self._block(loop.body, (*guards, text))
        ways_out = [*self._left_loop, *self._left[left:]]
        if end in (_End.BREAK, _End.RETURN):
            ways_out.append(("once",))
        for index in range(first, len(self.events)):  # the next turn is not come to, either
            event = self.events[index]
            self.events[index] = replace(event, after=event.after | frozenset(ways_out))
        self._left_turn, self._left_loop = outer
        if end is _End.RETURN:
            self._left.append((*guards, text))
        return self._block(loop.orelse, guards)

    def _try(self, node: ast.Try, guards: tuple[str, ...]) -> _End | None:
        if self.caught is not None and self.caught[0] is node:
            end = self._error(node, *self.caught[1:], guards)
        else:
            self._tried += bool(node.handlers)
            end = self._block(node.body, guards)
            self._tried -= bool(node.handlers)
            if end is None:
                end = self._block(node.orelse, guards)
            elif end is _End.RAISE and node.handlers:  # it may be caught
                end = None
        last = self._block(node.finalbody, guards)
        return last if last is not None else end

    def _error(self, node: ast.Try, handler: ast.ExceptHandler, early: bool, guards: tuple[str, ...]) -> _End | None:
        """The handler, after all collectives of the block, or only those of its first call."""
        first, exits = len(self.events), len(self.exits)
        ways_out = [list(each) for each in (self._left, self._left_turn, self._left_loop)]
        self._failing, self._tried = self._failing + 1, self._tried + 1
        self._block(node.body, guards)
        self._failing, self._tried = self._failing - 1, self._tried - 1
        self._left, self._left_turn, self._left_loop = ways_out
        del self.exits[exits:]
        if early:
            last = _first_call(node.body)
            self.events[first:] = [each for each in self.events[first:] if each.collective.line <= last]
        return self._taken(handler.body, guards)

    def _return(self, node: ast.Return, value: ast.expr | None, guards: tuple[str, ...]) -> _End:
        if isinstance(value, ast.IfExp) and self._runs_backward:
            self._expression(value.test, guards)
            decided = self._decided(value, value.test, guards)
            if isinstance(decided, bool):
                return self._return(node, value.body if decided else value.orelse, guards)
            self._return(node, value.body, (*guards, decided))
            return self._return(node, value.orelse, (*guards, f"not ({decided})"))
        if value is not None:
            self._expression(value, guards)
        nothing = value is None or self._without_gradient(value)
        if nothing and self._runs_backward and self._ends_in_backward(value):
            return _End.RAISE
        if self._runs_backward and not nothing and not self._failing:
            why = "in which the gradients are reduced"
            self._add(Collective("the backward pass", BACKWARD, node.lineno, why), guards)
        self.exits.append(_Exit(_End.RETURN.value, node.lineno, guards))
        return _End.RETURN

    def _without_gradient(self, value: ast.expr) -> bool:
        """Whether what a step returns leads to no gradient of any parameter: None, or a tensor made of a number."""
        if isinstance(value, ast.Dict):
            return all(self._without_gradient(each) for each in value.values)
        if isinstance(value, ast.Call):
            made = self.function.scope.surroundings.names.origin(value.func) in _NEW_TENSORS
            return made and all(isinstance(each, (ast.Constant, ast.List)) for each in value.args)
        return isinstance(value, ast.Constant) or dotted(value) in self._nothing

    def _ends_in_backward(self, value: ast.expr | None) -> bool:
        """Whether backward raises at once on what a step returns: a new tensor that requires no gradient."""
        made = [each for each in ast.walk(value) if isinstance(each, ast.Call)] if value is not None else []
        return bool(made) and not any(keyword.arg == "requires_grad" for each in made for keyword in each.keywords)

    @property
    def _runs_backward(self) -> bool:
        """Whether Lightning runs a backward pass on what the function returns."""
        surroundings = self.function.scope.surroundings
        step = self.function.name.rpartition(".")[2] == "training_step"
        return step and surroundings.node is not None and not surroundings.manual

    # --- expressions

    def _expression(self, node: ast.AST, guards: tuple[str, ...]) -> None:
        """Its calls, in the order in which they are made."""
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.IfExp):
            self._expression(node.test, guards)
            decided = self._decided(node, node.test, guards)
            if decided is not False:
                self._expression(node.body, guards if decided is True else (*guards, str(decided)))
            if decided is not True:
                self._expression(node.orelse, guards if decided is False else (*guards, f"not ({decided})"))
            return
        if isinstance(node, ast.BoolOp):
            self._expression(node.values[0], guards)
            decided = self._decided(node, node.values[0], guards)
            goes_on = isinstance(node.op, ast.And)
            if isinstance(decided, str) or decided is goes_on:
                for each in node.values[1:]:
                    self._expression(each, (*guards, decided) if isinstance(decided, str) else guards)
            return
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            inner = guards
            for generator in node.generators:
                self._expression(generator.iter, guards)
                if self.decisions.get(id(generator)) is False:
                    return
                inner = (*inner, f"for {ast.unparse(generator.iter)}")
            values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            for value in values:
                self._expression(value, inner)
            return
        for child in ast.iter_child_nodes(node):
            self._expression(child, guards)
        if isinstance(node, ast.Call):
            for made in self.function.scope.made_by(node):
                if made.pairs_with != BACKWARD or not self._unsynced:
                    self._add(made, guards)
        elif isinstance(node, ast.Attribute):
            read = self.function.scope.surroundings.property_read(node)
            if read is not None:
                self._add(read, guards)

    def _add(self, collective: Collective, guards: tuple[str, ...]) -> None:
        after = frozenset([*self._left, *self._left_turn, *self._left_loop])
        self.events.append(_Event(collective, guards, after))


def _first_call(body: list[ast.stmt]) -> int:
    """The last line of the first statement that calls something: what comes after it may not have been come to."""
    for statement in body:
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            return _first_call(statement.body)
        if any(isinstance(each, ast.Call) for each in ast.walk(statement)):
            return statement.end_lineno or statement.lineno
    return 0


def _only_collectives(body: list[ast.stmt], scope: _Scope) -> bool:
    """Whether nothing is tried but collectives and what torch makes for them: their errors are all ranks'."""
    calls = [each for statement in body for each in ast.walk(statement) if isinstance(each, ast.Call)]
    origins = [scope.surroundings.names.origin(each.func) for each in calls]
    return any(map(scope.agrees, calls)) and all(
        scope.agrees(call) or origin.startswith("torch.") or origin in _HARMLESS
        for call, origin in zip(calls, origins, strict=True)
    )


def _of_one_rank(handler: ast.ExceptHandler) -> bool:
    """Whether it takes errors that come from one rank's batch or memory, not from what all ranks share."""
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(dotted(each).rpartition(".")[2] not in _OF_ALL_RANKS for each in types)


_OF_ALL_RANKS = frozenset(
    [
        *("AssertionError", "AttributeError", "ConnectionError", "FileNotFoundError", "ImportError", "KeyError"),
        *("KeyboardInterrupt", "LookupError", "ModuleNotFoundError", "NameError", "NotImplementedError", "OSError"),
        *("StopIteration", "SystemExit", "TimeoutError", "TypeError", "UnicodeDecodeError", "Empty", "Full"),
    ]
)
_NEW_TENSORS = ("torch.tensor", "torch.zeros", "torch.as_tensor")
_LOOPS = ("for ", "while ")  # how their guards begin
_HARMLESS = ("float", "getattr", "int", "len")
_PROCESS_ENDS = ("sys.exit", "exit", "quit", "os._exit", "os.abort")


def _ends_process(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) in _PROCESS_ENDS


def _calls(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Call) and dotted(each.func).endswith(name) for each in ast.walk(node))


def _difference(events: Sequence[_Event], others: Sequence[_Event]) -> list[_Event]:
    """Those that one way has more often than the other, by their line."""
    left = []
    for one, two in ((events, others), (others, events)):
        too_many = Counter(each.key for each in one) - Counter(each.key for each in two)
        for each in reversed(one):  # the last of several is the one too many
            if too_many[each.key]:
                too_many[each.key] -= 1
                left.append(each)
    unique = {(each.collective.name, each.collective.line): each for each in left}
    return sorted(unique.values(), key=lambda each: each.collective.line)


def _reordered(events: Sequence[_Event], others: Sequence[_Event]) -> bool:
    """Whether two ways make the same collectives in another order, none of them in a branch."""
    keys = [[each.key for each in one] for one in (events, others)]
    return keys[0] != keys[1] and not any(each.guards or each.after for each in events)


def _of(events: Iterable[_Event]) -> tuple[Collective, ...]:
    return tuple(dict.fromkeys(each.collective for each in events))


def _by_text(tests: Iterable[tuple[ast.expr, Branching]]) -> dict[str, list[Branching]]:
    """The same test in several places is decided the same way."""
    found: dict[str, list[Branching]] = {}
    for test, node in tests:
        found.setdefault(ast.unparse(test), []).append(node)
    return found


def _test(node: Branching) -> ast.expr:
    """What decides a branch, or how often a loop goes round."""
    if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        return node.iter
    return node.values[0] if isinstance(node, ast.BoolOp) else node.test


def _inside(line: int, node: Branching) -> bool:
    if isinstance(node, ast.comprehension):  # has no lines
        return True
    return node.lineno <= line <= (node.end_lineno or node.lineno)
