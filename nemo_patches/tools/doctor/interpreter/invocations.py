"""What a call does to the names around it: a collective, a helper, an object, a list."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from nemo_patches.tools.doctor.interpreter import calls, collectives, knowledge
from nemo_patches.tools.doctor.interpreter.expressions import attribute
from nemo_patches.tools.doctor.interpreter.functions import (
    MOST_DEEP,
    call_helper,
    items_of,
    own_function,
)
from nemo_patches.tools.doctor.interpreter.interpreter import Interpreter
from nemo_patches.tools.doctor.interpreter.names import parts_of, says
from nemo_patches.tools.doctor.interpreter.peer_messages import message_of
from nemo_patches.tools.doctor.interpreter.skeleton import (
    BACKWARD,
    FORWARD,
    GENERATE,
    LOG,
    NORM,
    UNUSED,
    WITHOUT_AGREEMENT,
    Branch,
    Choice,
    Collective,
    Inlined,
    Loop,
    Unseen,
    of_kind,
    own_collectives,
)
from nemo_patches.tools.doctor.interpreter.source_file import (
    Definition,
    function_of,
    prepares,
)
from nemo_patches.tools.doctor.interpreter.values import (
    AGREED,
    DATA,
    FILLED,
    IN_A_GROUP,
    SAME,
    UNKNOWN,
    VARIES,
    WRAPPED_AT,
    Abstract,
    joined,
    mixed,
    modules_in,
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

_MOST_WORK = 40_000  # expressions of one file


def _set_alarm(reader: Interpreter, call: calls.Call) -> None:
    """Set or clear an alarm, take or leave a lock."""
    if call.owner.has("lock") and call.last in ("acquire", "release"):
        reader.held = call.node.lineno if call.last == "acquire" else 0
    if call.origin in knowledge.FILE_LOCKS:
        reader.held = call.node.lineno if "LOCK_EX" in text_of(call.node) else 0
    last = call.node.args[-1] if call.node.args else None
    if call.origin in knowledge.ALARMS:
        reader.alarm = 0 if constant(last) == 0 else call.node.lineno


def visit_Call(reader: Interpreter, node: ast.Call) -> Abstract:
    call = call_of(reader, node)
    for each in node.args if prepares(node) else ():
        known = reader.env.get(dotted(each))
        if known is not None and known.has("unwrapped"):
            reader.env[dotted(each)] = known.without("unwrapped")
    last = last_part(call.origin)
    kind, package = knowledge.WRAPPERS.get(last, ("", ""))
    if kind and package in call.origin:
        return _wrap(reader, call, kind, last)
    if call.owner.has("one device"):
        return call.owner if last in knowledge.CONTAINERS else Abstract()
    wrapped = call.function.has("ddp", "fsdp")
    target = None if wrapped else call.function.ref
    return _lead_to(reader, own_function(reader, node) or target, call)


def _lead_to(reader: Interpreter, target: object, call: calls.Call) -> Abstract:
    """A call of what it leads to: a function of this file or another's, or one or the other."""
    node = call.node
    if isinstance(target, Choice):
        with reader.inside() as yes:
            one = _lead_to(reader, target.yes, call)
        with reader.inside() as no:
            other = _lead_to(reader, target.no, call)
        if yes or no:
            condition = replace(
                target.condition, line=node.lineno, end=node.end_lineno or 0
            )
            reader.items.append(Branch(condition, yes, no))
        return reader.either(target.condition, one, other)
    goes_on = reader.depth < MOST_DEEP and reader.file.work < _MOST_WORK
    own = target if isinstance(target, Definition) else None
    if own and goes_on:
        if function_of(own):
            return call_helper(reader, own, call, node, of=call.owner)
        if not call.function.has("instance"):
            return _make(reader, own, call)
    if isinstance(target, ast.Lambda) and goes_on:
        return _lambda(reader, target, call)
    if isinstance(target, str) and own is None:
        call = replace(call, origin=target)
    last = last_part(call.origin)
    made = collectives.collective_of(call) if own is None else None
    if made is not None:
        named = collectives.name_by_batch(call)
        if named is not None:
            reader.items.append(Branch(named, [made], []))
        if made.pairs_with == "all_to_all_single" and _own_sizes(call):
            reader.found.append(("SIZES", made, made.line))
        if made.pairs_with == BACKWARD:
            taken = [call.owner, *call.args]
            made = replace(made, modules=modules_in(mixed(taken).tags))
        agreed = _agree(reader, call, made).tagged(*modules_in(call.function.tags))
        return calls.as_layer(call, agreed)
    _of_layer(reader, call)
    _handle(reader, call)
    message = message_of(call, reader.ranges)
    if message is not None:
        reader.items.append(message)
    sounds = says(call.origin, knowledge.SOUNDS_COLLECTIVE)
    if sounds and last not in reader.file.env:
        reader.items.append(Unseen(call.name))
    if call.last in knowledge.ADDING and isinstance(node.func, ast.Attribute):
        added = _add(reader, dotted(node.func.value), call)
        _add_to_item(reader, node.func.value)
        return added
    if call.name in ("filter", "map") and len(call.args) == 2:
        return _mapped(reader, call)
    _set_alarm(reader, call)
    _state_of_metric(reader, call)
    if call.last == "register_buffer" and len(call.args) > 1:
        buffer = constant(node.args[0])
        reader.note_buffer(f"self.{buffer}", buffer, call.args[1], node.lineno)
    _update(reader, call)
    if call.last == "update" and call.owner.has("grows"):
        _add_keys(reader, call.name.removesuffix(".update"), call)
    _keep(reader, call)
    _pass_on(reader, call)
    _hand_over(reader, call)
    value = calls.called(call)
    if node.args and says(call.last, knowledge.AGREES_IN_PLACE):
        reader.agree_on(node.args[0])
    return value


