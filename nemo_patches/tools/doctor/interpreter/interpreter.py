"""Follows a function's statements in order: a value for each expression, and a skeleton."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

from nemo_patches.tools.doctor.interpreter import calls, collectives, knowledge
from nemo_patches.tools.doctor.interpreter.members import (
    OPERATIONS,
    Open,
    applied,
    both,
    negated,
    truths,
)
from nemo_patches.tools.doctor.interpreter.names import (
    is_loader,
    parts_of,
    sounds_like_data,
)
from nemo_patches.tools.doctor.interpreter.plain_python import leaves
from nemo_patches.tools.doctor.interpreter.skeleton import (
    BACKWARD,
    FORWARD,
    UNUSED,
    WITHOUT_AGREEMENT,
    Assigned,
    Branch,
    Choice,
    Collective,
    Condition,
    End,
    Exit,
    Inlined,
    Items,
    Loop,
    Managed,
    Tried,
    Unseen,
    collectives_in,
    inner_blocks,
    size_of,
)
from nemo_patches.tools.doctor.interpreter.source_file import (
    Definition,
    SourceFile,
    is_property,
    methods_of,
)
from nemo_patches.tools.doctor.interpreter.values import (
    AGREED,
    DATA,
    SAME,
    UNKNOWN,
    VARIES,
    Abstract,
    joined,
    mixed,
    tagged,
)
from nemo_patches.tools.doctor.syntax import (
    constant,
    dotted,
    last_part,
    names_in,
    nodes,
    text_of,
)

_MOST_DEEP = 6  # helpers that call each other
_MOST_OF_A_HELPER = 200  # items, with those of its own helpers
_MOST_WORK = 40_000  # expressions of one file
_MOST_TURNED = 3  # loops in each other that are read twice
_ENDS: dict[type[ast.stmt], End] = {
    ast.Raise: End.RAISE,
    ast.Break: End.BREAK,
    ast.Continue: End.CONTINUE,
}
_COMPARING = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_BELONGING = (ast.Is, ast.IsNot, ast.In, ast.NotIn)
_DENYING = (ast.NotIn, ast.NotEq)
_ASKED = (ast.Attribute, ast.BoolOp, ast.Call, ast.Compare, ast.UnaryOp)
_SOME_COLLECTIVE = "torch.distributed.barrier"  # for what a decorator is given
Environment = dict[str, Abstract]


class Interpreter:
    """Follows one function, or the module's own statements.

    chosen: how surely ranks differ in coming here; turns: and in how often they do.
    """

    def __init__(
        self,
        file: SourceFile,
        definition: Definition,
        env: Environment,
        depth: int = 0,
    ) -> None:
        self.file = file
        self.definition = definition
        self.owner = definition.owner
        self.env = env
        self.depth = depth
        self.items: Items = []
        self.set_here = set[str]()
        self.settled = set[str]()
        self.yields: list[tuple[int, int]] = []
        self.chosen = SAME
        self.turns = SAME
        self.branches = 0
        self.loops = 0
        self.meanings: dict[str, str] = {}  # what a name was set to that may be a test
        self.unsynced = False  # within no_sync
        self.sized = False  # where a test asks what is left over by the number of ranks
        self.caught_as = ""  # the name of the error in its handler
        # The line of an alarm that is set; 0 where it was cleared, None where nothing was done.
        self.alarm: int | None = None
        self.alarmed: list[tuple[Collective, int]] = []
        # Of a context manager: what runs the block of the with statement, and its statements.
        self.run_managed: Callable[[Abstract], Items] | None = None
        self.managed: Sequence[ast.stmt] = ()
        self.subjects = _subjects(file, self.owner)
        automatic = env.get("self.automatic_optimization", Abstract())
        self.runs_backward = (
            last_part(definition.name) == "training_step"
            and definition.owner is not None
            and automatic.decided is not False
            and not depth
        )

    @property
    def returned(self) -> Abstract:
        if self.yields:
            varies = any(
                chosen == VARIES or turns > DATA for chosen, turns in self.yields
            )
            count = VARIES if varies else UNKNOWN
            return Abstract(DATA, count=count, tags=frozenset({"loader"}))
        return self.env.get("return") or self.file.constant(None)

    # --- statements

    def block(self, body: Sequence[ast.stmt]) -> End | None:
        """Returns how it ends; None where it goes on."""
        for each in body:
            visit = getattr(self, f"visit_{type(each).__name__}", self._statement)
            end: End | None = visit(each)
            if end is not None:
                return end
        return None

    @contextmanager
    def inside(self) -> Iterator[Items]:
        """Keep apart the items of a block."""
        outer = self.items
        self.items = []
        yield self.items
        self.items = outer

    def _statement(self, node: ast.stmt) -> End | None:
        first = len(self.items)
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.expr):
                self.of(each)
        end = _ENDS.get(type(node))
        called = _called(node) if isinstance(node, ast.Expr) else None
        if called is not None:
            last = self.items[-1] if self.items else None
            if getattr(last, "name", "") == text_of(called.func):
                self._unused(first)
            if dotted(called.func) in knowledge.PROCESS_ENDS:
                end = End.RAISE
        if end is not None:
            self.items.append(Exit(end, node.lineno))
        return end

    def _unused(self, first: int) -> None:
        """No backward pass begins at what nothing uses."""
        for number, each in enumerate(self.items[first:], first):
            if isinstance(each, Collective) and each.pairs_with == FORWARD:
                why = knowledge.NOT_FOR_BACKWARD if each.guess else each.why
                self.items[number] = replace(each, pairs_with=UNUSED, guess="", why=why)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        in_module = self.definition.node is self.file.tree
        made = Definition(node.name, node, outer=None if in_module else self.env)
        self.env[node.name] = Abstract(ref=made)
        self.file.definitions.append(made)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        made = methods_of(node)
        for each in node.body:
            if isinstance(each, ast.ClassDef):
                self.visit_ClassDef(each)
        self.file.definitions += made.methods.values()
        self.env[node.name] = Abstract(ref=made)

    def visit_Assign(self, node: ast.Assign) -> None:
        first = len(self.items)
        value = self.of(node.value)
        if isinstance(getattr(node.value, "right", None), ast.Constant):  # count += 1
            value = value.tagged("const")
        if self.sized:  # filled up, or cut
            value = value.tagged("even")
        for target in node.targets:
            self.assign(target, value)
            if isinstance(target, ast.Name) and isinstance(node.value, _ASKED):
                self.meanings[target.id] = self._meaning(node.value)
        if all(
            isinstance(each, ast.Name) and each.id not in self.file.loaded
            for each in node.targets
        ):
            self._unused(first)
        for target in node.targets if self.runs_backward else ():
            name = dotted(target)
            nothing = value.has("nothing")
            self.items.append(Assigned(name, node.lineno, text_of(node), nothing))

    def assign(self, target: ast.expr, value: Abstract) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target, value)
            return
        if isinstance(target, (ast.Starred, ast.Subscript)):
            whole = self.of(target.value)
            put = replace(joined(value, whole), at=None, count=whole.turns, item=None)
            put = replace(put, entries=whole.entries, ref=None)
            if isinstance(target, ast.Subscript) and isinstance(
                target.slice, ast.Constant
            ):
                put = put.with_entry(target.slice.value, value)
            value = put.tagged(*value.tags & {"const"})
            target = target.value
        name = dotted(target)
        last = last_part(name)
        if name.startswith(("()", "super")):
            return
        drawn = value.has("drawn") and name in knowledge.BATCHES
        if drawn or (value.has("next") and sounds_like_data(name)):
            value = replace(value, level=DATA).tagged("batch")
        of_loader = parts_of(name) & knowledge.LOADERS
        if value.level == DATA and value.count is None and of_loader:
            value = replace(value, count=UNKNOWN)
        is_loss = parts_of(name) & knowledge.LOSSES and sounds_like_data(name)
        if value.level == UNKNOWN and last == name and is_loss:
            value = replace(value, level=DATA)
        by_signal = last_part(self.definition.name) in self.file.signalled
        if by_signal and value.has("const"):  # which comes to each rank at another step
            value = replace(value, level=VARIES, at=None).tagged("signal", "chosen")
        if isinstance(target, ast.Attribute) or name in self.file.changed:
            self.file.set_to.setdefault(last, []).append(value)
        if self.chosen == VARIES and value.has("const") and not value.has("agreed"):
            value = replace(value, level=VARIES, at=None, count=SAME).tagged("chosen")
        if value.has("agreed"):
            self.settled.add(name)
        elif last in knowledge.SHARED_SETTINGS and last != name:
            why = knowledge.SHARED_SETTINGS[last]
            self.emit(Collective(name, last, target.lineno, why))
        self.set(name, value)
        if value.has("ddp", "fsdp"):
            self.file.wrapped[last] = value.tags & knowledge.CARRIED

    def _unpack(self, target: ast.Tuple | ast.List, value: Abstract) -> None:
        fit = len(value.parts) == len(target.elts)
        for number, each in enumerate(target.elts):
            if fit:
                self.assign(each, value.parts[number])
                continue
            at = applied(lambda column, place=number: column[place], [value.at], "")
            self.assign(each, replace(value, at=at, item=None, parts=(), ref=None))

    def set(self, name: str, value: Abstract) -> None:
        if name != "self":  # the attributes of what it was before
            for each in [key for key in self.env if key.startswith(f"{name}.")]:
                del self.env[each]
        self.env[name] = value
        self.set_here.add(name)
        self.meanings.pop(name, None)

    def condition(self, node: ast.expr, whole: ast.stmt | ast.expr) -> Condition:
        value = self.truth(node)
        filters = hasattr(whole, "filters")
        return Condition(
            text=text_of(node),
            key=self._meaning(node),
            value=value,
            kind="filter" if filters else type(whole).__name__.lower(),
            line=whole.lineno,
            end=whole.end_lineno or 0,
        )

    def _meaning(self, node: ast.expr) -> str:
        """What a test asks: of a name, what it was set to."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return negated(self._meaning(node.operand))
        text = text_of(node)
        return self.meanings.get(text, text)

    def origin(self, name: str) -> str:
        """Where a name is from, by what it was set to here and by the imports."""
        first, dot, rest = name.partition(".")
        for known, left in ((name, ""), (first, f"{dot}{rest}")):
            ref = self.env.get(known, Abstract()).ref
            if isinstance(ref, str):
                return f"{ref}{left}"
        return self.file.origin(name)

    def visit_If(self, node: ast.If) -> End | None:
        condition = self.condition(node.test, node)
        decided = condition.value.decided
        if decided is None and self.caught_as and self.caught_as in names_in(node.test):
            decided = not _denies(node.test)  # it is the error that is looked for
        if decided is not None:
            return self.block(node.body if decided else node.orelse)
        before = self.env
        varies = condition.value.level == VARIES and not condition.value.has("file")
        self.branches += 1
        sized = self.sized
        self.sized |= condition.value.has("sized")
        meanings = self.meanings
        yes, left, taken = self._side(
            node.body, before, varies and not _ends(node.orelse)
        )
        of_yes = self.meanings
        self.meanings = meanings
        no, left_too, other = self._side(
            node.orelse, before, varies and not _ends(node.body)
        )
        common = of_yes.items() & self.meanings.items()
        self.meanings = dict(common)
        self.sized = sized
        self.branches -= 1
        self.items.append(Branch(condition, yes, no))
        if left is None and left_too is None:
            self.env = self._merged(condition, before, taken, other)
        elif left is not None and left_too is not None:
            self.env = self._merged(condition, before, taken, other)
            return left_too if left is End.RAISE else left
        else:
            self.env = taken if left is None else other
        return None

    def _side(
        self, body: Sequence[ast.stmt], before: Environment, chosen: bool
    ) -> tuple[Items, End | None, Environment]:
        """chosen: whether data decide that it is this one, and others go on behind the other."""
        self.env = dict(before)
        self.meanings = dict(self.meanings)
        outer = self.chosen
        if chosen:
            self.chosen = VARIES
        with self.inside() as items:
            end = self.block(body)
        self.chosen = outer
        return items, end, self.env

    def _merged(
        self,
        condition: Condition,
        before: Environment,
        env: Environment,
        other: Environment,
    ) -> Environment:
        """The names behind a branch. What a group has agreed on is the same: without a group there
        are no others.
        """
        nothing = Abstract()
        agree = {
            side
            for side, here in enumerate((env, other))
            for name, each in here.items()
            if each.has("agreed") and each is not before.get(name)
        }
        agreeing = (
            len(agree) == 1
            and condition.value.level != VARIES
            and "%" not in condition.key
        )
        side = min(agree, default=0)
        merged = {}
        for name in {**env, **other}:
            pair = env.get(name, nothing), other.get(name, nothing)
            mine, theirs = pair[side], pair[1 - side]
            if agreeing and (mine.has("agreed") or mine.level < theirs.level):
                merged[name] = mine
            elif pair[0] is pair[1]:
                merged[name] = pair[0]
            else:
                merged[name] = self._either(condition, *pair, name)
        return merged

    def _either(
        self, condition: Condition, one: Abstract, other: Abstract, name: str = ""
    ) -> Abstract:
        """What a branch makes of two values."""
        value = joined(one, other)
        if one == other:
            return value
        if one.ref != other.ref and (_callable(one.ref) or _callable(other.ref)):
            value = replace(value, ref=Choice(condition, one.ref, other.ref))
        if name == "return" and condition.value.level == VARIES:
            value = replace(value, level=VARIES).tagged("chosen")
        if not self.by_rank(condition.value):
            return value
        at = None
        if condition.value.at and one.at and other.at:
            at = tuple(
                Open(condition.text)
                if isinstance(holds, Open)
                else yes
                if holds
                else no
                for holds, yes, no in zip(
                    condition.value.at, one.at, other.at, strict=True
                )
            )
        known = at and not any(isinstance(each, Open) for each in at)
        level = value.level if known else VARIES
        return replace(value, at=at, level=level, count=value.count or SAME).tagged(
            "alone"
        )

    def by_rank(self, value: Abstract) -> bool:
        return value.has("rank") or self.file.members.differ(value.at)

    def visit_While(self, node: ast.While) -> None:
        endless = isinstance(node.test, ast.Constant)
        self.loops += 1
        for _ in range(self._readings()):
            condition = self.condition(node.test, node)
            sized = self.sized
            self.sized |= condition.value.has("sized")
            items = self._turn(node.body, endless)
            self.sized = sized
        condition = max(
            condition,
            self.condition(node.test, node),
            key=lambda each: each.value.level,
        )
        self.loops -= 1
        self._loop(condition, items, node.orelse, endless)

    def visit_For(self, node: ast.For) -> None:
        iterated = self.of(node.iter)
        level = VARIES if iterated.turns >= DATA else SAME
        condition = Condition(
            text=text_of(node.iter),
            key=text_of(node.iter),
            value=replace(iterated, level=level, at=None),
            kind="for",
            line=node.lineno,
            end=node.end_lineno or 0,
        )
        turns = self.turns
        self.turns = max(turns, iterated.turns)
        self.loops += 1
        for _ in range(self._readings()):
            drawn = calls.item_of(iterated, text_of(node.iter)).tagged("drawn")
            items = self._turn(
                node.body, endless=False, target=node.target, drawn=drawn
            )
        self.loops -= 1
        self.turns = turns
        self._loop(condition, items, node.orelse, endless=False)

    def _readings(self) -> int:
        """A body is read twice, as what a turn sets may be asked for in the next one."""
        return 2 if self.loops <= _MOST_TURNED else 1

    def _turn(
        self,
        body: Sequence[ast.stmt],
        endless: bool,
        target: ast.expr | None = None,
        drawn: Abstract | None = None,
    ) -> Items:
        before = dict(self.env)
        with self.inside() as items:
            if target is not None and drawn is not None:
                self.assign(target, drawn)
            self.block(body)
        for name, value in before.items() if not endless else ():
            if name in self.env and not self.env[name].has("agreed"):
                self.env[name] = joined(value, self.env[name])
        return items

    def _loop(
        self,
        condition: Condition,
        items: Items,
        orelse: Sequence[ast.stmt],
        endless: bool,
    ) -> None:
        with self.inside() as last:
            self.block(orelse)
        self.items.append(Loop(condition, items, last, endless))

    def visit_Try(self, node: ast.Try) -> End | None:
        before = dict(self.env)
        with self.inside() as body:
            end = self.block(node.body)
        with self.inside() as orelse:
            end = end or self.block(node.orelse)
        handlers = []
        after = self.env
        for each in node.handlers:
            condition = _of_handler(each, node)
            old = {
                name: joined(value, after[name])
                for name, value in before.items()
                if name in after
            }
            items, left = self._handler(each, condition.value.level, {**after, **old})
            handlers.append((condition, items))
            if left is None:
                known = {
                    name: joined(value, self.env.get(name, value))
                    for name, value in after.items()
                }
                after = {**self.env, **known}
        self.env = after
        with self.inside() as final:
            last = self.block(node.finalbody)
        body_of = node.body
        if any(nodes(each, ast.Yield) for each in node.body) and self.managed:
            body_of = list(self.managed)
        self.items.append(
            Tried(
                body=body,
                handlers=handlers,
                orelse=orelse,
                final=final,
                first=_first_call(body_of),
                harmless=self._harmless(body_of),
            )
        )
        return last or (None if node.handlers else end)

    def _handler(
        self, node: ast.ExceptHandler, level: int, env: Environment
    ) -> tuple[Items, End | None]:
        outer = self.chosen, self.caught_as
        self.env = env
        self.chosen = max(self.chosen, level)
        self.caught_as = node.name or ""
        with self.inside() as items:
            end = self.block(node.body)
        self.chosen, self.caught_as = outer
        return items, end

    def _harmless(self, body: Sequence[ast.stmt]) -> bool:
        """Whether nothing is tried but collectives and what torch makes for them: their errors are
        all ranks'.
        """
        agreements = 0
        for each in (call for statement in body for call in nodes(statement, ast.Call)):
            with self.inside():
                call = self._call_of(each)
            made = collectives.collective_of(call)
            if made is not None and made.pairs_with not in WITHOUT_AGREEMENT:
                agreements += 1
                continue
            origin = call.origin
            if not origin.startswith("torch.") and origin not in knowledge.HARMLESS:
                return False
        return agreements > 0

    def visit_With(self, node: ast.With) -> End | None:
        return self._with(node, list(node.items))

    def _with(self, node: ast.With, items: list[ast.withitem]) -> End | None:
        """Its items one in another."""
        if not items:
            return self.block(node.body)
        item, *inner = items
        manager = self._manager(item.context_expr)
        if manager is not None:
            assert isinstance(item.context_expr, ast.Call)
            given = self._given(manager, self._call_of(item.context_expr))
            return self._managed(node, item, inner, manager, given)
        value = self.of(item.context_expr)
        enters = (
            self.file.method(value.ref, "__enter__") if value.has("instance") else None
        )
        if enters is not None and enters not in self.file.being_read:
            return self._managed(node, item, inner, enters, {}, value)
        outer = self.unsynced
        self.unsynced |= "no_sync(" in text_of(item.context_expr)
        if item.optional_vars is not None:
            self.assign(item.optional_vars, value)
        with self.inside() as body:
            end = self._with(node, inner)
        self.unsynced = outer
        self.items += body
        return end

    def _manager(self, node: ast.expr) -> Definition | None:
        """The context manager of this file that a call makes, as a generator."""
        own = self.own(node) if isinstance(node, ast.Call) else None
        if own is None or own in self.file.being_read or self.depth >= _MOST_DEEP:
            return None
        return own if _manages(own) else None

    def _managed(
        self,
        node: ast.With,
        item: ast.withitem,
        inner: list[ast.withitem],
        manager: Definition,
        given: Mapping[str, Abstract],
        entered: Abstract | None = None,
    ) -> End | None:
        """A block in the generator that is its context manager, at the yield. entered: the object
        that is one, which the block is given.
        """
        own = _attributes(self.env) if manager.owner is self.owner else {}
        env = {**self.file.start(manager, given), **own}
        reader = Interpreter(self.file, manager, env, self.depth + 1)
        ends: list[End | None] = []

        def run(value: Abstract) -> Items:
            if item.optional_vars is not None:
                self.assign(item.optional_vars, entered or value)
            outer = self.alarm
            self.alarm = reader.alarm or outer
            with self.inside() as items:
                ends.append(self._with(node, inner))
            self.alarm = outer
            return items

        reader.run_managed = run
        reader.managed = node.body
        self.file.being_read.append(manager)
        reader.block(manager.node.body)
        self.file.being_read.pop()
        name = manager.owner.name if manager.owner and entered else manager.name
        made = Inlined(name, node.lineno, reader.items, manages=True)
        self.items.append(made)
        end = ends[-1] if ends else None
        return None if end is End.RAISE else end

    def visit_Return(self, node: ast.Return) -> End:
        value = self.file.constant(None) if node.value is None else self.of(node.value)
        if self.runs_backward and value.has("new"):  # backward raises at once
            self.items.append(Exit(End.RAISE, node.lineno))
            return End.RAISE
        if self.runs_backward and not value.has("nothing", "const"):
            why = "in which the gradients are reduced"
            of = dotted(node.value) if node.value else ""
            made = Collective("the backward pass", BACKWARD, node.lineno, why, of=of)
            self.emit(made)
        self.env["return"] = value
        if (
            self.run_managed is None
        ):  # a context manager's own return ends no block of another
            self.items.append(Exit(End.RETURN, node.lineno))
        return End.RETURN

    # --- expressions

    def of(self, node: ast.AST) -> Abstract:
        """Its value; its collectives are added in the order in which they are made."""
        self.file.work += 1
        visit = getattr(self, f"visit_{type(node).__name__}", self._made_of)
        value: Abstract = visit(node)
        return value

    def _made_of(self, node: ast.AST) -> Abstract:
        parts = ast.iter_child_nodes(node)
        return mixed([self.of(each) for each in parts if isinstance(each, ast.expr)])

    def visit_Constant(self, node: ast.Constant) -> Abstract:
        return self.file.constant(node.value)

    def visit_Lambda(self, node: ast.Lambda) -> Abstract:
        return Abstract(ref=node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Abstract:
        value = self.of(node.value)
        self.assign(node.target, value)
        return self.env.get(node.target.id, value)

    def visit_Yield(self, node: ast.Yield) -> Abstract:
        self.yields.append((self.chosen, self.turns))
        value = self.of(node.value) if node.value else Abstract()
        if self.run_managed is not None:
            self.items.append(Managed(self.run_managed(value)))
        return value

    def visit_Name(self, node: ast.Name) -> Abstract:
        wrapped = self.file.wrapped.get(node.id, frozenset())
        ref = self.file.reference(node.id)
        return self._named(node.id, Abstract(tags=wrapped, ref=ref))

    def _named(self, name: str, otherwise: Abstract) -> Abstract:
        """What is known of a name: what it was set to here, or what it says."""
        known = self.env.get(name)
        blank = known == Abstract()
        if known is not None and not blank:
            return known
        # What the rank of a matrix is set to is no rank.
        if blank and knowledge.SAID_BY.get(last_part(name)) != "ranks":
            return Abstract()
        if name in self.file.changed:
            return self.file.by_rank.get(name, otherwise)
        return self.file.source(name) or otherwise

    def visit_Attribute(self, node: ast.Attribute) -> Abstract:
        name = dotted(node)
        owner = name.rpartition(".")[0]
        if name in self.env:
            return self._named(name, self.env[name])
        method = self.file.method(self.owner, node.attr) if owner == "self" else None
        if method and is_property(method):
            return self.call(method, None, node, name)
        if owner in ("trainer", "self.trainer") and node.attr in knowledge.PROPERTIES:
            pairs_with, why, guess = knowledge.PROPERTIES[node.attr]
            self.emit(Collective(name, pairs_with, node.lineno, why, guess))
        return self._attribute(node, self.of(node.value))

    def _attribute(self, node: ast.Attribute, inner: Abstract) -> Abstract:
        """An attribute of something that is known already."""
        name = dotted(node)
        if name in self.env:
            return self._named(name, self.env[name])
        entry = inner.entry(node.attr)
        if entry is not None:
            return entry
        if isinstance(inner.ref, Definition):
            known = self.file.attributes.get(inner.ref.name, {})
            if f"self.{node.attr}" in known:
                return known[f"self.{node.attr}"]
        said = self.file.source(name) or self.file.by_rank.get(node.attr)
        if said is not None:
            return replace(said, ref=said.ref or self.file.reference(name))
        method = (
            self.file.method(self.owner, node.attr)
            if name == f"self.{node.attr}"
            else None
        )
        if method is not None and not is_property(method):
            return Abstract(ref=method)
        if node.attr in knowledge.PARAMETER | knowledge.STRUCTURE_ATTRIBUTES:
            return tagged("gradient") if node.attr == "grad" else Abstract()
        if node.attr == "shape" and inner.level:
            return tagged("shape", level=VARIES)
        wrapped = self.file.wrapped.get(node.attr, frozenset[str]())
        if node.attr == "module":
            wrapped = frozenset()
        tags = wrapped | inner.tags & {"@engine", "alone", "file", "object"}
        level = inner.level
        count = UNKNOWN if parts_of(node.attr) & knowledge.LOADERS else None
        kept = sounds_like_data(node.attr) or parts_of(name) & knowledge.HOLDING
        if (inner.has("object") and not kept) or is_loader(dotted(node.value)):
            level = min(level, UNKNOWN)
        return Abstract(level, tags=tags, count=count, ref=self.file.reference(name))

    def visit_Subscript(self, node: ast.Subscript) -> Abstract:
        constant = getattr(node.slice, "value", None)
        if dotted(node.value).endswith("environ"):
            return self.file.source(f"${constant}") or Abstract()
        value = self.of(node.value)
        if isinstance(node.slice, ast.Slice):
            return self._slice(value, node.slice)
        key = self.of(node.slice)
        if value.entries:
            return self._entry(value, key, node)
        if isinstance(constant, int) and constant < len(value.parts):
            return value.parts[constant]
        at = applied(
            lambda given, where: given[where], [value.at, key.at], text_of(node)
        )
        of_model = isinstance(constant, str) and parts_of(constant) & knowledge.MODEL
        features = value.has("shape") and isinstance(node.slice, ast.UnaryOp)
        if at or of_model or features:  # the number of features is the model's
            return Abstract(at=at)
        level = _level_at(value, constant)
        count = value.count if level == VARIES else None
        if value.has("dealt") and self.by_rank(key):
            count = SAME if value.has("even") else VARIES
        tags = value.tags & (knowledge.CARRIED | {"agreed"})
        return Abstract(level, tags=tags, count=count)

    def _slice(self, value: Abstract, node: ast.Slice) -> Abstract:
        """Every so many items from the rank's number on are this rank's share, one more or less
        than another's.
        """
        bounds = {
            name: self.of(each)
            for name in ("lower", "upper", "step")
            if (each := getattr(node, name)) is not None
        }
        sized = any(each.has("sized") for each in bounds.values())
        own = [name for name, each in bounds.items() if self.by_rank(each)]
        text = text_of(node)
        unequal = bool(own) and (
            "step" in bounds or "ceil" in self._spelled(node) or "min(" in text
        )
        tags = value.tags & (knowledge.CARRIED | {"agreed", "shape"})
        if sized and not own:
            tags |= {"even"}
        count = value.count if value.level == VARIES else None
        if unequal and not value.has("even"):
            count = VARIES
        return Abstract(value.level, tags=tags, count=count)

    def _spelled(self, node: ast.AST) -> str:
        """Its text, with what its names were set to."""
        set_to = [self.meanings.get(name, "") for name in sorted(names_in(node))]
        return " ".join([text_of(node), *set_to])

    def _entry(self, value: Abstract, key: Abstract, node: ast.Subscript) -> Abstract:
        """Of a dict by a key: by one that is known, or one of all."""
        if isinstance(node.slice, ast.Constant):
            asked = node.slice.value
            return value.entry(asked) or Abstract(_level_at(value, asked))
        text = text_of(node.slice)
        found = value.entries[-1][1]
        for name, each in value.entries[-2::-1]:
            at = applied(
                OPERATIONS[ast.Eq], [key.at, self.file.constant(name).at], text
            )
            condition = Condition(
                text=f"{text} == {name!r}",
                key=f"{self._meaning(node.slice)} == {name!r}",
                value=replace(key, at=at),
                kind="if",
                line=node.lineno,
                end=node.end_lineno or 0,
            )
            found = self._either(condition, each, found)
        return found

    def visit_List(self, node: ast.List | ast.Tuple | ast.Set) -> Abstract:
        values = tuple(map(self.of, node.elts))
        columns = [each.at for each in values]
        at = applied(lambda *parts: parts, columns, text_of(node))
        return replace(mixed(values), at=at, count=SAME, parts=values)

    visit_Tuple = visit_Set = visit_List

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Abstract:
        values = tuple(map(self.of, node.values))
        return replace(mixed(values), parts=values)

    def visit_Dict(self, node: ast.Dict) -> Abstract:
        values = list(map(self.of, node.values))
        pairs = zip(node.keys, values, strict=True)
        known = tuple(
            (key.value, each) for key, each in pairs if isinstance(key, ast.Constant)
        )
        entries = known if len(known) == len(values) else ()
        value = replace(mixed(values), count=SAME, entries=entries)
        nothing = values and all(each.has("nothing", "const") for each in values)
        return value.tagged("nothing") if nothing else value

    def visit_ListComp(self, node: Any) -> Abstract:
        """As the loop that it is."""
        name = f"[{node.lineno}:{node.col_offset}]"
        if not hasattr(node, "as_loop"):
            node.as_loop = _as_loop(node, name)
        outer = dict(self.env)
        turns = self.turns
        self.env[name] = Abstract(count=SAME)
        self.turns = SAME
        self.block([node.as_loop])
        value = self.env[name]
        self.turns = turns
        agreed = {key: each for key, each in self.env.items() if each.has("agreed")}
        self.env = {**outer, **agreed}
        if isinstance(node, ast.DictComp) and value.count != VARIES:
            return replace(value, level=SAME, count=SAME)  # its keys are the data set's
        return value

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def truth(self, node: ast.expr) -> Abstract:
        """The value of a test: whether what is in a batch decides it, and not only whether it has
        something.
        """
        value = self.of(node)
        asked = (ast.BoolOp, ast.UnaryOp, ast.NamedExpr, ast.Compare)
        named = isinstance(node, (ast.Name, ast.Attribute))
        if named and value.has("taken"):  # whether all of it has been worked off
            return replace(value, level=VARIES)
        if named and value.level == VARIES and value.count in (UNKNOWN, DATA):
            return replace(value, level=UNKNOWN).tagged("lacks")  # whether it has any
        if value.level != DATA or isinstance(node, asked):
            return value
        if isinstance(node, ast.Call):
            plausible = bool(parts_of(dotted(node.func)) & knowledge.PLAUSIBLE)
        else:
            said = parts_of(last_part(self._meaning(node))) & knowledge.PLAUSIBLE
            plausible = sounds_like_data(dotted(node)) or bool(said)
            plausible = plausible and not value.has("optional")
        if plausible:
            return replace(value, level=VARIES)
        return replace(value, level=UNKNOWN).tagged("lacks")

    def visit_BoolOp(self, node: ast.BoolOp) -> Abstract:
        ends = isinstance(node.op, ast.Or)
        members = len(self.file.members)
        first = node.values[0]
        value = self.truth(first)
        at: Sequence[Any] = truths(value.at, text_of(first), members)
        known = [value]
        for each in node.values[1:]:
            if value.decided is ends:
                break
            with self.inside() as items:
                value = self.truth(each)
            if items:
                condition = Condition(
                    text=text_of(first),
                    key=self._meaning(first),
                    value=known[0],
                    kind="if",
                    line=node.lineno,
                    end=node.end_lineno or 0,
                )
                sides = ([], items) if ends else (items, [])
                self.items.append(Branch(condition, *sides))
            known.append(value)
            at = both(at, truths(value.at, text_of(each), members), ends)
        left = mixed([each for each in known if each.decided is None])
        decided = any(each.at for each in known)
        return replace(left, at=tuple(at) if decided else None)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Abstract:
        if not isinstance(node.op, ast.Not):
            value = self.of(node.operand)
            operation = OPERATIONS.get(type(node.op))
            return replace(value, at=applied(operation, [value.at], text_of(node)))
        value = self.truth(node.operand)
        at = value.at and tuple(
            negated(each) if isinstance(each, Open) else not each for each in value.at
        )
        return replace(value, at=at, tags=value.tags & knowledge.CARRIED)

    def visit_BinOp(self, node: ast.BinOp) -> Abstract:
        sides = [self.of(node.left), self.of(node.right)]
        operation = OPERATIONS.get(type(node.op))
        at = applied(operation, [each.at for each in sides], text_of(node))
        value = replace(mixed(sides), at=at).without("gradient")
        by_rank = at is None and any(map(self.by_rank, sides))
        return value.tagged("rank") if by_rank else value

    def visit_IfExp(self, node: ast.IfExp) -> Abstract:
        condition = self.condition(node.test, node)
        asked = condition.value
        if asked.decided is not None:
            return self.of(node.body if asked.decided else node.orelse)
        with self.inside() as yes:
            one = self.of(node.body)
        with self.inside() as no:
            other = self.of(node.orelse)
        if yes or no:
            self.items.append(Branch(condition, yes, no))
        for each in (one, other):  # get_rank() if known else 0
            if asked.at is None and self.file.members.differ(each.at):
                return each
        if one.has("agreed") != other.has("agreed") and asked.level != VARIES:
            return AGREED
        value = self._either(condition, one, other)
        chosen = asked.level == VARIES and one.at and other.at
        return replace(value, level=VARIES).tagged("chosen") if chosen else value

    def visit_Compare(self, node: ast.Compare) -> Abstract:
        sides = [node.left, *node.comparators]
        if dotted(sides[1]).endswith("environ"):
            known = self.file.source(f"${getattr(sides[0], 'value', '')}")
            there = isinstance(node.ops[0], ast.In)
            return self.file.constant(there) if known else Abstract()
        values = list(map(self.of, sides))
        constants = [each.value for each in sides if isinstance(each, ast.Constant)]
        first = dotted(getattr(sides[0], "target", sides[0]))
        if None in constants and _may_lack(values[0], first):
            return mixed([Abstract(VARIES), replace(values[0], level=VARIES)])
        at = self._compared(node, values)
        if at is not None:
            return replace(mixed(values), at=at)
        identity = any(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops)
        if not identity and any(map(self.by_rank, values)):
            return tagged("rank", level=VARIES)
        if _of_form(node, values, constants):
            asked = any(isinstance(each, _BELONGING) for each in node.ops)
            own = any(each.level in (UNKNOWN, DATA) for each in values)
            return tagged("lacks") if asked and own else Abstract()
        value = mixed(values)
        itself = text_of(sides[0]) == text_of(sides[1])  # loss != loss
        if value.level == DATA and (
            itself or any(isinstance(each, _COMPARING) for each in node.ops)
        ):
            value = replace(value, level=VARIES)
        return value.without("gradient")

    def _compared(
        self, node: ast.Compare, values: Sequence[Abstract]
    ) -> tuple[Any, ...] | None:
        """What a comparison says on each member."""
        text = text_of(node)
        at: tuple[Any, ...] = (True,) * len(self.file.members)
        for op, left, right in zip(node.ops, values, values[1:], strict=False):
            part = applied(OPERATIONS[type(op)], [left.at, right.at], text)
            if part is None:
                return None
            at = both(at, truths(part, text, 0), False)
        return at

    # --- calls

    def emit(self, made: Collective) -> None:
        if made.pairs_with != BACKWARD or not self.unsynced:
            self.items.append(replace(made, place=(made.line, made.name)))
            self._under_alarm(made)

    def _under_alarm(self, made: Collective) -> None:
        if self.alarm:
            self.alarmed.append((made, self.alarm))

    def _set_alarm(self, call: calls.Call) -> None:
        """Set or clear an alarm."""
        last = call.node.args[-1] if call.node.args else None
        if call.origin in knowledge.ALARMS:
            self.alarm = 0 if constant(last) == 0 else call.node.lineno

    def visit_Call(self, node: ast.Call) -> Abstract:
        call = self._call_of(node)
        last = last_part(call.origin)
        kind, package = knowledge.WRAPPERS.get(last, ("", ""))
        if kind and package in call.origin:
            return self._wrap(node, kind, last)
        if call.owner.has("one device"):
            return Abstract()
        return self._lead_to(self.own(node) or call.function.ref, call)

    def _lead_to(self, target: object, call: calls.Call) -> Abstract:
        """A call of what it leads to: a function of this file or another's, or one or the other."""
        node = call.node
        if isinstance(target, Choice):
            with self.inside() as yes:
                one = self._lead_to(target.yes, call)
            with self.inside() as no:
                other = self._lead_to(target.no, call)
            if yes or no:
                condition = replace(
                    target.condition, line=node.lineno, end=node.end_lineno or 0
                )
                self.items.append(Branch(condition, yes, no))
            return self._either(target.condition, one, other)
        goes_on = self.depth < _MOST_DEEP and self.file.work < _MOST_WORK
        own = target if isinstance(target, Definition) else None
        if own and goes_on:
            if isinstance(own.node, ast.FunctionDef):
                return self.call(own, call, node, call.name)
            return self._make(own, call)
        if isinstance(target, ast.Lambda) and goes_on:
            return self._lambda(target, call)
        if isinstance(target, str) and own is None:
            call = replace(call, origin=target)
        last = last_part(call.origin)
        made = collectives.collective_of(call) if own is None else None
        if made is not None:
            named = collectives.name_by_batch(call)
            if named is not None:
                self.items.append(Branch(named, [made], []))
            return self._agree(node, made)
        sounds = re.search(knowledge.SOUNDS_COLLECTIVE, call.origin)
        if sounds and last not in self.file.env:
            self.items.append(Unseen(call.name))
        if call.last in knowledge.ADDING and isinstance(node.func, ast.Attribute):
            return self._add(dotted(node.func.value), call)
        if call.name in ("filter", "map") and len(call.args) == 2:
            return self._mapped(call)
        if call.last == "setattr" and len(node.args) == 3:
            name = getattr(node.args[1], "value", "")
            self.assign(
                ast.Attribute(node.args[0], str(name), ast.Store()), call.args[2]
            )
            return Abstract()
        self._set_alarm(call)
        self._keep(call)
        return calls.called(call)

    def _keep(self, call: calls.Call) -> None:
        """An object of another file that is given data may hold them."""
        held, _, _ = call.name.rpartition(".")
        if call.last in knowledge.TAKING and call.owner.turns == VARIES:
            self.set(held, call.owner.tagged("taken"))
        name = held or call.name
        given = mixed([*call.args, *call.given.values()])
        known = self.env.get(name)
        holds = known is not None and (
            known.has("holds") or parts_of(last_part(name)) & knowledge.HOLDING
        )
        if known is not None and given.level >= DATA and holds:
            self.set(name, replace(known, level=DATA))

    def _lambda(self, function: ast.Lambda, call: calls.Call) -> Abstract:
        if function in self.file.being_read:
            return Abstract(UNKNOWN)
        outer = dict(self.env)
        names = [each.arg for each in function.args.args]
        self.env.update(zip(names, call.args, strict=False))
        self.file.being_read.append(function)
        with self.inside() as items:
            value = self.truth(function.body)
        self.file.being_read.pop()
        self.env = outer
        if items:
            self.items.append(Inlined(call.name, call.node.lineno, items))
        return value

    def _make(self, of_class: Definition, call: calls.Call) -> Abstract:
        """An object of a class of this file: what its constructor sets."""
        made = replace(tagged("instance"), ref=of_class)
        begin = self.file.method(of_class, "__init__")
        if begin is None:
            fields = [
                each.target.id
                for each in of_class.node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            given = {**dict(zip(fields, call.args, strict=False)), **call.given}
            return replace(made, entries=tuple(given.items()))
        self.call(begin, call, call.node, call.name)
        return made

    def _call_of(self, node: ast.Call) -> calls.Call:
        """Read what is called, and what it is given."""
        owner = Abstract()
        if isinstance(node.func, ast.Attribute):
            owner = self.of(node.func.value)
            function = self._attribute(node.func, owner)
        else:
            function = self.of(node.func)
        return calls.Call(
            node=node,
            name=dotted(node.func),
            origin=self.origin(dotted(node.func)),
            function=function,
            owner=owner,
            args=[self.of(each) for each in node.args],
            given={each.arg or "": self.of(each.value) for each in node.keywords},
            file=self.file,
            env=self.env,
            subjects=self.subjects,
            in_module=self.owner is not None and "forward" in self.owner.methods,
        )

    def _add(self, name: str, call: calls.Call) -> Abstract:
        """Add to a list or a set: where data decide on it, its length is this rank's own."""
        owner = call.owner
        chosen = self.chosen == VARIES
        added = replace(joined(owner, mixed(call.args)), at=None, item=None, parts=())
        # A list of this function is as long as the turns in which it is added to.
        unknown = owner.count is None and "." in name
        count = None if unknown else max(owner.count or SAME, self.turns)
        if chosen:
            count = VARIES
        added = replace(added, level=VARIES if chosen else added.level, count=count)
        self.set(name, added.tagged("even") if self.sized else added)
        return Abstract()

    def _mapped(self, call: calls.Call) -> Abstract:
        """`filter` and `map`."""
        function, iterated = call.args
        value = replace(iterated, count=None)
        if isinstance(function.ref, ast.Lambda):
            outer = dict(self.env)
            self.env.update((each.arg, value) for each in function.ref.args.args)
            value = self.truth(function.ref.body)
            self.env = outer
        elif value.has("gradient"):  # filter(None, grads)
            value = Abstract(VARIES)
        if call.last == "map":
            return replace(value, at=None, count=iterated.turns)
        count = VARIES if value.level == VARIES else iterated.turns
        return replace(iterated, level=max(value.level, iterated.level), count=count)

    def _wrap(self, node: ast.Call, kind: str, last: str) -> Abstract:
        perhaps = ["perhaps"] if self.branches and kind == "fsdp" else []
        engine = ["@engine"] if last == "initialize" else []
        value = tagged(kind, *perhaps, *engine)
        if last != "fully_shard" or not node.args:
            return value
        # In place; and what a loop takes it from: for layer in model.layers.
        name = dotted(node.args[0])
        wrapped = [name]
        for loop in nodes(self.definition.node, ast.For):
            if name in names_in(loop.target):
                wrapped += map(dotted, nodes(loop.iter, ast.Name, ast.Attribute))
        for each in wrapped:
            self.file.wrapped[last_part(each)] = value.tags
            if each != "self":
                self.env[each] = self.env.get(each, value).tagged(*value.tags)
                self.set_here.add(each)
        return value

    def own(self, node: ast.Call) -> Definition | None:
        """The function of this file that a call leads to."""
        name = dotted(node.func)
        first, _, rest = name.partition(".")
        if first in ("super()", "self", "cls") and self.owner and "." not in rest:
            beyond = first == "super()"
            found = self.file.method(self.owner, rest or "forward", beyond=beyond)
            return None if found and is_property(found) else found
        known = self.env.get(name, Abstract())
        holder = self.env.get(name.rpartition(".")[0], Abstract()).ref
        if isinstance(holder, Definition) and holder.methods:
            return self.file.method(holder, last_part(name))
        ref = known.ref
        if known.has("instance"):
            wrapped = known.has("ddp", "fsdp")
            return None if wrapped else self.file.method(ref, "forward")
        is_function = isinstance(ref, Definition) and isinstance(
            ref.node, ast.FunctionDef
        )
        return ref if is_function else None

    def call(
        self,
        called: Definition,
        call: calls.Call | None,
        node: ast.Call | ast.Attribute,
        name: str,
    ) -> Abstract:
        """A helper of this file, read with what it is given. call: None of a property."""
        if called in self.file.being_read or _manages(called):
            return Abstract(UNKNOWN)
        given = {} if call is None else self._given(called, call)
        for parameter, value in given.items():
            seen = self.file.given.setdefault(called, {})
            seen.setdefault(parameter, []).append(value)
        of_self = self.owner is not None and called.owner is self.owner
        own = _attributes(self.env) if of_self else {}
        key = called, tuple(given.items()), tuple(own.items())
        if key not in self.file.summaries:
            self.file.summaries[key] = self._read(called, given, own)
        inner: Interpreter = self.file.summaries[key]
        if self.one_rank(called):
            return inner.returned
        if inner.items and not inner.yields:
            guess = collectives.guess_of_helper(called, call, self.file)
            items = inner.items
            size = size_of(items)
            if size > _MOST_OF_A_HELPER:  # its collectives are one
                items = list(islice(collectives_in(items), 1))
                size = 1
            self.items.append(Inlined(name, node.lineno, items, guess, size=size))
            for each in islice(collectives_in(items), 1):
                why = each.why or f"which makes {each.name}"
                made = replace(each, name=f"{name}()", line=node.lineno, why=why)
                self._under_alarm(replace(made, guess=each.guess or guess))
        if inner.alarm is not None:
            self.alarm = inner.alarm
        for parameter, expression in _passed(called, call):
            after = inner.env.get(parameter, Abstract())
            before = given.get(parameter, Abstract())
            if after.has("agreed") and not before.has("agreed"):
                self._agree_on(expression)
        if of_self:
            self.env.update(_attributes(inner.env))
        return inner.returned

    def one_rank(self, definition: Definition) -> str:
        """What runs a function on one rank only: a decorator, or Lightning; empty if none."""
        for node in getattr(definition.node, "decorator_list", ()):
            name = self.file.origin(dotted(getattr(node, "func", node)))
            made = self._wrapper(node)
            if last_part(name) in knowledge.ONE_RANK or (
                made is not None and self._parts_ranks(made.items)
            ):
                return f"@{text_of(node)}"
        prepares = definition.name.endswith(".prepare_data")
        return "prepare_data" if prepares and "lightning" in self.subjects else ""

    def decorated_alarm(self) -> int | None:
        """The line of a decorator that runs the function under an alarm."""
        for node in getattr(self.definition.node, "decorator_list", ()):
            made = self._wrapper(node)
            if made is not None and made.alarmed:
                return int(node.lineno)
        return None

    def _wrapper(self, decorator: ast.expr) -> Interpreter | None:
        """What a decorator of this file runs in a function's place, which is a collective here."""
        known: Any = self.file.summaries
        if decorator not in known:
            known[decorator] = None  # while it is read
            before = len(self.file.definitions)
            name = self.file.origin(dotted(getattr(decorator, "func", decorator)))
            own = self.file.env.get(name, Abstract()).ref
            if isinstance(decorator, ast.Call) and isinstance(own, Definition):
                own = self._returned(own, {}) or own
            known[decorator] = self._run_by(own)
            del self.file.definitions[before:]  # it is no function of the file's
        made: Interpreter | None = known[decorator]
        return made

    def _run_by(self, decorator: object) -> Interpreter | None:
        args = getattr(getattr(decorator, "node", None), "args", None)
        if args is None or not args.args:
            return None
        given = {args.args[0].arg: Abstract(ref=_SOME_COLLECTIVE)}
        made = self._returned(decorator, given)
        return self._read(made, {}, {}) if made else None

    def _returned(
        self, called: Any, given: Mapping[str, Abstract]
    ) -> Definition | None:
        """The function that a function of this file returns."""
        if (
            not isinstance(called.node, ast.FunctionDef)
            or called in self.file.being_read
        ):
            return None
        ref = self._read(called, given, {}).returned.ref
        is_function = isinstance(ref, Definition) and isinstance(
            ref.node, ast.FunctionDef
        )
        return ref if is_function else None

    def _parts_ranks(self, items: Items) -> bool:
        """Whether a collective is made on one side of a test on the rank only."""
        return any(
            any(map(self._parts_ranks, inner_blocks(each)))
            or (
                isinstance(each, Branch)
                and self.by_rank(each.condition.value)
                and any(collectives_in(each.yes)) != any(collectives_in(each.no))
            )
            for each in items
        )

    def _given(self, called: Definition, call: calls.Call) -> dict[str, Abstract]:
        """What a call gives, by the names of the parameters."""
        by_place = zip(_parameters(called), call.args, strict=False)
        return {**dict(by_place), **call.given}

    def _read(
        self,
        called: Definition,
        given: Mapping[str, Abstract],
        own: Mapping[str, Abstract],
    ) -> Interpreter:
        env = {**self.file.start(called, given), **own}
        inner = Interpreter(self.file, called, env, self.depth + 1)
        self.file.being_read.append(called)
        inner.block(called.node.body)
        self.file.being_read.pop()
        return inner

    def _agree_on(self, node: ast.AST, value: Abstract = AGREED) -> None:
        """What the names in it are from now on."""
        for each in nodes(node, ast.Name, ast.Attribute):
            name = dotted(each)
            if not name.startswith("()") and name not in ("self", "torch", "dist"):
                old = self.env.get(name, Abstract())
                tags = value.tags | old.tags & {"ddp", "fsdp"}
                self.env[name] = replace(value, tags=tags, ref=old.ref)
                self.set_here.add(name)

    def _agree(self, node: ast.Call, made: Collective) -> Abstract:
        """Make a collective: what it gives, and what is the same on all ranks behind it."""
        last = last_part(made.name)
        if made.pairs_with == "generate":
            self._generate(node, made)
            return Abstract(DATA)
        self.emit(made)
        if made.pairs_with in (*WITHOUT_AGREEMENT, "state_dict"):
            encodes = made.pairs_with not in (BACKWARD, "log", "state_dict")
            return Abstract(DATA if encodes else SAME)
        keywords = [
            each.value for each in node.keywords if each.arg not in ("group", "op")
        ]
        every = [*node.args, *keywords]
        of_torch = self.origin(made.name).startswith(("torch.distributed", "dist."))
        if last in knowledge.TO_ONE and of_torch:
            if last == "reduce":  # one rank alone has the result
                self._agree_on(every[0], tagged("alone", level=VARIES))
            return Abstract()
        if last in knowledge.READING:
            into_first = last.startswith("all_") and len(every) > 1
            every = every[:1] if into_first else []
        for each in every:
            self._agree_on(each)
        return AGREED.tagged("group") if last in knowledge.GROUPS else AGREED

    def _generate(self, node: ast.Call, made: Collective) -> None:
        """As long as this rank's sequences go on, if ranks do not wait for each other."""
        for each in node.keywords:
            if each.arg == "synced_gpus" and getattr(each.value, "value", True):
                return
        condition = Condition(
            text=text_of(node.func),
            key=text_of(node.func),
            value=Abstract(VARIES),
            kind="for",
            line=node.lineno,
            end=node.end_lineno or 0,
        )
        self.items.append(Loop(condition, [made], []))


def _subjects(file: SourceFile, owner: Definition | None) -> frozenset[str]:
    """What a file and a class are about."""
    _, bases = file.bases(owner)
    subjects = set(file.subjects)
    methods = owner.methods.keys() if owner else set()
    if {last_part(each) for each in bases} & knowledge.LIGHTNING_BASES or (
        methods & knowledge.LIGHTNING_METHODS
    ):
        subjects.add("lightning")
    if any(each.startswith("nemo.") and last_part(each) != "ModelPT" for each in bases):
        subjects.add("nemo")
    return frozenset(subjects)


def _ends(body: list[ast.stmt]) -> bool:
    """Whether nothing of a function or its loop is come to behind a block, in no turn either."""
    return leaves(body) and not isinstance(body[-1], ast.Continue)


def _callable(ref: object) -> bool:
    if isinstance(ref, Definition):
        return isinstance(ref.node, ast.FunctionDef)
    if isinstance(ref, Choice):  # not those of turn after turn
        return not isinstance(ref.yes, Choice) or not isinstance(ref.no, Choice)
    return isinstance(ref, (str, ast.Lambda))


def _called(node: ast.Expr) -> ast.Call | None:
    """The call of a statement that uses nothing of it: `model(x).sum() * 0`."""
    inner: ast.expr = node.value
    while isinstance(inner, (ast.Attribute, ast.BinOp, ast.Subscript)):
        inner = inner.left if isinstance(inner, ast.BinOp) else inner.value
    return inner if isinstance(inner, ast.Call) else None


def _denies(test: ast.expr) -> bool:
    """Whether a test holds where what it names is not there."""
    if isinstance(test, ast.UnaryOp):
        return not _denies(test.operand)
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], _DENYING)


