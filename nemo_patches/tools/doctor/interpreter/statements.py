"""What each statement does: the names behind it, and its part of the skeleton."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nemo_patches.tools.doctor.interpreter import (
    calls,
    collectives,
    functions,
    knowledge,
)
from nemo_patches.tools.doctor.interpreter.interpreter import Interpreter
from nemo_patches.tools.doctor.interpreter.invocations import call_of
from nemo_patches.tools.doctor.interpreter.names import is_loader, parts_of
from nemo_patches.tools.doctor.interpreter.plain_python import leaves
from nemo_patches.tools.doctor.interpreter.skeleton import (
    BACKWARD,
    FORWARD,
    UNUSED,
    WITHOUT_AGREEMENT,
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
    Tried,
    around_yields,
    leaving,
    of_kind,
    own_collectives,
)
from nemo_patches.tools.doctor.interpreter.source_file import (
    Definition,
    methods_of,
)
from nemo_patches.tools.doctor.interpreter.values import (
    DATA,
    SAME,
    UNKNOWN,
    VARIES,
    Abstract,
    Environment,
    joined,
)
from nemo_patches.tools.doctor.syntax import (
    dotted,
    last_part,
    names_in,
    nodes,
    text_of,
)

_MOST_TURNED = 3  # loops in each other that are read twice
_ENDS: dict[type[ast.stmt], BlockEnd] = {
    ast.Raise: BlockEnd.RAISE,
    ast.Break: BlockEnd.BREAK,
    ast.Continue: BlockEnd.CONTINUE,
}
_ASKED = (ast.Attribute, ast.BoolOp, ast.Call, ast.Compare, ast.UnaryOp)


def statement(reader: Interpreter, node: ast.stmt) -> BlockEnd | None:
    first = len(reader.items)
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.expr):
            reader.of(each)
    end = _ENDS.get(type(node))
    raised = getattr(node, "exc", None) if isinstance(node, ast.Raise) else None
    error = dotted(getattr(raised, "func", raised)) if raised else ""
    text = f"raise {error}" if raised else ""
    if last_part(error) in knowledge.ENDS_A_TRIAL:
        end = BlockEnd.RETURN
    called = _called(node) if isinstance(node, ast.Expr) else None
    if called is not None:
        last = reader.items[-1] if reader.items else None
        if getattr(last, "name", "") == text_of(called.func):
            _unused(reader, first)
        if dotted(called.func) in knowledge.PROCESS_ENDS:
            in_order = not reader.depth and not reader.handles and _in_order(called)
            end = BlockEnd.RETURN if in_order else BlockEnd.RAISE
            text = text_of(called)
    if end is not None:
        reader.items.append(Exit(end, node.lineno, text))
    return end


def _unused(reader: Interpreter, first: int) -> None:
    """No backward pass begins at what nothing uses."""
    for number, each in enumerate(reader.items[first:], first):
        if isinstance(each, Collective) and each.pairs_with == FORWARD:
            why = knowledge.NOT_FOR_BACKWARD if each.guess else each.why
            reader.items[number] = replace(each, pairs_with=UNUSED, guess="", why=why)


def visit_FunctionDef(reader: Interpreter, node: ast.FunctionDef) -> None:
    in_module = reader.definition.node is reader.file.tree
    made = Definition(node.name, node, outer=None if in_module else reader.env)
    functions.decorate(reader, made)
    reader.env[node.name] = Abstract(ref=made)
    reader.file.definitions.append(made)


def _of_class(reader: Interpreter, of_class: ast.ClassDef, node: ast.Assign) -> None:
    """What the body of a class sets; the members of an enum are told apart by their names."""
    of_enum = any(dotted(each).endswith("Enum") for each in of_class.bases)
    value = reader.of(node.value)
    for target in node.targets:
        several = getattr(target, "elts", None)  # WARM, MAIN = range(2)
        for each in several or [target]:
            whole = f"{of_class.name}.{dotted(each)}"
            member = value
            if several or (of_enum and not value.at):
                member = reader.file.constant(whole)
            by_rank = reader.file.by_rank.get(dotted(each), member)
            if by_rank.has("signal"):  # a handler that is a method of the class sets it
                member = by_rank
            reader.env[whole] = member
            # rank: int = 0 is a default, and no object's own.
            of_object = reader.file.source(dotted(each)) or member
            own = {f"self.{dotted(each)}": of_object._replace(ref=None)}
            reader.file.of_classes.append((of_class.name, own))


def visit_ClassDef(reader: Interpreter, node: ast.ClassDef) -> None:
    made = methods_of(node)
    for each in node.body:
        if isinstance(each, ast.ClassDef):
            visit_ClassDef(reader, each)
        elif isinstance(each, ast.Assign):
            _of_class(reader, node, each)
    reader.env[node.name] = Abstract(ref=made)
    for base in reader.file.bases(made)[0][1:]:
        for name, method in base.methods.items():
            asked = {each.attr for each in nodes(method.node, ast.Attribute)}
            if name not in made.methods and asked & made.methods.keys():
                # It may call a method that is another one here.
                inherited = replace(method, name=f"{node.name}.{name}", owner=made)
                made.methods[name] = inherited
    for method in made.methods.values():
        functions.decorate(reader, method)
        reader.file.definitions.append(method)


def visit_Assign(reader: Interpreter, node: ast.Assign) -> None:
    first = len(reader.items)
    value = reader.of(node.value)
    if isinstance(getattr(node.value, "right", None), ast.Constant):  # count += 1
        value = value.tagged("const")
    for target in node.targets:
        before = len(reader.items)
        reader.assign(target, value)
        items = reader.items[before:]
        if items and (value.level == VARIES or reader.by_rank(value)):
            # A setting of all ranks, which a rank's own value is given to.
            asked = reader.decided_by(node.value, value, node)
            reader.items[before:] = [Branch(asked, items, [])]
        if isinstance(target, ast.Name) and isinstance(node.value, _ASKED):
            reader.meanings[target.id] = reader.meaning(node.value)
    if all(
        isinstance(each, ast.Name) and each.id not in reader.file.loaded
        for each in node.targets
    ):
        _unused(reader, first)
    for target in node.targets if reader.runs_backward else ():
        name = dotted(target)
        nothing = value.has("nothing")
        reader.items.append(Assigned(name, node.lineno, text_of(node), nothing))


def visit_If(reader: Interpreter, node: ast.If) -> BlockEnd | None:
    condition = reader.condition(node.test, node)
    decided = condition.value.decided
    if decided is not None:
        return reader.block(node.body if decided else node.orelse)
    before = reader.env
    chosen = SAME
    if condition.value.level == VARIES and not condition.value.has("file"):
        chosen = DATA if condition.value.has("gradient") else VARIES
    reader.branches += 1
    apart = reader.apart
    reader.apart |= reader.by_rank(condition.value)
    meanings = reader.meanings
    yes, left, taken = _side(reader, node.body, before, chosen, _ends(node.orelse))
    of_yes = reader.meanings
    reader.meanings = meanings
    no, left_too, other = _side(reader, node.orelse, before, chosen, _ends(node.body))
    common = of_yes.items() & reader.meanings.items()
    reader.meanings = dict(common)
    reader.apart = apart
    reader.branches -= 1
    reader.items.append(Branch(condition, yes, no))
    if (left is None) != (left_too is None):
        reader.env = taken if left is None else other
        skips = BlockEnd.CONTINUE in (left, left_too)
        if skips and reader.parts_keys(condition):
            reader.env = reader.of_own_keys(reader.env, before)
        return None
    reader.env = _merged(reader, condition, before, taken, other)
    return left_too if left is BlockEnd.RAISE else left


def _side(
    reader: Interpreter,
    body: Sequence[ast.stmt],
    before: Environment,
    chosen: int,
    alone: bool = False,
) -> tuple[Items, BlockEnd | None, Environment]:
    """chosen: how surely data decide that it is this one: DATA of what ranks mostly agree in.
    alone: whether nobody goes on behind the other one.
    """
    reader.env = dict(before)
    reader.meanings = dict(reader.meanings)
    outer = reader.chosen, reader.parted
    reader.parted = max(reader.parted, chosen)
    reader.chosen = max(reader.chosen, SAME if alone else chosen)
    with reader.inside() as items:
        end = reader.block(body)
    reader.chosen, reader.parted = outer
    return items, end, reader.env


def _merged(
    reader: Interpreter,
    condition: Decision,
    before: Environment,
    env: Environment,
    other: Environment,
) -> Environment:
    """The names behind a branch. What a group has agreed on is the same: without a group there
    are no others.
    """
    nothing = Abstract()
    merged = {**other, **env}
    unlike = [name for name in merged if env.get(name) is not other.get(name)]
    agree = {
        side
        for name in unlike
        for side, here in enumerate((env, other))
        if (each := here.get(name, nothing)) is not before.get(name)
        and each.has("agreed")
    }
    agreeing = (
        len(agree) == 1 and condition.value.level != VARIES and "%" not in condition.key
    )
    side = min(agree, default=0)
    for name in unlike:
        pair = env.get(name, nothing), other.get(name, nothing)
        mine, theirs = pair[side], pair[1 - side]
        if agreeing and (mine.has("agreed") or mine.level < theirs.level):
            merged[name] = mine
        else:
            merged[name] = reader.either(condition, *pair, name)
    return merged


def visit_While(reader: Interpreter, node: ast.While) -> None:
    endless = isinstance(node.test, ast.Constant)
    asked = [reader.condition(node.test, node)]
    sized = reader.sized
    reader.sized |= asked[0].value.has("sized")
    often = VARIES if asked[0].value.level == VARIES else SAME
    items = _turns(reader, node, often, endless=endless)
    reader.sized = sized
    asked.append(reader.condition(node.test, node))
    _filled_up(reader, node.test)
    condition = max(asked, key=lambda each: each.value.level)
    _loop(reader, condition, items, node, endless=endless)


def _draws_keys(node: ast.For, iterated: Sequence[ast.AST]) -> bool:
    """Whether a loop takes keys, by which it asks the same dict: the fields of a batch."""
    asked = {f"{text_of(each)}[{text_of(node.target)}]" for each in iterated}
    return any(text_of(each) in asked for each in nodes(node, ast.Subscript))


def _filled_up(reader: Interpreter, test: ast.expr) -> None:
    """Behind `while len(items) < number`, the list has a number of items that all know."""
    match test:
        case ast.Compare(
            left=ast.Call(func=ast.Name(id="len"), args=[items]),
            ops=[ast.Lt() | ast.NotEq()],
            comparators=[number],
        ) if reader.of(number).level == SAME:
            reader.set(dotted(items), reader.of(items)._replace(count=SAME))


def visit_For(reader: Interpreter, node: ast.For) -> None:
    iterated = reader.of(node.iter)
    if iterated.has("object") and iterated.has("rank"):  # a loader that shares out
        iterated = iterated._replace(level=SAME).without("rank")
    whole = [node.iter, *getattr(node.iter, "args", [])]  # enumerate(data)
    of_keys = not iterated.has("keyed") and _draws_keys(node, whole)
    if of_keys:
        iterated = iterated._replace(count=SAME)
    generator = _generator(reader, iterated)
    before, behind = _generated(generator, node) if generator else ([], [])
    if generator and generator.returned.count == VARIES:
        iterated = iterated._replace(count=VARIES)
    reader.items += before
    loads = is_loader(text_of(node.iter)) or "data" in map(dotted, whole)
    if iterated.turns == DATA and loads:
        iterated = iterated._replace(count=UNKNOWN)
    level = VARIES if iterated.turns >= DATA else SAME
    value = iterated._replace(level=level, at=None)
    condition = reader.decided_by(node.iter, value, node, "for", text_of(node.iter))
    if iterated.at is not None and isinstance(node.target, ast.Name):
        reader.ranges[node.target.id] = condition.key, iterated.at
    drawn = calls.item_of(iterated, text_of(node.iter)).tagged("drawn")
    if of_keys:
        drawn = Abstract()
    keys = last_part(dotted(getattr(node.iter, "func", node))) in ("items", "keys")
    of_items = iterated.level >= DATA and drawn.level >= DATA and not keys
    of_items = of_items and not is_loader(text_of(node.iter))
    reader.of_items += of_items
    of_files = iterated.count is None and iterated.has("file")
    outer = reader.unordered
    reader.unordered = iterated.has("set")
    items = _turns(reader, node, SAME if of_files else iterated.turns, drawn)
    reader.unordered = outer
    reader.of_items -= of_items
    reader.ranges.pop(getattr(node.target, "id", ""), None)
    _loop(reader, condition, items, node, behind=behind)
    if iterated.has("set"):
        named = parts_of(text_of(node.target)) & knowledge.TEXTS
        is_text = named or iterated.has("text")
        guess = "" if is_text else "its items are no numbers"
        for each in _made_with(node, items):
            own = "" if each.grouped else each.guess
            made = replace(each, guess=own or guess)
            reader.found.append(("SET", made, node.lineno))


def _generator(reader: Interpreter, iterated: Abstract) -> Interpreter | None:
    """The generator of this file that a loop takes its items from."""
    made = iterated.ref
    if iterated.has("instance"):
        made = reader.file.method(made, "__iter__")
    if not iterated.has("generator", "instance") or not isinstance(made, Definition):
        return None
    return functions.read_alone(reader, made)


def _generated(made: Interpreter, node: ast.For) -> list[list[Inlined]]:
    """What a generator makes before a loop over it, and with the next turns."""
    name = f"{last_part(made.definition.name)}()"
    parts = around_yields(made.items)
    called = [Inlined(name, node.lineno, each) for each in parts]
    return [[each] if any(of_kind(each.body, Collective)) else [] for each in called]


def _made_with(node: ast.For, items: Items) -> list[Collective]:
    """The collectives of a loop's body that are given its item, or what is made of it."""
    names = names_in(node.target)
    for each in nodes(node, ast.AST):
        match each:
            case ast.Assign(targets=targets, value=source):
                pass
            case ast.For(target=target, iter=source):
                targets = [target]
            case ast.NamedExpr(target=target, value=source):
                targets = [target]
            case _:
                continue
        if names & names_in(source):
            names = names.union(*map(names_in, targets))
    calls_of = nodes(node, ast.Call)
    given = {each.lineno for each in calls_of if names & names_in(each)}
    return [each for each in own_collectives(items) if each.line in given]


