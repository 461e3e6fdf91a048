"""Reads a function: the names that it has set so far, and the skeleton of its collectives."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nemo_patches.tools.doctor.interpreter import knowledge
from nemo_patches.tools.doctor.interpreter.members import (
    Column,
    Open,
    applied,
    negated,
)
from nemo_patches.tools.doctor.interpreter.names import (
    parts_of,
    says,
    sounds_like_data,
)
from nemo_patches.tools.doctor.interpreter.skeleton import (
    BACKWARD,
    FORWARD,
    UNUSED,
    BlockEnd,
    Choice,
    Collective,
    Decision,
    Items,
)
from nemo_patches.tools.doctor.interpreter.source_file import (
    Definition,
    SourceFile,
    evaluates,
)
from nemo_patches.tools.doctor.interpreter.values import (
    AGREED,
    DATA,
    FILLED,
    SAME,
    UNKNOWN,
    VARIES,
    Abstract,
    Environment,
    carried,
    joined,
)
from nemo_patches.tools.doctor.syntax import (
    dotted,
    last_part,
    nodes,
    text_of,
)

# By the kind of a node: what reads it. `stmt` and `expr`: any other.
Visitors = Mapping[str, Callable[..., Any]]


class Interpreter:
    """Follows one function, or the module's own statements.

    chosen: how surely ranks differ in coming here; turns: and in how often they do.
    """

    def __init__(
        self,
        visitors: Visitors,
        file: SourceFile,
        definition: Definition,
        env: Environment,
        depth: int = 0,
    ) -> None:
        self.visitors = visitors
        self.file = file
        self.definition = definition
        self.owner = definition.owner
        self.env = env
        self.depth = depth
        self.items: Items = []
        self.set_here = set[str]()
        self.settled = set[str]()  # what ranks have agreed on after all
        self.yields: list[tuple[int, int]] = []
        self.chosen = SAME
        self.parted = SAME  # the same, with ranks that are not here any more
        self.turns = SAME
        self.branches = 0
        self.loops = 0
        # What differs by this function's own word: it gathers it, or its length, in these lines.
        self.gathered: dict[str, int] = {}
        self.reduced: dict[str, int] = {}  # likewise, a tensor
        self.unordered = False  # in a loop over a set
        self.of_items = 0  # loops over what one batch has
        self.meanings: dict[str, str] = {}  # what a name was set to that may be a test
        self.unsynced = False  # within no_sync
        # Within join(): a rank that has ended makes the model's collectives of the others.
        self.joined = definition.node in file.joined
        self.sized = False  # where a test asks what is left over by the number of ranks
        self.apart = False  # where a test of the rank lets some ranks come
        self.handles = False  # an error
        # The line of an alarm that is set; 0 where it was cleared, None where nothing was done.
        self.alarm: int | None = None
        self.held = 0  # the line of a lock of several processes
        # By Kind's names, what no comparison of ways shows, and the line of what is wrong with it.
        self.found: list[tuple[str, Collective, int]] = []
        self.ranges: dict[str, tuple[str, Column]] = {}  # of peer_messages.py
        # Of a context manager: what runs the block of the with statement.
        self.run_managed: Callable[[Abstract], Items] | None = None
        self.subjects = _subjects(file, self.owner)
        automatic = env.get("self.automatic_optimization", Abstract())
        self.runs_backward = (
            last_part(definition.name) == "training_step"
            and definition.owner is not None
            and automatic.decided is not False
            and not depth
        )
        hook = last_part(definition.name)
        # Whether its layers are called for a backward pass.
        self.trained = hook == "forward" or definition.owner is None
        self.trained &= not evaluates(definition)
        of_trainer = hook in knowledge.HOOKS and definition.owner is not None
        self.in_hook = of_trainer and (hook == "__del__" or "trains" in file.subjects)

    @property
    def returned(self) -> Abstract:
        if self.yields:
            varies = any(
                chosen >= DATA or turns > DATA for chosen, turns in self.yields
            )
            count = VARIES if varies else UNKNOWN
            tags = frozenset({"loader", "generator"})
            return Abstract(DATA, count=count, tags=tags, ref=self.definition)
        return self.env.get("return") or self.file.constant(None)

    @property
    def attributes_set(self) -> Environment:
        names = self.set_here & self.env.keys()
        return {each: self.env[each] for each in names if each.startswith("self.")}

    def block(self, body: Sequence[ast.stmt]) -> BlockEnd | None:
        """Returns how it ends; None where it goes on."""
        for each in body:
            visit = self.visitors.get(type(each).__name__, self.visitors["stmt"])
            end: BlockEnd | None = visit(self, each)
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

    def assign(self, target: ast.expr, value: Abstract) -> None:
        if value.has("batch"):
            value = value.tagged(*self.file.full)
        if isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target, value)
            return
        if isinstance(target, (ast.Starred, ast.Subscript)):
            whole = self.of(target.value)
            put = joined(value, whole)._replace(at=None, count=whole.turns, item=None)
            put = put._replace(entries=whole.entries, ref=None)
            put = put.tagged("set") if self.unordered and whole.has("grows") else put
            if whole.has("grows") and self.handles and self.chosen == VARIES:
                put = put._replace(level=VARIES, count=VARIES)
            if isinstance(target, ast.Subscript):
                key = self.of(target.slice)
                put = self.filled(put, key)
                if key.at and isinstance(key.at[0], str) and set(key.at) == {key.at[0]}:
                    put = put.with_entry(key.at[0], value)
            value = put.tagged(*value.tags & {"const"})
            target = target.value
        name = dotted(target)
        last = last_part(name)
        drawn = value.has("drawn") and name in knowledge.BATCHES
        if drawn or (value.has("next") and sounds_like_data(name)):
            value = value._replace(level=DATA).tagged("batch")
        is_loss = parts_of(name) & knowledge.LOSSES and sounds_like_data(name)
        if value.level == UNKNOWN and last == name and is_loss:
            value = value._replace(level=DATA)
        by_signal = last_part(self.definition.name) in self.file.signalled
        if by_signal and value.has("const"):  # which comes to each rank at another step
            value = value._replace(level=VARIES, at=None).tagged("signal", "chosen")
        # Ranks that have left the function keep what an object has from before.
        outlives = isinstance(target, ast.Attribute)
        if outlives:
            value = value.tagged(*self.file.wrapped.get(last, ()))
            self.note_buffer(name, last, value, target.lineno)
        if outlives or name in self.file.changed:
            told = value.without("agreed") if self.apart else value
            self.file.set_to.setdefault(last, []).append(told)
        chosen = self.parted if outlives else self.chosen
        if chosen == VARIES and value.has("const") and not value.has("agreed"):
            value = value._replace(level=VARIES, at=None, count=SAME).tagged("chosen")
        if last in knowledge.SHARED_SETTINGS and value.has("agreed"):
            self.settled.add(name)
        elif last in knowledge.SHARED_SETTINGS and name not in (last, f"self.{last}"):
            why = knowledge.SHARED_SETTINGS[last]
            self.emit(Collective(name, last, target.lineno, why))
        self.set(name, value)
        if value.has("ddp", "fsdp") and last != "module":  # model.module is none
            self.file.wrapped[last] = carried(value.tags)

    def filled(self, whole: Abstract, key: Abstract) -> Abstract:
        """A dict that has this key from now on, which only this rank may have."""
        if not whole.has("grows"):
            return whole
        own = key.level >= DATA and not key.has("named")
        if own or (self.handles and self.chosen == VARIES):
            return _of_own_keys(whole)
        return whole.tagged(f"{FILLED}{key.at[0] if key.at else ''}")

    def _unpack(self, target: ast.Tuple | ast.List, value: Abstract) -> None:
        fit = len(value.parts) == len(target.elts)
        for number, each in enumerate(target.elts):
            if fit:
                self.assign(each, value.parts[number])
                continue
            if value.item is not None and value.item.count == VARIES:
                self.assign(each, value.item)
                continue
            at = applied(lambda column, place=number: column[place], [value.at], "")
            part = value._replace(at=at, item=None, parts=(), ref=None)
            if value.has("shape") and value.has("full") and not number:
                part = Abstract()
            self.assign(each, part)

    def set(self, name: str, value: Abstract) -> None:
        if name != "self":  # the attributes of what it was before
            attributes = f"{name}."
            for each in [key for key in self.env if key.startswith(attributes)]:
                del self.env[each]
        self.env[name] = value
        self.set_here.add(name)
        self.meanings.pop(name, None)

    def condition(self, node: ast.expr, whole: ast.stmt | ast.expr) -> Decision:
        filters = hasattr(whole, "filters")
        kind = "filter" if filters else type(whole).__name__.lower()
        return self.decided_by(node, self.truth(node), whole, kind)

    def decided_by(
        self,
        node: ast.expr,
        value: Abstract,
        whole: ast.stmt | ast.expr,
        kind: str = "if",
        key: str = "",
    ) -> Decision:
        """What an expression of some value decides in a whole statement or expression."""
        return Decision(
            text=key or text_of(node),
            key=key or self.meaning(node),
            value=value,
            kind=kind,
            line=whole.lineno,
            end=whole.end_lineno or 0,
        )

    def meaning(self, node: ast.expr) -> str:
        """What a test asks: of a name, what it was set to."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return negated(self.meaning(node.operand))
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

    def either(
        self, condition: Decision, one: Abstract, other: Abstract, name: str = ""
    ) -> Abstract:
        """What a branch makes of two values."""
        value = joined(one, other)
        if one == other:
            return value
        if self.parts_keys(condition) and _keys_in(one) != _keys_in(other):
            value = _of_own_keys(value)
        if one.ref != other.ref and (_callable(one) or _callable(other)):
            value = value._replace(ref=Choice(condition, one.ref, other.ref))
        # A path, or None, by what this rank sees of the files.
        seen = condition.value.has("file") and one.has("nothing") != other.has(
            "nothing"
        )
        if (name == "return" or (name and seen)) and condition.value.level == VARIES:
            of_files = condition.value.tags & {"file", "random"}
            value = value._replace(level=VARIES).tagged("chosen", *of_files)
        if not self.by_rank(condition.value):
            return value
        columns = condition.value.at, one.at, other.at
        at = applied(
            lambda holds, yes, no: yes if holds else no, columns, condition.text
        )
        known = at and not any(isinstance(each, Open) for each in at)
        level = value.level if known else VARIES
        return value._replace(at=at, level=level, count=value.count or SAME).tagged(
            "alone"
        )

    def parts_keys(self, condition: Decision) -> bool:
        """Whether ranks have unlike keys in a dict that it decides to fill."""
        value = condition.value
        own = self.of_items and (value.level >= DATA or value.has("lacks"))
        own = own or (value.level == VARIES and not value.has("file"))
        return own and not says(condition.key, knowledge.FORM_OF_ITEM)

    def of_own_keys(self, known: Environment, before: Environment) -> Environment:
        """The names behind what some turns leave out, as their keys are those of the others."""
        nothing = Abstract()
        return {
            name: _of_own_keys(each)
            if _keys_in(each) - _keys_in(before.get(name, nothing))
            else each
            for name, each in known.items()
        }

    def by_rank(self, value: Abstract) -> bool:
        return value.has("rank") or self.file.members.differ(value.at)

    def of(self, node: ast.AST) -> Abstract:
        """Its value; its collectives are added in the order in which they are made."""
        self.file.work += 1
        visit = self.visitors.get(type(node).__name__) or self.visitors["expr"]
        value: Abstract = visit(self, node)
        return value

    def truth(self, node: ast.expr) -> Abstract:
        """The value of a test: whether what is in a batch decides it, and not only whether it has
        something.
        """
        value = self.of(node)
        asked = (ast.BoolOp, ast.UnaryOp, ast.NamedExpr, ast.Compare)
        named = isinstance(node, (ast.Name, ast.Attribute))
        if named and value.has("alone") and value.level == VARIES:  # None elsewhere
            return value.tagged("rank")
        if named and value.has("keyed") and value.level == DATA:  # any batch has some
            return value._replace(level=UNKNOWN).tagged("lacks")
        if named and value.has("taken"):  # whether all of it has been worked off
            return value._replace(level=VARIES)
        # A list that an object has was filled in an earlier step.
        kept = named and says(self.meaning(node), r"^\w+(\.\w+)+\Z")
        alike = kept and value.count == SAME and not value.has("chosen")
        unlike = value.level == VARIES and value.count in (UNKNOWN, DATA)
        if named and value.level >= DATA and (alike or unlike):
            return value._replace(level=UNKNOWN).tagged("lacks")  # whether it has any
        if named and value.count == VARIES and not value.has("keyed", "object"):
            return value._replace(level=VARIES)  # whether a list has any
        if value.level != DATA or isinstance(node, asked):
            return value
        if isinstance(node, ast.Call):
            plausible = bool(parts_of(dotted(node.func)) & knowledge.PLAUSIBLE)
        else:
            said = parts_of(last_part(self.meaning(node))) & knowledge.PLAUSIBLE
            plausible = sounds_like_data(dotted(node)) or bool(said)
            plausible = plausible and not value.has("optional")
        if plausible:
            return value._replace(level=VARIES)
        return value._replace(level=UNKNOWN).tagged("lacks")

    def emit(self, made: Collective) -> None:
        of_model = made.pairs_with in (BACKWARD, FORWARD, UNUSED)
        of_model |= made.why == knowledge.WEIGHTS
        left_out = (self.unsynced and made.pairs_with == BACKWARD) or (
            self.joined and of_model and "sharded" not in made.why
        )
        if not left_out:
            self.items.append(replace(made, place=(made.line, made.name)))
            self.note_what_is_set(made)

    def note_what_is_set(self, made: Collective) -> None:
        if self.alarm and self.file.handles_alarm:
            self.found.append(("ALARM", made, self.alarm))
        if self.held:
            self.found.append(("LOCK", made, self.held))

    def note_buffer(
        self, name: str, buffer: object, value: Abstract, line: int
    ) -> None:
        """A buffer that is made as large as this rank's batch says, which DDP broadcasts."""
        begins = self.definition.name.endswith(".__init__")
        if value.has("own_size") and buffer in self.file.buffers and not begins:
            made = Collective(name, "buffer", line, guess=knowledge.NOT_YET)
            self.found.append(("BUFFER", made, line))

    def read(
        self,
        called: Definition,
        given: Mapping[str, Abstract],
        own: Mapping[str, Abstract],
    ) -> Interpreter:
        env = {**self.file.start(called, given), **own}
        inner = Interpreter(self.visitors, self.file, called, env, self.depth + 1)
        inner.apart = self.apart
        inner.joined |= self.joined
        inner.unsynced = self.unsynced
        inner.trained = self.trained and not evaluates(called)
        self.file.being_read.append(called)
        inner.block(called.node.body)
        self.file.being_read.pop()
        return inner

    def agree_on(self, node: ast.AST, value: Abstract = AGREED) -> None:
        """What the names in it are from now on."""
        for each in nodes(node, ast.Name, ast.Attribute):
            name = dotted(each)
            if not name.startswith("()") and name not in ("self", "torch", "dist"):
                old = self.env.get(name, Abstract())
                tags = value.tags | old.tags & {"ddp", "fsdp"}
                self.env[name] = value._replace(tags=tags, ref=old.ref)
                self.set_here.add(name)