def _of_handler(node: ast.ExceptHandler, tried: ast.Try) -> Condition:
    """Whether it takes errors of one rank's batch or memory, or those that all ranks share, as
    those of imports are.
    """
    imports = isinstance(tried.body[0], (ast.Import, ast.ImportFrom))
    types = getattr(node.type, "elts", [node.type])
    kinds = {last_part(dotted(each)) for each in types if each is not None}
    text = text_of(node.type) if node.type else "any error"
    of_all = (kinds and kinds <= knowledge.ALL_RANKS) or imports
    return Condition(
        text=text,
        key=text,
        value=Abstract(SAME if of_all else VARIES),
        kind="except",
        line=node.lineno,
        end=node.end_lineno or 0,
    )


def _first_call(body: Sequence[ast.stmt]) -> int:
    """The last line of the first statement that calls something: what comes after it may not have
    been come to.
    """
    for each in body:
        if isinstance(each, ast.With):
            return _first_call(each.body)
        if any(nodes(each, ast.Call)):
            return each.end_lineno or 0
    return 0


def _as_loop(node: Any, name: str) -> ast.stmt:
    """A comprehension as a loop that appends to a name."""
    element: Any = getattr(node, "elt", getattr(node, "value", None))
    add = ast.Attribute(ast.Name(name, ast.Load()), "append", ast.Load())
    made: ast.stmt = ast.Expr(ast.Call(add, [element], []))
    for each in reversed(node.generators):
        for test in reversed(each.ifs):
            made = ast.copy_location(ast.If(test, [made], []), node)
            made.filters = True  # type: ignore[attr-defined]
        loop = ast.For(each.target, each.iter, [made], [])
        made = ast.copy_location(loop, node)
    return ast.fix_missing_locations(made)


