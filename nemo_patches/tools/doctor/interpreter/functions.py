"""Helpers of the same file: what they are given, return and agree on; their decorators."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from nemo_patches.tools.doctor.interpreter import calls, collectives, knowledge
from nemo_patches.tools.doctor.interpreter.interpreter import Interpreter
from nemo_patches.tools.doctor.interpreter.skeleton import (
    Branch,
    Collective,
    Inlined,
    Items,
    inside,
    of_kind,
    own_collectives,
)
from nemo_patches.tools.doctor.interpreter.source_file import (
    Definition,
    function_of,
    is_decorated,
    is_property,
)
from nemo_patches.tools.doctor.interpreter.values import (
    DATA,
    UNKNOWN,
    VARIES,
    WRAPPED_AT,
    Abstract,
    Environment,
    mixed,
    modules_in,
)
from nemo_patches.tools.doctor.syntax import (
    dotted,
    last_part,
    text_of,
)

MOST_DEEP = 6  # helpers that call each other
_MOST_OF_A_HELPER = 200  # items, with those of its own helpers
_NO_OBJECT = Abstract()
# For what a decorator is given: what is computed by it tells so by its tag.
_SOME_COLLECTIVE = Abstract(
    ref="torch.distributed.barrier", tags=frozenset({f"{WRAPPED_AT}0"})
)


def own_function(reader: Interpreter, node: ast.Call) -> Definition | None:
    """The function of this file that a call leads to."""
    name = dotted(node.func)
    holder_name, _, last = name.rpartition(".")
    holder = reader.env.get(holder_name, Abstract())
    if holder_name in ("super()", "self", "cls") or name == "self":
        beyond = holder_name == "super()"
        own = last if holder_name else "forward"
        found = reader.file.method(reader.owner, own, beyond=beyond)
        if found or beyond:
            return None if found and is_property(found) else found
    if holder.has("metric") and last == "compute":
        return None  # torchmetrics runs it between two of its own collectives
    if isinstance(holder.ref, Definition) and holder.ref.methods:
        return reader.file.method(holder.ref, last)
    known = reader.env.get(name, Abstract())
    if known.has("instance"):
        called = reader.file.method(known.ref, "__call__")
        called = called or reader.file.method(known.ref, "forward")
        return None if known.has("ddp", "fsdp") else called
    return function_of(known.ref)


def call_helper(
    reader: Interpreter,
    called: Definition,
    call: calls.Call | None,
    node: ast.Call | ast.Attribute,
    of: Abstract = _NO_OBJECT,
) -> Abstract:
    """A helper of this file, read with what it is given. call: None of a property. of: the object
    that it is a method of.
    """
    if called in reader.file.being_read or manages(called):
        return Abstract(UNKNOWN)
    given = {} if call is None else given_by(called, call)
    alone = bool(one_rank(reader, called))
    outer = reader.apart
    reader.apart |= alone
    for parameter, value in given.items():
        seen = reader.file.given.setdefault(called, {})
        # Of what all ranks agreed on, some ranks alone are told here.
        told = value.without("agreed").tagged("apart") if reader.apart else value
        seen.setdefault(parameter, []).append(told)
    reader.file.calls_joined.setdefault(called.node, set()).add(reader.joined)
    of_self = reader.owner is not None and called.owner is reader.owner
    own = attributes_in(reader.env) if of_self else {}
    fields = {f"self.{name}": each for name, each in of.entries}
    inner = summary(reader, called, {**fields, **given}, own)
    reader.apart = outer
    returned = _by_wrappers(reader, called, node, inner.returned)
    if alone:
        return returned
    if inner.items and not inner.yields:
        guess = collectives.guess_of_helper(called, call, reader.file)
        items = inner.items
        if any(islice(inside(items), _MOST_OF_A_HELPER, None)):  # they are one
            items = list(islice(of_kind(items, Collective), 1))
        name = text_of(node) if call is None else f"{text_of(call.node.func)}()"
        inlined = Inlined(name, node.lineno, items, guess)
        kept = is_decorated(called, "cache") and any(
            each.level >= DATA for each in given.values()
        )
        if kept and any(of_kind(items, Collective)):
            text = f"what the cache of {called.name} has"
            asked = reader.decided_by(node, Abstract(VARIES), node, key=text)
            reader.items.append(Branch(asked, [], [inlined]))
        else:
            reader.items.append(inlined)
        for each in own_collectives([inlined]):
            reader.note_what_is_set(each)
    if inner.alarm is not None:
        reader.alarm = inner.alarm
    for parameter, expression in _passed(called, call):
        for lines, inner_lines in (
            (reader.gathered, inner.gathered),
            (reader.reduced, inner.reduced),
        ):
            if parameter in inner_lines:
                lines[dotted(expression)] = node.lineno
        after = inner.env.get(parameter, Abstract())
        before = given.get(parameter, Abstract())
        if after.has("agreed") and not before.has("agreed"):
            reader.agree_on(expression)
        if after.has("updated") and not before.has("updated"):
            reader.set(dotted(expression), after)
    if called.owner and not of_self:
        _keep_set(reader, called.owner, inner)
    if of_self:
        reader.found += [
            (kind, replace(made, line=node.lineno), node.lineno)
            for kind, made, _ in inner.found
            if kind == "BUFFER"
        ]
    if of_self:
        own = attributes_in(inner.env)
        reader.env.update(own)
        filled = {name for name, each in own.items() if each.has("grows", "updated")}
        reader.set_here |= filled
    return returned


def _by_wrappers(
    reader: Interpreter,
    called: Definition,
    node: ast.Call | ast.Attribute,
    value: Abstract,
) -> Abstract:
    """What a function of this value gives, after its decorators' own collectives: what ranks have
    agreed on, if these return that and not the function's value.
    """
    name = f"{text_of(getattr(node, 'func', node))}()"
    for each in called.node.decorator_list:
        made = _wrapper(reader, each)
        if made is None:
            continue
        outer = made.definition.outer or {}
        # What it calls the function.
        own = {one for one in outer if outer[one].tags >= _SOME_COLLECTIVE.tags}
        every = of_kind(made.items, Collective)
        others = [one for one in every if one.name not in own]
        if others:
            reader.items.append(Inlined(name, node.lineno, [*others]))
        if made.returned.has("agreed") and not modules_in(made.returned.tags):
            value = made.returned
    return value


def _keep_set(reader: Interpreter, owner: Definition, inner: Interpreter) -> None:
    """What a method sets of an object: where some ranks alone call it, the others have the old
    values.
    """
    apart = reader.apart and reader.file.calls[owner.name] < 2  # the only object
    if apart or inner.definition.name.endswith(".__init__"):
        kept = as_kept(inner.attributes_set, alone=apart)
        reader.file.of_classes.append((owner.name, kept))


def as_kept(attributes: Environment, *, alone: bool) -> Environment:
    """What attributes are behind a method. alone: which some ranks alone call."""
    if not alone:
        return attributes
    return {
        name: each._replace(level=VARIES, at=None).tagged("alone")
        for name, each in attributes.items()
    }


def items_of(reader: Interpreter, own: Definition) -> Items:
    """What a function of this file makes, whatever it is given."""
    made = read_alone(reader, own)
    return made.items if made else []


def read_alone(reader: Interpreter, own: Definition) -> Interpreter | None:
    if own in reader.file.being_read or reader.depth >= MOST_DEEP:
        return None
    return summary(reader, own, {}, {})


def summary(
    reader: Interpreter,
    called: Definition,
    given: Mapping[str, Abstract],
    own: Mapping[str, Abstract],
) -> Interpreter:
    """Each is read once for what it is given."""
    context = reader.apart, reader.trained, reader.joined, reader.unsynced
    key = called, tuple(given.items()), tuple(own.items()), context
    if key not in reader.file.summaries:
        reader.file.summaries[key] = reader.read(called, given, own)
    inner: Interpreter = reader.file.summaries[key]
    return inner


def one_rank(reader: Interpreter, definition: Definition) -> str:
    """What runs a function on one rank only: a decorator, or Lightning; empty if none."""
    for node in getattr(definition.node, "decorator_list", ()):
        name = reader.file.origin(dotted(getattr(node, "func", node)))
        made = _wrapper(reader, node)
        if last_part(name) in knowledge.ONE_RANK or (
            made is not None and _parts_ranks(reader, made.items)
        ):
            return f"@{text_of(node)}"
    prepares = definition.name.endswith(".prepare_data")
    return "prepare_data" if prepares and "lightning" in reader.subjects else ""


def decorated_alarm(reader: Interpreter) -> int | None:
    """The line of a decorator that runs the function under an alarm."""
    for node in getattr(reader.definition.node, "decorator_list", ()):
        made = _wrapper(reader, node)
        if made is not None and _is_alarmed(made):
            return int(node.lineno)
    return None


def _is_alarmed(made: Interpreter) -> bool:
    return any(kind == "ALARM" for kind, _, _ in made.found)


def decorate(reader: Interpreter, function: Definition) -> None:
    """Read what a decorator of this file does with a function: add it to a table, or run it."""
    for node in reversed(getattr(function.node, "decorator_list", ())):
        made = _wrapper(reader, node)
        if made and (_is_alarmed(made) or _parts_ranks(reader, made.items)):
            continue
        own = _decorator(reader, node)
        args = getattr(getattr(own, "node", None), "args", None)
        if args is None or not args.args or own in reader.file.being_read:
            continue
        inner = reader.read(own, {args.args[0].arg: Abstract(ref=function)}, {})
        for name, kept in inner.env.items():
            fills = (kept.entries or kept.item) and "." not in name
            if fills and name in reader.env:
                reader.env[name] = kept


def _wrapper(reader: Interpreter, decorator: ast.expr) -> Interpreter | None:
    """What a decorator of this file runs in a function's place, which is a collective here."""
    known: Any = reader.file.summaries
    if decorator not in known:
        known[decorator] = None  # while it is read
        before = len(reader.file.definitions)
        known[decorator] = _run_by(reader, _decorator(reader, decorator))
        del reader.file.definitions[before:]  # it is no function of the file's
    made: Interpreter | None = known[decorator]
    return made