def _turns(
    reader: Interpreter,
    node: ast.For | ast.While,
    often: int = SAME,
    drawn: Abstract | None = None,
    *,
    endless: bool = False,
) -> Items:
    """What a turn makes. often: how surely ranks differ in how many there are."""
    turns = reader.turns
    reader.turns = max(turns, often)
    reader.loops += 1
    # What a turn sets may be asked for in the next one.
    for _ in range(2 if reader.loops <= _MOST_TURNED else 1):
        before = dict(reader.env)
        changed = False
        with reader.inside() as items:
            if drawn is not None and isinstance(node, ast.For):
                reader.assign(node.target, drawn)
            reader.block(node.body)
        left = [each.value for each in leaving(items)]
        if any(each.level == VARIES and not each.has("next") for each in left):
            changed = reader.turns != VARIES
            reader.turns = VARIES
        for name, value in before.items():
            now = reader.env.get(name, value)
            if now == value:
                continue
            changed = True
            if not endless and not now.has("agreed"):
                reader.env[name] = joined(value, now)
        if not changed:
            break
    reader.loops -= 1
    reader.turns = turns
    return items


def _loop(
    reader: Interpreter,
    condition: Decision,
    items: Items,
    node: ast.For | ast.While,
    *,
    endless: bool = False,
    behind: Sequence[Item] = (),
) -> None:
    with reader.inside() as last:
        reader.items += behind
        reader.block(node.orelse)
    first = node.orelse[0].lineno if node.orelse else 0
    if first > node.body[-1].lineno:  # which is not in the loop
        condition = replace(condition, end=first - 1)
    reader.items.append(Loop(condition, items, last, endless))