def _may_lack(value: Abstract, name: str) -> bool:
    """Whether some ranks may have None there: a gradient, a batch, the result of one rank."""
    batch = value.has("next") or (value.has("batch") and name in knowledge.BATCHES)
    alone = value.has("alone") and value.level == VARIES
    return value.has("gradient") or batch or alone


def _of_form(
    node: ast.Compare, values: Sequence[Abstract], constants: Sequence[object]
) -> bool:
    """Whether a comparison asks for the form of something, which is equal on all ranks."""
    sides = [node.left, *node.comparators]
    fields = any(re.fullmatch(r"len\(\w+\)", text_of(each)) for each in sides) and any(
        isinstance(each, int) and each > 1 for each in constants
    )
    shapes = any(
        each.has("shape") and isinstance(side, ast.Attribute)
        for each, side in zip(values, sides, strict=True)
    )
    textual = any(isinstance(each, str) or each is None for each in constants)
    belongs = any(isinstance(each, _BELONGING) for each in node.ops)
    chosen = any(each.has("chosen") for each in values)  # a name that data decide
    return fields or shapes or ((belongs or textual) and not chosen)


def _level_at(value: Abstract, key: object) -> int:
    """Of what a dict has at a key: a setting's name says that it is none of its data."""
    of_setting = isinstance(key, str) and parts_of(key) & knowledge.OTHER_NAMES
    if of_setting and not value.has("batch"):
        return min(value.level, UNKNOWN)
    return value.level


def _manages(definition: Definition) -> bool:
    decorators = map(text_of, definition.node.decorator_list)
    return any(each.endswith("contextmanager") for each in decorators)


def _passed(
    called: Definition, call: calls.Call | None
) -> Iterator[tuple[str, ast.expr]]:
    """What a call gives, as it is written, by the names of the parameters."""
    if call is not None:
        yield from zip(_parameters(called), call.node.args, strict=False)
        yield from ((each.arg, each.value) for each in call.node.keywords if each.arg)


def _parameters(definition: Definition) -> list[str]:
    """The names of a function's parameters by place, without self."""
    args = definition.node.args
    names = [each.arg for each in (*args.posonlyargs, *args.args)]
    static = "staticmethod" in map(text_of, definition.node.decorator_list)
    return names[1:] if definition.owner and not static else names


def _attributes(env: Mapping[str, Abstract]) -> Environment:
    return {name: value for name, value in env.items() if name.startswith("self.")}
