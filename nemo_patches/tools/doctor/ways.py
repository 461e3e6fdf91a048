"""One way through a function: the collectives that a rank makes on it, with some of its tests decided."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from nemo_patches.tools.doctor.collectives import BACKWARD, Collective, Surroundings
from nemo_patches.tools.doctor.syntax import COMPREHENSIONS, DEFINITIONS, Function, dotted, last_part, nodes, text_of

Decisions = Mapping[int, "bool | str"]  # by the id of a node: how its test is decided, or what is left of it

_NEW_TENSORS = ("torch.tensor", "torch.zeros", "torch.as_tensor")
_LOOPS = ("for ", "while ")  # how their guards begin
_PROCESS_ENDS = ("sys.exit", "exit", "quit", "os._exit", "os.abort")


Guards = tuple[str, ...]  # the texts of the open tests around something


@dataclass(frozen=True)
class Event:
    """A collective on the way through a function. guards: the open tests around it; after: those under which it is
    not come to."""

    collective: Collective
    guards: Guards
    after: frozenset[Guards]

    @property
    def key(self) -> tuple[object, ...]:
        return self.collective.pairs_with, self.guards, self.after


class End(Enum):
    RETURN = "return"
    BREAK = "break"
    CONTINUE = "continue"
    RAISE = "raise"


@dataclass(frozen=True)
class Exit:
    """A way out of a function or a turn, or, of a training_step, a loss that is set to None: its text and its line."""

    text: str
    line: int
    guards: Guards


@dataclass
class Way:
    """One way through a function, with some tests decided. caught: an error that a handler takes, and whether it comes
    before the collectives of the block that it is raised in."""

    node: Function | ast.Module
    name: str
    surroundings: Surroundings
    made_by: Callable[[ast.Call], tuple[Collective, ...]]
    decisions: Decisions
    silent: set[int]  # expressions, by id, in which an open way has found no collective
    caught: tuple[ast.Try, ast.ExceptHandler, bool] | None = None
    events: list[Event] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    raised: bool = False
    _left: dict[End, tuple[Guards, ...]] = field(default_factory=lambda: dict.fromkeys(End, ()))  # under which, before
    _unsynced: int = 0  # blocks of no_sync around it
    _failing: int = 0  # blocks that raise around it
    _caught_as: str = ""  # the name of the error in its handler
    _nothing: set[str] = field(default_factory=set)  # names without a gradient

    def walk(self) -> None:
        self._block(self.node.body, ())

    # --- statements

    def _block(self, body: Iterable[ast.stmt], guards: Guards) -> End | None:
        for statement in body:
            end = self._statement(statement, guards)
            if end is not None:
                return end
        return None

    def _statement(self, node: ast.stmt, guards: Guards) -> End | None:
        if isinstance(node, DEFINITIONS):
            return None
        if isinstance(node, ast.If):
            self._expression(node.test, guards)
            return self._either(node, node.test, node.body, node.orelse, guards)
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self._expression(node.iter, guards)
            return self._loop(f"for {text_of(node.iter)}", node, guards)
        if isinstance(node, ast.While):
            self._expression(node.test, guards)
            return self._loop(f"while {text_of(node.test)}", node, guards)
        if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            return self._try(node, guards)  # type: ignore[arg-type]
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._expression(item.context_expr, guards)
            suppressed = suppressing(node)
            if suppressed is not None:
                return self._try(suppressed, guards)
            unsynced = any(_calls(item.context_expr, "no_sync") for item in node.items)
            self._unsynced += unsynced
            end = self._block(node.body, guards)
            self._unsynced -= unsynced
            return end
        if isinstance(node, ast.Match):
            self._expression(node.subject, guards)
            ends = [self._branch(case.body, (*guards, text_of(case.pattern))) for case in node.cases]
            return ends[-1] if ends and all(ends) and ends[-1] is not None else None
        if isinstance(node, ast.Return):
            return self._return(node, node.value, guards)
        if isinstance(node, (ast.Break, ast.Continue)):
            end = End.BREAK if isinstance(node, ast.Break) else End.CONTINUE
            self.exits.append(Exit(end.value, node.lineno, guards))
            return end
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and _ends_process(node.value)):
            return End.RAISE
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, guards)
        if isinstance(node, ast.Assign):
            self._set(node, guards)
        return None

    def _set(self, node: ast.Assign, guards: Guards) -> None:
        """Keep in mind which names of a training_step hold nothing that a backward pass could begin at."""
        number = isinstance(node.value, ast.Constant) and node.value.value is not None
        nothing = not number and self._without_gradient(node.value)
        if self._runs_backward and nothing and all(guard.startswith(_LOOPS) for guard in guards):
            self._nothing |= set(map(dotted, node.targets))
            self.exits.append(Exit(text_of(node), node.lineno, guards))
        else:
            self._nothing -= set(map(dotted, node.targets))

    def _either(
        self, node: ast.AST, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt], guards: Guards
    ) -> End | None:
        decided = self._decided(node, test, guards)
        if isinstance(decided, bool):
            return self._taken(body if decided else orelse, guards)
        yes = self._branch(body, (*guards, decided))
        no = self._branch(orelse, (*guards, f"not ({decided})"))
        if yes is None or no is None:
            return None
        return yes if no is End.RAISE else no

    def _decided(self, node: ast.AST, test: ast.expr, guards: Guards) -> bool | str:
        """Whether a test holds, or its text where it is open.

        One that is asked again in its branch is not open, nor what a handler asks of its error, the one looked for.
        """
        if self._caught_as and _asks_for(test, self._caught_as):
            negated = isinstance(test, ast.UnaryOp) or (
                isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.NotIn, ast.NotEq))
            )
            return not negated
        decided = self.decisions.get(id(node), text_of(test))
        if isinstance(decided, str) and (decided in guards or f"not ({decided})" in guards):
            return decided in guards
        return decided

    def _taken(self, body: list[ast.stmt], guards: Guards) -> End | None:
        """Follow the block that this way takes: if it always raises, the rank ends."""
        before = self._left
        end = self._block(body, guards)
        self.raised = self.raised or (end is End.RAISE and self._left == before)
        return end

    def _branch(self, body: list[ast.stmt], guards: Guards) -> End | None:
        """A block that may not be run: where it ends the function or the turn, what follows is come to without it."""
        end = self._block(body, guards)
        if end is not None and end is not End.RAISE:
            self._leave(end, guards)
        return end

    def _leave(self, end: End, guards: Guards) -> None:
        self._left = {**self._left, end: (*self._left[end], guards)}

    def _loop(self, text: str, loop: ast.For | ast.AsyncFor | ast.While, guards: Guards) -> End | None:
        if self.decisions.get(id(loop)) is False:
            return self._block(loop.orelse, guards)
        first, outer = len(self.events), self._left
        self._left = {**outer, End.CONTINUE: (), End.BREAK: ()}
        end = self._block(loop.body, (*guards, text))
        returned = self._left[End.RETURN]
        ways_out = {*self._left[End.BREAK], *returned[len(outer[End.RETURN]) :]}
        if end in (End.BREAK, End.RETURN):
            ways_out.add(("once",))
        # The next turn is not come to, either.
        self.events[first:] = [replace(each, after=each.after | ways_out) for each in self.events[first:]]
        self._left = {**outer, End.RETURN: returned}
        if end is End.RETURN:
            self._leave(end, (*guards, text))
        return self._block(loop.orelse, guards)

    def _try(self, node: ast.Try, guards: Guards) -> End | None:
        if self.caught is not None and self.caught[0].body is node.body:
            end = self._error(node, *self.caught[1:], guards)
        else:
            end = self._block(node.body, guards)
            if end is None:
                end = self._block(node.orelse, guards)
            elif end is End.RAISE and node.handlers:  # it may be caught
                end = None
        last = self._block(node.finalbody, guards)
        return last if last is not None else end

    def _error(self, node: ast.Try, handler: ast.ExceptHandler, early: bool, guards: Guards) -> End | None:
        """Follow the handler, after all collectives of the block or only those of its first call."""
        first, exits, nothing, left = len(self.events), len(self.exits), set(self._nothing), self._left
        self._failing += 1
        self._block(node.body, guards)
        self._failing -= 1
        self._left, self._nothing = left, nothing
        del self.exits[exits:]
        if early:
            last = _first_call(node.body)
            self.events[first:] = [each for each in self.events[first:] if each.collective.line <= last]
        self._caught_as, outer = handler.name or "", self._caught_as
        end = self._taken(handler.body, guards)
        self._caught_as = outer
        return end

    def _return(self, node: ast.Return, value: ast.expr | None, guards: Guards) -> End:
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
            return End.RAISE
        if self._runs_backward and not nothing and not self._failing:
            why = "in which the gradients are reduced"
            self._add(Collective("the backward pass", BACKWARD, node.lineno, why), guards)
        self.exits.append(Exit(End.RETURN.value, node.lineno, guards))
        return End.RETURN

    def _without_gradient(self, value: ast.expr) -> bool:
        """Whether what a step returns leads to no gradient of any parameter: None, or a tensor made of a number."""
        if isinstance(value, ast.Dict):
            return all(self._without_gradient(each) for each in value.values)
        if isinstance(value, ast.Call):
            made = self.surroundings.names.origin(value.func) in _NEW_TENSORS
            return made and all(isinstance(each, (ast.Constant, ast.List)) for each in value.args)
        return isinstance(value, ast.Constant) or dotted(value) in self._nothing

    def _ends_in_backward(self, value: ast.expr | None) -> bool:
        """Whether backward raises at once on what a step returns: a new tensor that requires no gradient."""
        made = list(nodes(value, ast.Call)) if value is not None else []
        return bool(made) and not any(keyword.arg == "requires_grad" for each in made for keyword in each.keywords)

    @property
    def _runs_backward(self) -> bool:
        """Whether Lightning runs a backward pass on what the function returns."""
        surroundings = self.surroundings
        step = last_part(self.name) == "training_step"
        return step and surroundings.node is not None and not surroundings.manual

    # --- expressions

    def _expression(self, node: ast.AST, guards: Guards) -> None:
        """Add its calls, in the order in which they are made."""
        if id(node) in self.silent:
            return
        before = len(self.events)
        self._calls_in(node, guards)
        if len(self.events) == before and not self.decisions and self.caught is None:
            self.silent.add(id(node))

    def _calls_in(self, node: ast.AST, guards: Guards) -> None:
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
        if isinstance(node, COMPREHENSIONS):
            inner = guards
            for generator in node.generators:
                self._expression(generator.iter, guards)
                if self.decisions.get(id(generator)) is False:
                    return
                inner = (*inner, f"for {text_of(generator.iter)}")
            values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            for value in values:
                self._expression(value, inner)
            return
        for child in ast.iter_child_nodes(node):
            self._expression(child, guards)
        if isinstance(node, ast.Call):
            for made in self.made_by(node):
                if made.pairs_with != BACKWARD or not self._unsynced:
                    self._add(made, guards)
        elif isinstance(node, ast.Attribute):
            read = self.surroundings.property_read(node)
            if read is not None:
                self._add(read, guards)

    def _add(self, collective: Collective, guards: Guards) -> None:
        after = frozenset(guards for left in self._left.values() for guards in left)
        self.events.append(Event(collective, guards, after))


def _first_call(body: list[ast.stmt]) -> int:
    """The last line of the first statement that calls something: what comes after it may not have been come to."""
    for statement in body:
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            return _first_call(statement.body)
        if any(nodes(statement, ast.Call)):
            return statement.end_lineno or statement.lineno
    return 0


def suppressing(node: ast.AST) -> ast.Try | None:
    """`with suppress(RuntimeError):` as the try that it is."""
    if not isinstance(node, ast.With):
        return None
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    errors = [each for call in calls if dotted(call.func).endswith("suppress") for each in call.args]
    if not errors:
        return None
    handler = ast.ExceptHandler(ast.Tuple(errors, ast.Load()) if len(errors) > 1 else errors[0], None, [ast.Pass()])
    handler.lineno = node.lineno
    return ast.Try(node.body, [handler], [], [])


def _asks_for(test: ast.expr, name: str) -> bool:
    return any(each.id == name for each in nodes(test, ast.Name))


def _ends_process(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) in _PROCESS_ENDS


def _calls(node: ast.AST, name: str) -> bool:
    return any(dotted(each.func).endswith(name) for each in nodes(node, ast.Call))