def _of_layer(reader: Interpreter, call: calls.Call) -> None:
    """What ranks do together where a layer is called, in training."""
    file, tags, line = reader.file, call.function.tags, call.node.lineno
    if not reader.trained:
        return
    if file.synced_norms and "batchnorm" in tags:
        reader.emit(Collective(call.name, NORM, line, knowledge.OF_NORM))
    why = knowledge.ON_FSDP[0] if file.gathers_layers else knowledge.WEIGHTS
    for each in filter(knowledge.LAYER_AT.match, tags if file.used_whole else ()):
        reader.emit(Collective(call.name, each, line, why))


def _own_sizes(call: calls.Call) -> bool:
    """Whether this rank's data say how much the others send, which they do not know of."""
    given = {**dict(zip(knowledge.SIZES_OF, call.args, strict=False)), **call.given}
    sent = given.get("input_split_sizes", Abstract())
    sizes = given.get("output_split_sizes", sent)
    return sizes.level == VARIES and sizes.has("counted")


def _pass_on(reader: Interpreter, call: calls.Call) -> None:
    """What is given a function of this file may call it, and make its collectives."""
    for each in (*call.args, *call.given.values()):
        own = function_of(each.ref)
        items = items_of(reader, own) if own else []
        if isinstance(each.ref, ast.Lambda):
            with reader.inside() as items:
                _lambda(reader, each.ref, replace(call, args=[]))
        if any(of_kind(items, Collective)):
            reader.items.append(Unseen(own.name if own else call.name))


def _hand_over(reader: Interpreter, call: calls.Call) -> None:
    """A collective of all ranks that a thread makes, which nothing here waits for."""
    if call.last not in knowledge.THREADS or "submitit" in reader.file.imported:
        return
    waits = any(
        each.attr in knowledge.WAITS and each.lineno >= call.node.lineno
        for each in nodes(reader.definition.node, ast.Attribute)
    )
    if waits or collectives.of_a_group(call) or "parallel" not in reader.file.subjects:
        return
    line = call.node.lineno
    for each in (*call.args, *call.given.values()):
        named = collectives.named_collective(each.ref, line)
        made = [named] if named else []
        if own := function_of(each.ref):
            items = items_of(reader, own)
            every = {one.pairs_with for one in of_kind(items, Collective)}
            if not every.isdisjoint(WITHOUT_AGREEMENT):
                continue  # the thread that trains
            tested = [*own_collectives(of_kind(items, Branch))]
            made = [
                replace(one, name=own.name, line=line)
                for one in own_collectives(items)
                if not (one.of_some or one.guess or one in tested)
            ]
        for one in made[:1]:
            reader.found.append(("THREAD", one, line))


