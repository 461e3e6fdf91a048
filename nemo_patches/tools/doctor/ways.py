"""One way through a function:
the collectives that a rank makes on it, with some of its tests decided.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from nemo_patches.tools.doctor.collectives import (
    BACKWARD,
    FORWARD,
    UNUSED,
    Collective,
    Surroundings,
)
from nemo_patches.tools.doctor.syntax import (
    COMPREHENSIONS,
    DEFINITIONS,
    constant,
    dotted,
    expressions,
    last_part,
    nodes,
    text_of,
)

# By the id of a node: how its test is decided, or what is left of it.
Decisions = Mapping[int, "bool | str"]

_NEW_TENSORS = ("torch.tensor", "torch.zeros", "torch.as_tensor")
_LOOPS = ("for ", "while ")  # how their guards begin
_PROCESS_ENDS = ("sys.exit", "exit", "quit", "os._exit", "os.abort")
# A method in which all ranks take part, or the others of a rank; not torch's own.
_SOUNDS_COLLECTIVE = re.compile(
    r"^(?!torch\.|.*\bdist\.|.*distributed\.).*"
    r"\.\w*((all|other)_ranks|all_?gather|all_?reduce|barrier|receive|recv"
    r"|broadcast(?!_to|_tensors))[^.]*$"
)

Guards = tuple[str, ...]  # the texts of the open tests around something


@dataclass(frozen=True)
class Event:
    """A collective on the way through a function. guards: the open tests around it; after: those
    under which it is not come to."""

    collective: Collective
    guards: Guards
    after: frozenset[Guards] = frozenset()

    @property
    def key(self) -> tuple[object, ...]:
        return self.collective.pairs_with, self.guards, self.after

    def behind(self, left: Iterable[Guards]) -> Event:
        """Behind these ways out, but those of a test that is decided the other way here."""
        opposite = set(map(_opposite, self.guards))
        others = (guards for guards in left if opposite.isdisjoint(guards))
        return replace(self, after=self.after.union(others))

    def without_backward(self) -> Event:
        if self.collective.pairs_with != FORWARD:
            return self
        why = "whose result is not used, so that no gradients are reduced"
        return replace(
            self,
            collective=replace(self.collective, pairs_with=UNUSED, why=why, guess=""),
        )


class End(Enum):
    RETURN = "return"
    BREAK = "break"
    CONTINUE = "continue"
    RAISE = "raise"


@dataclass(frozen=True)
class Exit:
    """A way out of a function or a turn, or, of a training_step, a loss that is set to None: its
    text and its line.
    """

    text: str
    line: int
    guards: Guards


@dataclass
class Way:
    """One way through a function, with some tests decided. caught: an error that a handler takes,
    and whether it comes before the collectives of the block that it is raised in."""

    node: ast.FunctionDef | ast.Module
    name: str
    surroundings: Surroundings
    made_by: Callable[[ast.Call], tuple[Collective, ...]]
    decisions: Decisions
    caught: tuple[ast.Try, ast.ExceptHandler, bool] | None = None
    events: list[Event] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    raised: bool = False
    # Loops without an end, and calls that are collectives by their names.
    endless: set[ast.While] = field(default_factory=set)
    unseen: set[str] = field(default_factory=set)
    _guards: Guards = ()
    _left: dict[End, tuple[Guards, ...]] = field(
        default_factory=lambda: dict.fromkeys(End, ())
    )  # under which, before
    _unsynced: bool = False  # whether a block of no_sync is around it
    _fails: bool = False  # whether a block around it raises
    _caught_as: str = ""  # the name of the error in its handler
    _nothing: set[str] = field(default_factory=set)  # names without a gradient
    _alone: set[str] = field(default_factory=set)  # trainers of one device

    def walk(self) -> None:
        self._block(self.node.body)

    # --- statements

    def _block(self, body: Iterable[ast.stmt]) -> End | None:
        for statement in body:
            end = self._statement(statement)
            if end is not None:
                return end
        return None

    def _statement(self, node: ast.stmt) -> End | None:
        if isinstance(node, DEFINITIONS):
            return None
        if isinstance(node, ast.If):
            return self._if(node)
        if isinstance(node, ast.For):
            self._expression(node.iter)
            return self._loop(f"for {text_of(node.iter)}", node)
        if isinstance(node, ast.While):
            self._expression(node.test)
            if isinstance(node.test, ast.Constant):
                self.endless.add(node)
            return self._loop(f"while {text_of(node.test)}", node)
        if isinstance(node, ast.Try):
            return self._try(node)
        if isinstance(node, ast.With):
            for item in node.items:
                self._expression(item.context_expr)
            outer = self._unsynced
            self._unsynced = outer or any(
                dotted(call.func).endswith("no_sync")
                for item in node.items
                for call in nodes(item.context_expr, ast.Call)
            )
            end = self._block(node.body)
            self._unsynced = outer
            return end
        if isinstance(node, ast.Return):
            return self._return(node)
        if isinstance(node, (ast.Break, ast.Continue)):
            end = End.BREAK if isinstance(node, ast.Break) else End.CONTINUE
            self.exits.append(Exit(end.value, node.lineno, self._guards))
            return end
        exits = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and dotted(node.value.func) in _PROCESS_ENDS
        )
        if exits or isinstance(node, ast.Raise):
            return End.RAISE
        first = len(self.events)
        for child in expressions(node):
            self._expression(child)
        if self._thrown_away(node):
            self.events[first:] = [
                each.without_backward() for each in self.events[first:]
            ]
        if isinstance(node, ast.Assign):
            self._set(node)
        return None

    def _thrown_away(self, node: ast.stmt) -> bool:
        """Whether nothing uses the value of a statement, so that no backward pass begins at it."""
        if isinstance(node, ast.Assign):
            return all(
                isinstance(each, ast.Name) and each.id not in self._read
                for each in node.targets
            )
        inner = node.value if isinstance(node, ast.Expr) else None
        while isinstance(inner, (ast.Attribute, ast.BinOp, ast.Subscript)):
            inner = inner.left if isinstance(inner, ast.BinOp) else inner.value
        if not isinstance(inner, ast.Call):
            return False
        made = self.surroundings.collective(inner)
        return made is not None and made.pairs_with == FORWARD

    @cached_property
    def _read(self) -> set[str]:
        return {
            each.id
            for each in nodes(self.node, ast.Name)
            if isinstance(each.ctx, ast.Load)
        }

    def _set(self, node: ast.Assign) -> None:
        """Keep in mind which names are of a trainer for one device, and which of a training_step
        hold nothing that a backward pass could begin at.
        """
        names = set(map(dotted, node.targets))
        self._alone -= names
        if _for_one_device(node.value):
            self._alone |= names
        self._nothing -= names
        nothing = constant(node.value) is None and self._without_gradient(node.value)
        always = all(guard.startswith(_LOOPS) for guard in self._guards)
        if nothing and always and self._runs_backward:
            self._nothing |= names
            self.exits.append(Exit(text_of(node), node.lineno, self._guards))

    def _if(self, node: ast.If) -> End | None:
        self._expression(node.test)
        decided = self._decided(node, node.test)
        if isinstance(decided, bool):
            return self._taken(node.body if decided else node.orelse)
        yes = self._branch(node.body, decided)
        no = self._branch(node.orelse, _opposite(decided))
        if yes is None or no is None:
            return None
        return yes if no is End.RAISE else no

    def _decided(self, node: ast.AST, test: ast.expr) -> bool | str:
        """Whether a test holds, or its text where it is open.

        One that is asked again in its branch is not open, nor what a handler asks of its error, the
        one looked for.
        """
        names = (each.id for each in nodes(test, ast.Name))
        if self._caught_as and self._caught_as in names:
            negated = isinstance(test, ast.UnaryOp) or (
                isinstance(test, ast.Compare)
                and isinstance(test.ops[0], (ast.NotIn, ast.NotEq))
            )
            return not negated
        decided = self.decisions.get(id(node), text_of(test))
        if decided == text_of(test) and isinstance(test, ast.UnaryOp):
            decided = _opposite(text_of(test.operand))
        if isinstance(decided, str) and self._guards:
            if decided in self._guards:
                return True
            if _opposite(decided) in self._guards:
                return False
        return decided

    def _taken(self, body: list[ast.stmt]) -> End | None:
        """Follow the block that this way takes: if it always raises, the rank ends."""
        before = self._left
        end = self._block(body)
        self.raised = self.raised or (end is End.RAISE and self._left == before)
        return end

    def _branch(self, body: list[ast.stmt], guard: str) -> End | None:
        """A block that may not be run: where it ends the function or the turn, what follows is come
        to without it.
        """
        with self._under(guard):
            end = self._block(body)
            if end is not None and end is not End.RAISE:
                self._leave(end)
        return end

    def _leave(self, end: End) -> None:
        self._left = {**self._left, end: (*self._left[end], self._guards)}

    @contextmanager
    def _under(self, *guards: str) -> Iterator[None]:
        """Within it these tests hold."""
        outer = self._guards
        self._guards = (*outer, *guards)
        yield
        self._guards = outer

    def _loop(self, text: str, loop: ast.For | ast.While) -> End | None:
        if self.decisions.get(id(loop)) is False:
            return self._block(loop.orelse)
        first = len(self.events)
        outer = self._left
        self._left = {**outer, End.CONTINUE: (), End.BREAK: ()}
        with self._under(text):
            end = self._block(loop.body)
        returned = self._left[End.RETURN]
        ways_out = {*self._left[End.BREAK], *returned[len(outer[End.RETURN]) :]}
        if end in (End.BREAK, End.RETURN):
            ways_out.add(("once",))
        # The next turn is not come to, either.
        self.events[first:] = [each.behind(ways_out) for each in self.events[first:]]
        self._left = {**outer, End.RETURN: returned}
        if end is End.RETURN:
            with self._under(text):
                self._leave(end)
        return self._block(loop.orelse)

    def _try(self, node: ast.Try) -> End | None:
        if self.caught is not None and self.caught[0] is node:
            end = self._error(node, *self.caught[1:])
        else:
            end = self._block(node.body)
            if end is None:
                end = self._block(node.orelse)
            elif end is End.RAISE and node.handlers:  # it may be caught
                end = None
        last = self._block(node.finalbody)
        return last if last is not None else end

    def _error(
        self, node: ast.Try, handler: ast.ExceptHandler, early: bool
    ) -> End | None:
        """Follow the handler, after all collectives of the block or only those of its first
        call.
        """
        tried = replace(
            self, events=[], exits=[], _nothing=set(self._nothing), _fails=True
        )
        tried._block(node.body)
        self.raised = tried.raised
        last = _first_call(node.body)
        self.events += [
            each for each in tried.events if not early or each.collective.line <= last
        ]
        outer = self._caught_as
        self._caught_as = handler.name or ""
        end = self._taken(handler.body)
        self._caught_as = outer
        return end

    def _return(self, node: ast.Return) -> End:
        value = node.value
        if value is not None:
            self._expression(value)
        nothing = value is None or self._without_gradient(value)
        if nothing and self._runs_backward and self._ends_in_backward(value):
            return End.RAISE
        if self._runs_backward and not nothing and not self._fails:
            why = "in which the gradients are reduced"
            self._add(Collective("the backward pass", BACKWARD, node.lineno, why))
        self.exits.append(Exit(End.RETURN.value, node.lineno, self._guards))
        return End.RETURN

    def _without_gradient(self, value: ast.expr) -> bool:
        """Whether what a step returns leads to no gradient of any parameter: None, or a tensor made
        of a number.
        """
        if isinstance(value, ast.Dict):
            return all(self._without_gradient(each) for each in value.values)
        if isinstance(value, ast.Call):
            made = self.surroundings.names.origin(value.func) in _NEW_TENSORS
            return made and all(
                isinstance(each, (ast.Constant, ast.List)) for each in value.args
            )
        return isinstance(value, ast.Constant) or dotted(value) in self._nothing

    def _ends_in_backward(self, value: ast.expr | None) -> bool:
        """Whether backward raises at once on what a step returns: a new tensor that requires no
        gradient.
        """
        made = list(nodes(value, ast.Call)) if value is not None else []
        return bool(made) and not any(
            keyword.arg == "requires_grad" for each in made for keyword in each.keywords
        )

    @property
    def _runs_backward(self) -> bool:
        """Whether Lightning runs a backward pass on what the function returns."""
        surroundings = self.surroundings
        step = last_part(self.name) == "training_step"
        return step and surroundings.node is not None and not surroundings.manual

    # --- expressions

    def _expression(self, node: ast.AST) -> None:
        """Add its calls, in the order in which they are made."""
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            if isinstance(node, ast.IfExp):
                first = node.test
                branches = {True: [node.body], False: [node.orelse]}
            else:
                first, *others = node.values
                branches = {isinstance(node.op, ast.And): others}
            self._expression(first)
            decided = self._decided(node, first)
            for holds, parts in branches.items():
                guards: Guards = ()
                if isinstance(decided, str):
                    guards = (decided if holds else _opposite(decided),)
                with self._under(*guards):
                    for each in parts if decided is holds or guards else ():
                        self._expression(each)
            return
        if isinstance(node, COMPREHENSIONS):
            for generator in node.generators:
                self._expression(generator.iter)
                if self.decisions.get(id(generator)) is False:
                    return
            guards = tuple(f"for {text_of(each.iter)}" for each in node.generators)
            with self._under(*guards):
                for value in expressions(node):
                    self._expression(value)
            return
        for child in ast.iter_child_nodes(node):
            self._expression(child)
        if isinstance(node, ast.Call):
            alone = dotted(node.func).rpartition(".")[0] in self._alone
            collectives = () if alone else self.made_by(node)
            if not collectives and self._sounds_collective(node):
                self.unseen.add(dotted(node.func))
            for made in collectives:
                if made.pairs_with != BACKWARD or not self._unsynced:
                    self._add(made)
        elif isinstance(node, ast.Attribute):
            read = self.surroundings.property_read(node)
            if read is not None:
                self._add(read)

    def _sounds_collective(self, call: ast.Call) -> bool:
        """Whether a method of another file may make collectives, by its name."""
        names = self.surroundings.names
        origin = names.origin(call.func)
        defined = last_part(origin) in names.defined
        return not defined and bool(_SOUNDS_COLLECTIVE.search(origin))

    def _add(self, collective: Collective) -> None:
        left = (guards for each in self._left.values() for guards in each)
        self.events.append(Event(collective, self._guards).behind(left))


def _opposite(test: str) -> str:
    return test[5:-1] if test.startswith("not (") else f"not ({test})"


def _for_one_device(value: ast.expr) -> bool:
    """`Trainer(devices=1)`"""
    given = value.keywords if isinstance(value, ast.Call) else ()
    numbers = {each.arg: constant(each.value) for each in given}
    return numbers.get("devices") == 1 and numbers.get("num_nodes", 1) == 1


def _first_call(body: list[ast.stmt]) -> int:
    """The last line of the first statement that calls something: what comes after it may not have
    been come to.
    """
    for statement in body:
        if isinstance(statement, ast.With):
            return _first_call(statement.body)
        if any(nodes(statement, ast.Call)):
            return statement.end_lineno or statement.lineno
    return 0