def _nexts(body: Sequence[ast.stmt]) -> Iterator[ast.Call]:
    for statement in body:
        for each in nodes(statement, ast.Call):
            if dotted(each.func) == "next" and len(each.args) == 1:
                yield each


def visit_Try(reader: Interpreter, node: ast.Try) -> BlockEnd | None:
    before = dict(reader.env)
    with reader.inside() as body:
        end = reader.block(node.body)
    with reader.inside() as orelse:
        end = end or reader.block(node.orelse)
    handlers = []
    after = reader.env
    drawn = [each for name, each in after.items() if each is not before.get(name)]
    with (
        reader.inside()
    ):  # also of what is made something of at once: next(batches).to(device)
        drawn += [reader.of(each) for each in _nexts(node.body)]
    # Some ranks' iterators have ended.
    unlike = any(each.has("next") and each.count == VARIES for each in drawn)
    for each in node.handlers:
        condition = _of_handler(each, node, reader.apart or unlike)
        old = {
            name: joined(value, after[name])
            for name, value in before.items()
            if name in after
        }
        handles = reader.handles
        reader.handles = True
        level = condition.value.level
        items, left, _ = _side(reader, each.body, {**after, **old}, level)
        reader.handles = handles
        handlers.append((condition, items))
        if left is None:
            known = {
                # What is told of ranks holds where there are several, and there is no error.
                name: value
                if value.at and not value.has("const", "nothing")
                else joined(value, reader.env.get(name, value))
                for name, value in after.items()
            }
            after = {**reader.env, **known}
    reader.env = after
    with reader.inside() as final:
        last = reader.block(node.finalbody)
    reader.items.append(
        Tried(
            body=body,
            handlers=handlers,
            orelse=orelse,
            final=final,
            first=_first_call(node.body),
            harmless=_harmless(reader, node.body),
        )
    )
    return last or (None if node.handlers else end)