def _handle(reader: Interpreter, call: calls.Call) -> None:
    """Add a handler of this file to a logger, or run those that a record comes to."""
    method = knowledge.HANDLERS.get(call.last, "")
    if not method and call.last not in knowledge.RECORDS:
        return
    logger = str(call.owner.ref)
    given = [*call.args, *(each for one in call.given.values() for each in one.parts)]
    for each in given if method else ():
        handler = reader.file.method(each.ref, method) if each.has("instance") else None
        if handler is not None:
            where = logger.rstrip("'\")")
            reader.file.handlers[handler.node] = handler, where
    for handler, where in list(reader.file.handlers.values()):
        if call.last in knowledge.RECORDS and logger.startswith(where):
            call_helper(reader, handler, call, call.node)


def _keep(reader: Interpreter, call: calls.Call) -> None:
    """An object of another file that is given data may hold them."""
    held, _, _ = call.name.rpartition(".")
    if call.last in knowledge.TAKING and call.owner.turns == VARIES:
        taken = call.owner.tagged("taken")
        if (
            call.owner.count is None and "." in held
        ):  # what it holds varies, not how many
            taken = call.owner._replace(count=UNKNOWN)
        reader.set(held, taken)
    if call.last == "sort" and held:
        reader.set(held, call.owner.without("set"))
    name = held or call.name
    known = reader.env.get(name)
    holds = parts_of(last_part(name)) & knowledge.HOLDING
    given = (*call.args, *call.given.values())
    if known is not None and holds and mixed(given).level >= DATA:
        reader.set(name, known._replace(level=DATA))


def _lambda(reader: Interpreter, function: ast.Lambda, call: calls.Call) -> Abstract:
    if function in reader.file.being_read:
        return Abstract(UNKNOWN)
    outer = dict(reader.env)
    names = [each.arg for each in function.args.args]
    reader.env.update(zip(names, call.args, strict=False))
    reader.file.being_read.append(function)
    with reader.inside() as items:
        value = reader.truth(function.body)
    reader.file.being_read.pop()
    reader.env = outer
    if items:
        reader.items.append(Inlined(f"{call.name}()", call.node.lineno, items))
    return value


