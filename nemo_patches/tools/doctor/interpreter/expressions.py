"""What each expression is: an abstract value, and the collectives that it makes."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

from nemo_patches.tools.doctor.interpreter import knowledge
from nemo_patches.tools.doctor.interpreter.functions import call_helper
from nemo_patches.tools.doctor.interpreter.interpreter import Interpreter
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
from nemo_patches.tools.doctor.interpreter.skeleton import (
    Branch,
    Collective,
    Decision,
    Managed,
)
from nemo_patches.tools.doctor.interpreter.source_file import (
    Definition,
    is_property,
)
from nemo_patches.tools.doctor.interpreter.values import (
    AGREED,
    DATA,
    FILLED,
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
    text_of,
)

_COMPARING = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_BLANK = Abstract()
_MOST_KEYS = 30  # of a dict that are told apart
_MOST_FIELDS = 10  # of a batch; a larger number is one of samples or of words
_BELONGING = (ast.Is, ast.IsNot, ast.In, ast.NotIn)


def made_of(reader: Interpreter, node: ast.AST) -> Abstract:
    parts = ast.iter_child_nodes(node)
    return mixed([reader.of(each) for each in parts if isinstance(each, ast.expr)])


def visit_Constant(reader: Interpreter, node: ast.Constant) -> Abstract:
    return reader.file.constant(node.value)


def visit_Lambda(reader: Interpreter, node: ast.Lambda) -> Abstract:
    return Abstract(ref=node)


def visit_Starred(reader: Interpreter, node: ast.Starred) -> Abstract:
    return reader.of(node.value)


def visit_NamedExpr(reader: Interpreter, node: ast.NamedExpr) -> Abstract:
    value = reader.of(node.value)
    reader.assign(node.target, value)
    return reader.env.get(node.target.id, value)


def visit_Yield(reader: Interpreter, node: ast.Yield | ast.YieldFrom) -> Abstract:
    value = reader.of(node.value) if node.value else Abstract()
    often = value.turns if isinstance(node, ast.YieldFrom) else SAME
    reader.yields.append((reader.chosen, max(reader.turns, often)))
    run = reader.run_managed
    reader.items.append(Managed(run(value) if run is not None else []))
    return value


visit_YieldFrom = visit_Yield


def visit_Name(reader: Interpreter, node: ast.Name) -> Abstract:
    if node.id == "__name__":  # of a program
        return reader.file.constant("__main__")
    return _named(reader, node.id)


def _named(reader: Interpreter, name: str) -> Abstract:
    """What is known of a name: what it was set to here, or what it says."""
    known = reader.env.get(name)
    # What the rank of a matrix is set to is no rank.
    blank = known == _BLANK and knowledge.SAID_BY.get(last_part(name)) == "ranks"
    if known is not None and not blank:
        return known
    wrapped = reader.file.wrapped.get(name, frozenset())
    otherwise = Abstract(tags=wrapped, ref=reader.file.reference(name))
    if name in reader.file.changed:
        return reader.file.by_rank.get(name, otherwise)
    return reader.file.source(name) or otherwise


def visit_Attribute(reader: Interpreter, node: ast.Attribute) -> Abstract:
    name = dotted(node)
    owner = name.rpartition(".")[0]
    if name in reader.env:
        return _named(reader, name)
    if owner in ("trainer", "self.trainer") and node.attr in knowledge.PROPERTIES:
        pairs_with, why, guess = knowledge.PROPERTIES[node.attr]
        reader.emit(Collective(name, pairs_with, node.lineno, why, guess))
    return attribute(reader, node, reader.of(node.value))


def attribute(reader: Interpreter, node: ast.Attribute, inner: Abstract) -> Abstract:
    """An attribute of something that is known already."""
    name = dotted(node)
    if name in reader.env:
        return _named(reader, name)
    entry = inner.entry(node.attr)
    if entry is not None:
        return entry
    owner = reader.owner if name == f"self.{node.attr}" else None
    owner = inner.ref if inner.has("instance") else owner
    method = reader.file.method(owner, node.attr)
    if method and is_property(method):
        return call_helper(reader, method, None, node, of=inner)
    if isinstance(inner.ref, Definition):
        known = reader.file.attributes.get(inner.ref.name, {})
        if f"self.{node.attr}" in known:
            return known[f"self.{node.attr}"]
    said = reader.file.source(name) or reader.file.by_rank.get(node.attr)
    if said is not None:
        return said._replace(ref=said.ref or reader.file.reference(name))
    if method is not None:
        return Abstract(ref=method)
    if node.attr in knowledge.OF_FORM:
        return tagged("gradient") if node.attr == "grad" else Abstract()
    if node.attr == "shape" and inner.level:
        level = UNKNOWN if inner.count == UNKNOWN else VARIES
        return tagged("shape", *inner.tags & {"full"}, level=level)
    wrapped = reader.file.wrapped.get(node.attr, frozenset[str]())
    tags = wrapped | inner.tags & {"@engine", "alone", "file", "named", "object"}
    level = inner.level
    count = UNKNOWN if parts_of(node.attr) & knowledge.LOADERS else None
    kept = sounds_like_data(node.attr) or parts_of(name) & knowledge.HOLDING
    if (inner.has("object") and not kept) or is_loader(dotted(node.value)):
        level = min(level, UNKNOWN)
    ref = name if name.startswith("super()") else reader.file.reference(name)
    return Abstract(level, tags=tags, count=count, ref=ref)


def visit_Subscript(reader: Interpreter, node: ast.Subscript) -> Abstract:
    constant = getattr(node.slice, "value", None)
    if dotted(node.value).endswith("environ"):
        return reader.file.source(f"${constant}") or Abstract()
    value = reader.of(node.value)
    if isinstance(node.slice, ast.Slice):
        return _slice(reader, value, node.slice)
    key = reader.of(node.slice)
    if value.entries:
        return _entry(reader, value, key, node)
    if isinstance(constant, int) and constant < len(value.parts):
        return value.parts[constant]
    at = applied(lambda given, where: given[where], [value.at, key.at], text_of(node))
    of_model = isinstance(constant, str) and parts_of(constant) & knowledge.MODEL
    features = value.has("shape") and isinstance(node.slice, ast.UnaryOp)
    features |= value.has("shape") and value.has("full") and constant == 0
    if at or of_model or features:  # the number of features is the model's
        return Abstract(at=at)
    level = _level_at(value, constant)
    if value.item is not None and constant is None:
        level = max(level, value.item.level)
    if key.level >= DATA and not key.has("named"):  # that of an item of this rank's
        level = max(level, DATA)
    count = value.count if level == VARIES else None
    if reader.by_rank(key):  # this rank's own
        level = max(level, DATA)
        count = UNKNOWN
        if value.has("dealt"):
            count = SAME if value.has("even") else VARIES
    tags = value.tags & (knowledge.CARRIED | {"agreed"})
    if value.has("batch") and isinstance(constant, (int, str)):
        tags |= value.tags & {"full"}
    return Abstract(level, tags=tags, count=count)


def _slice(reader: Interpreter, value: Abstract, node: ast.Slice) -> Abstract:
    """Every so many items from the rank's number on are this rank's share, one more or less
    than another's.
    """
    bounds = {
        name: reader.of(each)
        for name in ("lower", "upper", "step")
        if (each := getattr(node, name)) is not None
    }
    sized = any(each.has("sized") for each in bounds.values())
    own = [name for name, each in bounds.items() if reader.by_rank(each)]
    text = text_of(node)
    rounded = any(each.has("rounded") for each in bounds.values())
    unequal = bool(own) and ("step" in bounds or rounded or "min(" in text)
    tags = value.tags & (knowledge.CARRIED | {"agreed", "shape"})
    if sized and not own:
        tags |= {"share" if "step" in bounds else "even"}
    count = value.count if value.level == VARIES else None
    if unequal and not value.has("even"):
        # Cut off at what the number of ranks divides, all shares are as long.
        cut = "step" in bounds and "upper" in bounds and bounds["upper"].has("sized")
        cut = cut and not reader.file.seeded_by_rank
        count = SAME if cut else VARIES
    item = Abstract(DATA) if own and value.level < DATA else None
    return Abstract(value.level, tags=tags, count=count, item=item)


def _entry(
    reader: Interpreter, value: Abstract, key: Abstract, node: ast.Subscript
) -> Abstract:
    """Of a dict by a key: by one that is known, or one of all."""
    if isinstance(node.slice, ast.Constant):
        asked = node.slice.value
        return value.entry(asked) or Abstract(_level_at(value, asked))
    text = text_of(node.slice)
    if _of_batch(key, node.slice):
        key = key._replace(level=VARIES)
    found = value.entries[-1][1]
    for name, each in value.entries[-2::-1]:
        at = applied(OPERATIONS[ast.Eq], [key.at, reader.file.constant(name).at], text)
        condition = Decision(
            text=f"{text} == {name!r}",
            key=f"{reader.meaning(node.slice)} == {name!r}",
            value=key._replace(at=at),
            kind="if",
            line=node.lineno,
            end=node.end_lineno or 0,
        )
        found = reader.either(condition, each, found)
    return found


def visit_List(reader: Interpreter, node: ast.List | ast.Tuple | ast.Set) -> Abstract:
    values = tuple(map(reader.of, node.elts))
    columns = [each.at for each in values]
    at = applied(lambda *parts: parts, columns, text_of(node))
    item = next((each for each in values if isinstance(each.ref, Definition)), None)
    return mixed(values)._replace(at=at, count=SAME, item=item, parts=values)


visit_Tuple = visit_List


def visit_Set(reader: Interpreter, node: ast.Set) -> Abstract:
    value = visit_List(reader, node)
    if all(isinstance(constant(each), int) for each in node.elts):
        return value
    is_text = any(each.at and isinstance(each.at[0], str) for each in value.parts)
    return value.tagged("set", *(["text"] if is_text else []))


def visit_FormattedValue(reader: Interpreter, node: ast.FormattedValue) -> Abstract:
    return reader.of(node.value)


def visit_JoinedStr(reader: Interpreter, node: ast.JoinedStr) -> Abstract:
    values = tuple(map(reader.of, node.values))
    return mixed(values)._replace(parts=values)


def visit_Dict(reader: Interpreter, node: ast.Dict) -> Abstract:
    values = list(map(reader.of, node.values))
    pairs = list(zip(node.keys, values, strict=True))
    known: tuple[tuple[object, Abstract], ...] = tuple(
        (key.value, each) for key, each in pairs if isinstance(key, ast.Constant)
    )
    entries = known if len(known) == len(values) else ()
    # {**losses, ..}
    own = any(each.has("keyed") for key, each in pairs if key is None)
    value = mixed(values)._replace(count=VARIES if own else SAME, entries=entries)
    nothing = values and all(each.has("nothing", "const") for each in values)
    value = value.tagged("grows", *(f"{FILLED}{key}" for key, _ in known[:_MOST_KEYS]))
    return value.tagged("nothing") if nothing else value


def visit_ListComp(reader: Interpreter, node: Any) -> Abstract:
    """As the loop that it is."""
    name = f"[{node.lineno}:{node.col_offset}]"
    if not hasattr(node, "as_loop"):
        node.as_loop = _as_loop(node, name)
    outer = dict(reader.env)
    before = reader.turns, reader.chosen
    reader.env[name] = Abstract(count=SAME)
    reader.turns = reader.chosen = SAME
    reader.block([node.as_loop])
    value = reader.env[name]
    reader.turns, reader.chosen = before
    agreed = {key: each for key, each in reader.env.items() if each.has("agreed")}
    reader.env = {**outer, **agreed}
    return value.tagged("set") if isinstance(node, ast.SetComp) else value


visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp


def visit_BoolOp(reader: Interpreter, node: ast.BoolOp) -> Abstract:
    ends = isinstance(node.op, ast.Or)
    first = node.values[0]
    known = [reader.truth(first)]
    for each in node.values[1:]:
        if known[-1].decided is ends:
            break
        with reader.inside() as items:
            known.append(reader.truth(each))
        if items:
            condition = reader.decided_by(first, known[0], node)
            sides = ([], items) if ends else (items, [])
            reader.items.append(Branch(condition, *sides))
    left = mixed([each for each in known if each.decided is None])
    if not any(each.at for each in known):
        return left
    columns = (
        truths(value.at, text_of(each), len(reader.file.members))
        for each, value in zip(node.values, known, strict=False)
    )
    return left._replace(at=tuple(reduce(partial(both, ends=ends), columns)))


def visit_UnaryOp(reader: Interpreter, node: ast.UnaryOp) -> Abstract:
    if not isinstance(node.op, ast.Not):
        value = reader.of(node.operand)
        operation = OPERATIONS.get(type(node.op))
        return value._replace(at=applied(operation, [value.at], text_of(node)))
    value = reader.truth(node.operand)
    at = value.at and tuple(
        negated(each) if isinstance(each, Open) else not each for each in value.at
    )
    return value._replace(at=at, tags=value.tags & (knowledge.CARRIED | AGREED.tags))


def visit_BinOp(reader: Interpreter, node: ast.BinOp) -> Abstract:
    sides = [reader.of(node.left), reader.of(node.right)]
    operation = OPERATIONS.get(type(node.op))
    at = applied(operation, [each.at for each in sides], text_of(node))
    value = mixed(sides)._replace(at=at).without("gradient")
    if isinstance(node.op, ast.Add):  # of lists
        value = value._replace(count=joined(*sides).count)
    if any(each.has("set") for each in sides):
        value = value.tagged("set")
        if (
            isinstance(node.op, ast.BitAnd)
            and min(each.level for each in sides) == DATA
        ):
            value = value._replace(level=VARIES)  # what two sets of data share
    by_rank = at is None and any(map(reader.by_rank, sides))
    wraps = ["wraps"] if isinstance(node.op, ast.Mod) else []
    return value.tagged("rank", *wraps) if by_rank else value


def visit_IfExp(reader: Interpreter, node: ast.IfExp) -> Abstract:
    condition = reader.condition(node.test, node)
    asked = condition.value
    if asked.decided is not None:
        return reader.of(node.body if asked.decided else node.orelse)
    with reader.inside() as yes:
        one = reader.of(node.body)
    with reader.inside() as no:
        other = reader.of(node.orelse)
    if yes or no:
        reader.items.append(Branch(condition, yes, no))
    for each in (one, other):  # get_rank() if known else 0
        if asked.at is None and reader.file.members.differ(each.at):
            return each
    if one.has("agreed") != other.has("agreed") and asked.level != VARIES:
        return AGREED
    value = reader.either(condition, one, other)
    chosen = asked.level == VARIES and (one.at or other.at)
    return value._replace(level=VARIES).tagged("chosen") if chosen else value


def visit_Compare(reader: Interpreter, node: ast.Compare) -> Abstract:
    sides = [node.left, *node.comparators]
    if dotted(sides[1]).endswith("environ"):
        known = reader.file.source(f"${getattr(sides[0], 'value', '')}")
        there = isinstance(node.ops[0], ast.In)
        return reader.file.constant(there) if known else Abstract()
    values = list(map(reader.of, sides))
    constants = [each.value for each in sides if isinstance(each, ast.Constant)]
    first = dotted(getattr(sides[0], "target", sides[0]))
    if None in constants and _may_lack(values[0], first):
        lacks = mixed([values[0]._replace(level=VARIES)])
        lacks = lacks.tagged("rank") if lacks.has("alone") else lacks
        return lacks._replace(count=values[0].count)
    at = _compared(reader, node, values)
    if at is not None:
        return mixed(values)._replace(at=at)
    if values[0].level == DATA and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return mixed(values)._replace(level=VARIES)  # an item of this rank's data
    identity = any(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops)
    if not identity and any(map(reader.by_rank, values)):
        return tagged("rank", level=VARIES)
    if _of_form(node, values, constants):
        asked = any(isinstance(each, _BELONGING) for each in node.ops)
        own = any(each.level in (UNKNOWN, DATA) for each in values)
        return tagged("lacks") if asked and own else Abstract()
    value = mixed(values)
    itself = text_of(sides[0]) == text_of(sides[1])  # loss != loss
    if value.level == DATA and (
        itself
        or any(each.at and isinstance(each.at[0], (str, tuple)) for each in values)
        or any(isinstance(each, _COMPARING) for each in node.ops)
    ):
        value = value._replace(level=VARIES)
    # Whether it is empty, or as long as another.
    own = any(each.count == VARIES and not each.has("file") for each in values)
    return value._replace(count=VARIES if own else None).without("gradient", "next")


def _compared(
    reader: Interpreter, node: ast.Compare, values: Sequence[Abstract]
) -> tuple[Any, ...] | None:
    """What a comparison says on each member."""
    text = text_of(node)
    at: tuple[Any, ...] = (True,) * len(reader.file.members)
    for op, left, right in zip(node.ops, values, values[1:], strict=False):
        part = applied(OPERATIONS[type(op)], [left.at, right.at], text)
        if part is None:
            return None
        at = both(at, truths(part, text, 0), False)
    return at


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
        isinstance(each, int) and 1 < each < _MOST_FIELDS for each in constants
    )
    shapes = any(
        each.has("shape") and isinstance(side, ast.Attribute)
        for each, side in zip(values, sides, strict=True)
    )
    textual = any(isinstance(each, str) or each is None for each in constants)
    belongs = any(isinstance(each, _BELONGING) for each in node.ops)
    chosen = any(each.has("chosen") for each in values)  # a name that data decide
    chosen = chosen or any(map(_of_batch, values, sides))
    return fields or shapes or ((belongs or textual) and not chosen)


def _of_batch(value: Abstract, node: ast.expr) -> bool:
    """Whether it is a word that this rank's batch has: batch["task"]."""
    taken = isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice)
    return taken and value.level == DATA and bool(names_in(node) & knowledge.BATCHES)


def _level_at(value: Abstract, key: object) -> int:
    """Of what a dict has at a key: a setting's name says that it is none of its data."""
    of_setting = isinstance(key, str) and parts_of(key) & knowledge.OTHER_NAMES
    if of_setting and not value.has("batch"):
        return min(value.level, UNKNOWN)
    return value.level