def _harmless(reader: Interpreter, body: Sequence[ast.stmt]) -> bool:
    """Whether nothing is tried but collectives and what torch makes for them: their errors are
    all ranks'.
    """
    agreements = 0
    for each in (call for statement in body for call in nodes(statement, ast.Call)):
        with reader.inside():
            call = call_of(reader, each)
        made = collectives.collective_of(call)
        others = {*WITHOUT_AGREEMENT, *knowledge.RUNNING}
        if made is not None and made.pairs_with not in others:
            agreements += 1
            continue
        origin = call.origin
        if not origin.startswith("torch.") and origin not in knowledge.HARMLESS:
            return False
    return agreements > 0


def visit_Return(reader: Interpreter, node: ast.Return) -> BlockEnd:
    value = reader.file.constant(None) if node.value is None else reader.of(node.value)
    if reader.runs_backward and value.has("new"):  # backward raises at once
        reader.items.append(Exit(BlockEnd.RAISE, node.lineno))
        return BlockEnd.RAISE
    if reader.runs_backward and not value.has("nothing", "const"):
        why = "in which the gradients are reduced"
        of = dotted(node.value) if node.value else ""
        made = Collective("the backward pass", BACKWARD, node.lineno, why, of=of)
        reader.emit(made)
    hook, ends, why = knowledge.ENDS_EPOCH
    if last_part(reader.definition.name) == hook and set(value.at or ()) == {ends}:
        reader.emit(Collective(f"return {ends}", hook, node.lineno, why))
    reader.env["return"] = value
    if (
        reader.run_managed is None
    ):  # a context manager's own return ends no block of another
        reader.items.append(Exit(BlockEnd.RETURN, node.lineno))
    return BlockEnd.RETURN