def _make(reader: Interpreter, of_class: Definition, call: calls.Call) -> Abstract:
    """An object of a class of this file: what its constructor sets."""
    made = tagged("instance")._replace(ref=of_class)
    if any(says(each, knowledge.METRICS) for each in reader.file.bases(of_class)[1]):
        made = made.tagged("metric")
    begin = reader.file.method(of_class, "__init__")
    if begin is None:
        fields = [
            each.target.id
            for each in of_class.node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        given = {**dict(zip(fields, call.args, strict=False)), **call.given}
        return made._replace(entries=tuple(given.items()))
    call_helper(reader, begin, call, call.node)
    iterates = reader.file.method(of_class, "__iter__")
    counts = reader.file.method(of_class, "__len__")
    if iterates is None and counts is not None and counts not in reader.file.being_read:
        length = reader.read(counts, {}, {}).returned
        # All ranks have the files of a folder; their shares of them have no such tag.
        own = length.level == VARIES and not length.has("file")
        return made._replace(count=VARIES) if own else made
    if iterates is None or iterates in reader.file.being_read:
        return made
    inner = reader.read(iterates, {}, {})
    if not inner.yields and inner.returned.count != VARIES:
        return made
    return made._replace(count=inner.returned.count, item=tagged("batch", level=DATA))


def call_of(reader: Interpreter, node: ast.Call) -> calls.Call:
    """Read what is called, and what it is given."""
    owner = Abstract()
    if isinstance(node.func, ast.Attribute):
        owner = reader.of(node.func.value)
        function = attribute(reader, node.func, owner)
    else:
        function = reader.of(node.func)
    return calls.Call(
        node=node,
        name=dotted(node.func),
        origin=reader.origin(dotted(node.func)),
        function=function,
        owner=owner,
        args=[reader.of(each) for each in node.args],
        given={each.arg or "": reader.of(each.value) for each in node.keywords},
        file=reader.file,
        env=reader.env,
        subjects=reader.subjects,
        in_module=reader.owner is not None and "forward" in reader.owner.methods,
    )


def _add(reader: Interpreter, name: str, call: calls.Call) -> Abstract:
    """Add to a list or a set: where data decide on it, its length is this rank's own."""
    owner = call.owner
    chosen = reader.chosen >= DATA
    added = joined(owner, mixed(call.args))._replace(at=None, item=None, parts=())
    last = call.args[-1] if call.args else Abstract()
    if isinstance(last.ref, Definition) or last.count == VARIES:
        added = added._replace(item=last)
    # A list of this function is as long as the turns in which it is added to.
    unknown = owner.count is None and "." in name
    count = None if unknown else max(owner.count or SAME, reader.turns)
    if chosen:
        count = VARIES
    added = added._replace(level=VARIES if chosen else added.level, count=count)
    added = added.tagged("set") if reader.unordered else added
    if last.has("share"):  # [items[each::world] for each in range(world)]
        added = added.tagged("dealt")
    reader.set(name, added.tagged("even") if reader.sized else added)
    if owner.has("concatenated", "listed"):
        each = owner.has("listed")
        line = call.node.lineno
        reader.emit(Collective(call.name, LOG, line, knowledge.LISTED, on_step=each))
    return Abstract()


def _state_of_metric(reader: Interpreter, call: calls.Call) -> None:
    """A list that torchmetrics gathers item by item, or, to concatenate it, if it has any."""
    if call.last != "add_state" or not call.args:
        return
    default = call.given.get("default", call.args[-1])
    if default.count is not None:
        reduced = [constant(each.value) for each in call.node.keywords]
        kind = "concatenated" if "cat" in reduced else "listed"
        reader.set(f"self.{constant(call.node.args[0])}", default.tagged(kind))


def _add_to_item(reader: Interpreter, node: ast.expr) -> None:
    """Of a dict: `lists[key].append(..)`, `lists.setdefault(key, []).append(..)`."""
    match node:
        case (
            ast.Subscript(value=whole, slice=key)
            | ast.Call(
                func=ast.Attribute(value=whole, attr="setdefault"), args=[key, _]
            )
        ):
            reader.set(dotted(whole), reader.filled(reader.of(whole), reader.of(key)))


def _add_keys(reader: Interpreter, name: str, call: calls.Call) -> None:
    """`losses.update(of_boxes)`, `losses.update(box=..)`."""
    filled = call.owner.tagged(*(f"{FILLED}{each}" for each in call.given))
    for each in call.args:
        own = ["keyed"] if each.has("keyed") else []
        keys = [tag for tag in each.tags if tag.startswith(FILLED)]
        filled = filled.tagged(*keys, *own)
        filled = filled._replace(count=VARIES) if own else filled
    reader.set(name, filled)


def _update(reader: Interpreter, call: calls.Call) -> None:
    """A tensor that is changed in place by this rank's data: `self.count.mul_(0.9).add_(new)`."""
    if not call.last.endswith("_"):
        return
    given = mixed([*call.args, *call.given.values()])
    if given.level < DATA:
        return
    node: ast.expr = call.node
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    name = dotted(node).removesuffix(".data")
    if "()" not in name and reader.file.reference(name) is None:
        known = reader.env.get(name, Abstract())
        updated = joined(known, given)._replace(count=known.count, item=None)
        reader.set(name, updated.tagged("updated"))


def _mapped(reader: Interpreter, call: calls.Call) -> Abstract:
    """`filter` and `map`."""
    function, iterated = call.args
    value = iterated._replace(count=None)
    if isinstance(function.ref, ast.Lambda):
        outer = dict(reader.env)
        item = calls.item_of(value, text_of(call.node.args[1]))
        reader.env.update((each.arg, item) for each in function.ref.args.args)
        value = reader.truth(function.ref.body)
        reader.env = outer
    elif value.has("gradient"):  # filter(None, grads)
        value = Abstract(VARIES)
    if call.last == "map":
        return value._replace(at=None, count=iterated.turns)
    count = VARIES if value.level == VARIES else iterated.turns
    return iterated._replace(level=max(value.level, iterated.level), count=count)


def _wrap_layers(reader: Interpreter, of_class: object, tags: frozenset[str]) -> None:
    """What FSDP wraps by itself of a module: the items of its ModuleLists, and of its parts'."""
    classes = [of_class]
    for each in classes:
        for node in (
            nodes(each.node, ast.Assign) if isinstance(each, Definition) else ()
        ):
            made = [dotted(call.func) for call in nodes(node.value, ast.Call)]
            if "ModuleList" in map(last_part, made):
                reader.file.wrapped[last_part(dotted(node.targets[0]))] = tags
            parts = (reader.file.env.get(name, Abstract()).ref for name in made)
            classes += [part for part in parts if part not in classes]


def _wrap(reader: Interpreter, call: calls.Call, kind: str, last: str) -> Abstract:
    node = call.node
    perhaps = ["perhaps"] if reader.branches and kind == "fsdp" else []
    engine = ["@engine"] if last == "initialize" else []
    groups = map(call.given.get, knowledge.GROUP_OF_A_WRAPPER)
    grouped = any(each and not (each.parts or each.has("nothing")) for each in groups)
    place = f"{WRAPPED_AT}{node.lineno}{IN_A_GROUP if grouped else ''}"
    given = call.args[0] if call.args else call.given.get("model", Abstract())
    own = given.has("instance")
    value = tagged(kind, *perhaps, *engine, place)
    value = value._replace(ref=given.ref if own else None)
    unused = call.given.get("find_unused_parameters", reader.file.constant(False))
    by_engine = bool(engine) and not reader.file.gathers_layers
    if own and kind == "ddp" and unused.decided is False and not by_engine:
        reader.file.used_whole = True
    if call.args and "auto_wrap_policy" in call.given:
        _wrap_layers(reader, call.args[0].ref, value.tags)
    if last != "fully_shard" or not node.args:
        return value
    # In place; and what a loop takes it from: for layer in model.layers.
    name = dotted(node.args[0])
    wrapped = [name]
    for loop in nodes(reader.definition.node, ast.For):
        if name in names_in(loop.target):
            functions = [each.func for each in nodes(loop.iter, ast.Call)]
            taken = nodes(loop.iter, ast.Name, ast.Attribute)
            wrapped += [dotted(each) for each in taken if each not in functions]
    for each in wrapped:
        reader.file.wrapped[last_part(each)] = value.tags
        if each != "self":
            reader.env[each] = reader.env.get(each, value).tagged(*value.tags)
            reader.set_here.add(each)
    return value


def _of_forward(reader: Interpreter, call: calls.Call) -> Abstract:
    """What a wrapped module gives: data, in a dict perhaps with keys of this rank's own."""
    forward = reader.file.method(call.function.ref, "forward")
    if forward is None or forward in reader.file.being_read:
        return Abstract(DATA)
    returned = call_helper(reader, forward, call, call.node)
    return returned if returned.has("keyed") else Abstract(DATA)


def _agree(reader: Interpreter, call: calls.Call, made: Collective) -> Abstract:
    """Make a collective: what it gives, and what is the same on all ranks behind it."""
    node = call.node
    last = last_part(made.name)
    if made.pairs_with == GENERATE:
        _generate(reader, node, made)
        return Abstract(DATA)
    reader.emit(made)
    if made.pairs_with in (*WITHOUT_AGREEMENT, "state_dict"):
        encodes = made.pairs_with not in (BACKWARD, "log", "state_dict")
        if made.pairs_with in (FORWARD, UNUSED):
            return _of_forward(reader, call)
        return Abstract(DATA if encodes else SAME)
    every = list(node.args)
    every += [
        each.value for each in node.keywords if each.arg not in knowledge.SETTINGS
    ]
    if last in knowledge.READING:
        _note_gathered(reader, node, last)
        into_first = last.startswith("all_") and len(every) > 1
        every = every[:1] if into_first else []
    for each in every:
        name = dotted(each)
        if "reduce" in last and not reader.env.get(name, Abstract()).has("agreed"):
            reader.reduced[name] = node.lineno
        reader.agree_on(each)
    return AGREED.tagged("group") if last in knowledge.GROUPS else AGREED


def _note_gathered(reader: Interpreter, node: ast.Call, last: str) -> None:
    """An object that may be another one on each rank, or that of which a length is gathered."""
    for each in node.args[1:2] if last.startswith("all_") else node.args[:1]:
        text = reader.meaning(each)
        lengths = re.findall(
            r"len\(([\w.]+)\)|([\w.]+)\.(?:shape\[0\]|size\(0\))", text
        )
        names = [name for pair in lengths for name in pair]
        if last.endswith("_object"):
            names += map(dotted, nodes(each, ast.Name, ast.Attribute))
        for name in names:
            if not reader.env.get(name, Abstract()).has("agreed"):
                reader.gathered[name] = node.lineno


def _generate(reader: Interpreter, node: ast.Call, made: Collective) -> None:
    """A collective that lasts as long as this rank's sequences, if ranks do not wait for each
    other.
    """
    reader.emit(replace(made, guess=""))
    for each in node.keywords:
        if each.arg == "synced_gpus" and getattr(each.value, "value", True):
            return
    condition = reader.decided_by(node.func, Abstract(VARIES), node, "for")
    with reader.inside() as turn:
        reader.emit(made)
    reader.items.append(Loop(condition, turn, []))