def _decorator(reader: Interpreter, node: ast.expr) -> Any:
    """The function of this file that a decorator is; None of others."""
    name = reader.file.origin(dotted(getattr(node, "func", node)))
    own = reader.file.env.get(name, Abstract()).ref
    if isinstance(node, ast.Call) and isinstance(own, Definition):
        args = map(reader.of, node.args)
        by_name = {each.arg or "": reader.of(each.value) for each in node.keywords}
        given = {**dict(zip(_parameters(own), args, strict=False)), **by_name}
        own = _returned(reader, own, given) or own
    return own


def _run_by(reader: Interpreter, decorator: object) -> Interpreter | None:
    args = getattr(getattr(decorator, "node", None), "args", None)
    if args is None or not args.args:
        return None
    given = {args.args[0].arg: _SOME_COLLECTIVE}
    made = _returned(reader, decorator, given)
    return reader.read(made, {}, {}) if made else None


def _returned(
    reader: Interpreter, called: Any, given: Mapping[str, Abstract]
) -> Definition | None:
    """The function that a function of this file returns."""
    if not function_of(called) or called in reader.file.being_read:
        return None
    return function_of(reader.read(called, given, {}).returned.ref)


def _parts_ranks(reader: Interpreter, items: Items) -> bool:
    """Whether a collective is made on one side of a test on the rank only."""
    return any(
        reader.by_rank(each.condition.value)
        and any(of_kind(each.yes, Collective)) != any(of_kind(each.no, Collective))
        for each in of_kind(items, Branch)
    )


def given_by(called: Definition, call: calls.Call) -> dict[str, Abstract]:
    """What a call gives, by the names of the parameters."""
    args: list[Abstract] = []
    for each, node in zip(call.args, call.node.args, strict=True):
        args += each.parts if isinstance(node, ast.Starred) and each.parts else [each]
    if called.owner and [dotted(each) for each in call.node.args[:1]] == ["self"]:
        args = args[1:]  # a method by its function
    names = _parameters(called)
    given = {**dict(zip(names, args, strict=False)), **call.given}
    vararg = called.node.args.vararg
    if vararg:
        rest = tuple(args[len(names) :])
        given[vararg.arg] = mixed(rest)._replace(parts=rest)
    return given


def manages(definition: Definition) -> bool:
    return is_decorated(definition, "contextmanager")


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
    static = is_decorated(definition, "staticmethod")
    return names[1:] if definition.owner and not static else names


def attributes_in(env: Mapping[str, Abstract]) -> Environment:
    return {name: value for name, value in env.items() if name.startswith("self.")}