def _ends(body: list[ast.stmt]) -> bool:
    """Whether nothing of a function or its loop is come to behind a block, in no turn either."""
    return leaves(body) and not isinstance(body[-1], ast.Continue)


def _called(node: ast.Expr) -> ast.Call | None:
    """The call of a statement that uses nothing of it: `model(x).sum() * 0`."""
    inner: ast.expr = node.value
    while isinstance(inner, (ast.Attribute, ast.BinOp, ast.Subscript)):
        inner = inner.left if isinstance(inner, ast.BinOp) else inner.value
    return inner if isinstance(inner, ast.Call) else None


def _in_order(leaving: ast.Call) -> bool:
    """Whether a process ends without an error, for which its launcher ends no other."""
    code = leaving.args[0] if leaving.args else ast.Constant(0)
    said = isinstance(code, ast.Constant) and code.value in (0, None)
    return said and dotted(leaving.func).endswith("exit")


def _of_handler(node: ast.ExceptHandler, tried: ast.Try, apart: bool) -> Decision:
    """Whether it takes errors of one rank's batch or memory, or those that all ranks share, as
    those of imports are. apart: some ranks alone come there, and share theirs with nobody.
    """
    imports = isinstance(tried.body[0], (ast.Import, ast.ImportFrom))
    types = getattr(node.type, "elts", [node.type])
    kinds = {last_part(dotted(each)) for each in types if each is not None}
    text = text_of(node.type) if node.type else "any error"
    of_all = ((kinds and kinds <= knowledge.ALL_RANKS) or imports) and not apart
    return Decision(
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
        if isinstance(each, ast.If) and isinstance(each.body[0], ast.With):
            return _first_call(each.body)  # a with of what a test chooses
        if isinstance(each, ast.With):
            return _first_call(each.body)
        if isinstance(each, (ast.For, ast.While)):
            return each.lineno  # what a turn makes, later ones would, too
        if any(nodes(each, ast.Call)):
            return each.end_lineno or 0
    return 0
