"""The block of a with statement, read in the middle of its context manager."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from nemo_patches.tools.doctor.interpreter import knowledge
from nemo_patches.tools.doctor.interpreter.functions import (
    MOST_DEEP,
    attributes_in,
    given_by,
    manages,
    own_function,
)
from nemo_patches.tools.doctor.interpreter.interpreter import Interpreter
from nemo_patches.tools.doctor.interpreter.invocations import call_of
from nemo_patches.tools.doctor.interpreter.names import says
from nemo_patches.tools.doctor.interpreter.skeleton import (
    BlockEnd,
    Branch,
    Collective,
    Inlined,
    Items,
    of_kind,
)
from nemo_patches.tools.doctor.interpreter.source_file import (
    Definition,
)
from nemo_patches.tools.doctor.interpreter.values import (
    Abstract,
)
from nemo_patches.tools.doctor.syntax import dotted, last_part


def visit_With(reader: Interpreter, node: ast.With) -> BlockEnd | None:
    return _with(reader, node, list(node.items))


def _with(
    reader: Interpreter, node: ast.With, items: list[ast.withitem]
) -> BlockEnd | None:
    """Its items one in another."""
    if not items:
        return reader.block(node.body)
    item, *inner = items
    manager = _manager(reader, item.context_expr)
    if manager is not None:
        assert isinstance(item.context_expr, ast.Call)
        given = given_by(manager, call_of(reader, item.context_expr))
        return _managed(reader, node, item, inner, manager, given)
    outer = reader.unsynced, reader.joined, reader.held, reader.trained
    value = reader.of(item.context_expr)
    if value.has("lock"):
        reader.held = node.lineno
    enters = (
        reader.file.method(value.ref, "__enter__") if value.has("instance") else None
    )
    if enters is not None and enters not in reader.file.being_read:
        return _managed(reader, node, item, inner, enters, {}, value)
    text = reader.meaning(item.context_expr)
    reader.unsynced |= "no_sync(" in text
    reader.joined |= says(text, knowledge.JOINS)
    reader.trained &= not says(text, knowledge.WITHOUT_GRADIENTS)
    if item.optional_vars is not None:
        reader.assign(item.optional_vars, value)
    with reader.inside() as body:
        end = _with(reader, node, inner)
    reader.unsynced, reader.joined, reader.held, reader.trained = outer
    name = dotted(getattr(item.context_expr, "func", node))
    if last_part(name) in knowledge.FIRST and any(of_kind(body, Collective)):
        first = reader.of(ast.Name("is_main_process"))
        asked = reader.decided_by(item.context_expr, first, node)
        waits = Collective(name, "barrier", node.lineno)
        body = [Branch(asked, [*body, waits], [waits, *body])]
    reader.items += body
    return end


def _manager(reader: Interpreter, node: ast.expr) -> Definition | None:
    """The context manager of this file that a call makes, as a generator."""
    own = own_function(reader, node) if isinstance(node, ast.Call) else None
    if own is None or own in reader.file.being_read or reader.depth >= MOST_DEEP:
        return None
    return own if manages(own) else None


def _managed(
    reader: Interpreter,
    node: ast.With,
    item: ast.withitem,
    inner: list[ast.withitem],
    manager: Definition,
    given: Mapping[str, Abstract],
    entered: Abstract | None = None,
) -> BlockEnd | None:
    """A block in the generator that is its context manager, at the yield. entered: the object
    that is one, which the block is given.
    """
    own = attributes_in(reader.env) if manager.owner is reader.owner else {}
    env = {**reader.file.start(manager, given), **own}
    within = Interpreter(reader.visitors, reader.file, manager, env, reader.depth + 1)
    ends: list[BlockEnd | None] = []

    def run(value: Abstract) -> Items:
        if item.optional_vars is not None:
            reader.assign(item.optional_vars, entered or value)
        outer = reader.alarm, reader.held
        reader.alarm = within.alarm or reader.alarm
        reader.held = within.held or reader.held
        with reader.inside() as items:
            ends.append(_with(reader, node, inner))
        reader.alarm, reader.held = outer
        return items

    within.run_managed = run
    reader.file.being_read.append(manager)
    within.block(manager.node.body)
    reader.file.being_read.pop()
    name = manager.owner.name if manager.owner and entered else manager.name
    made = Inlined(f"{name}()", node.lineno, within.items, manages=True)
    reader.items.append(made)
    end = ends[-1] if ends else None
    return None if end is BlockEnd.RAISE else end