def _subjects(file: SourceFile, owner: Definition | None) -> frozenset[str]:
    """What a file and a class are about."""
    _, bases = file.bases(owner)
    subjects = set(file.subjects)
    methods = owner.methods.keys() if owner else set()
    if {last_part(each) for each in bases} & knowledge.LIGHTNING_BASES or (
        methods & knowledge.LIGHTNING_METHODS
    ):
        subjects.add("lightning")
    if any(each.endswith("ModelCheckpoint") for each in bases):
        subjects.add("saves")
    if any(each.startswith("nemo.") and last_part(each) != "ModelPT" for each in bases):
        subjects.add("nemo")
    return frozenset(subjects)


def _of_own_keys(value: Abstract) -> Abstract:
    return value._replace(level=max(value.level, DATA), count=VARIES).tagged("keyed")


def _keys_in(value: Abstract) -> set[str]:
    """What a dict is known to have been filled under in this function."""
    return {each for each in value.tags if each.startswith(FILLED)}


def _callable(value: Abstract) -> bool:
    ref = value.ref
    if isinstance(ref, Definition):
        return not value.has("instance", "generator")
    if isinstance(ref, Choice):  # not those of turn after turn
        return not isinstance(ref.yes, Choice) or not isinstance(ref.no, Choice)
    return isinstance(ref, (str, ast.Lambda))
