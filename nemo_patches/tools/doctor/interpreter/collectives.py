"""Which call is a collective, and of which ranks."""

from __future__ import annotations

import ast
import re

from nemo_patches.tools.doctor.interpreter import knowledge
from nemo_patches.tools.doctor.interpreter.calls import Call
from nemo_patches.tools.doctor.interpreter.names import says
from nemo_patches.tools.doctor.interpreter.skeleton import (
    FORWARD,
    LOG,
    Collective,
    Decision,
)
from nemo_patches.tools.doctor.interpreter.source_file import Definition, SourceFile
from nemo_patches.tools.doctor.interpreter.values import (
    DATA,
    VARIES,
    Abstract,
    modules_in,
)
from nemo_patches.tools.doctor.syntax import (
    dotted,
    last_part,
    names_in,
    nodes,
    text_of,
)


def collective_of(call: Call) -> Collective | None:
    """The collective that a call is; None of a group that may have some ranks only."""
    name = call.name
    last = "forward" if name == "self" else last_part(call.origin)
    if name in knowledge.LOGS:
        return _logged(call)
    rows = knowledge.ROWS.get(last, ())
    subjects = _subjects(call) if rows else frozenset[str]()
    for row in rows:
        if any(_owns(each, call.origin, subjects) for each in row.owners):
            if _of_unwrapped(call):
                return None
            grouped = "gathers sharded" not in row.why and of_a_group(call)
            if grouped and says(_text_of_group(call), knowledge.ALONE_OR_ALIKE):
                return None
            whole = text_of(call.node.func) if name.startswith("()") else name
            kind = row.pairs_with or last
            return Collective(
                name=whole,
                pairs_with=f"{kind} in a group" if grouped else kind,
                line=call.node.lineno,
                why=row.why,
                guess=knowledge.IN_A_GROUP if grouped else row.guess,
                grouped=grouped,
            )
    return _of_wrapped(call)


def named_collective(name: object, line: int) -> Collective | None:
    """One of torch.distributed, by its whole name."""
    for row in knowledge.ROWS.get(last_part(str(name)), ()):
        owners = [each for each in row.owners if each.startswith("torch.")]
        if any(str(name).startswith(each) for each in owners):
            return Collective(str(name), last_part(str(name)), line)
    return None


def _text_of_group(call: Call) -> str:
    """What says which ranks a call is made by; not what it is given to send."""
    args = [
        each
        for each, value in zip(call.node.args, call.args, strict=True)
        if value.has("group") or says(text_of(each).lower(), knowledge.GROUP_NAME)
    ]
    return " ".join(map(ast.unparse, (call.node.func, *args, *call.node.keywords)))


def _subjects(call: Call) -> frozenset[str]:
    """What a method's owner is: by its whole name (=a.b) and the words in it (@word), by its value,
    and by its file and class.
    """
    named = call.origin if call.origin.startswith("super()") else call.name
    full = "self" if named == "self" else named.rpartition(".")[0]
    holder = last_part(full)
    words = re.findall("[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", holder)
    parts = {f"@{each.lower()}" for each in words}
    return frozenset(
        {f"={full}", f"@{holder}", *parts, *call.owner.tags, *call.subjects}
    )


def _owns(owner: str, origin: str, subjects: frozenset[str]) -> bool:
    if owner == "*":
        return "." in origin
    if "." in owner and not owner.startswith("="):
        return origin.startswith(owner)
    return subjects.issuperset(owner.split("+"))


def _of_wrapped(call: Call) -> Collective | None:
    """A call of a module that is wrapped for several ranks."""
    function = call.node.func
    if isinstance(function, ast.Call) or not call.function.has("fsdp", "ddp"):
        return None
    zero = call.function.has("@engine") and "zero 3" in call.subjects
    sharded = zero or call.function.has("fsdp")
    why, guess = knowledge.ON_FSDP if sharded else knowledge.ON_DDP
    module = function.value if isinstance(function, ast.Subscript) else function
    part = dotted(module).startswith("self.") and call.in_module
    sure = not call.function.has("perhaps") if sharded else part
    return Collective(
        name=text_of(function),
        pairs_with=FORWARD,
        line=call.node.lineno,
        why=why,
        guess="" if sure else guess,
        modules=modules_in(call.function.tags),
    )


def _logged(call: Call) -> Collective | None:
    """A log that is reduced: by sync_dist, or as the value is a metric."""
    said = {each.arg: getattr(each.value, "value", "?") for each in call.node.keywords}
    synced = said.get("sync_dist", False) is not False
    values = list(call.args[1:2])
    if "value" in call.given:
        values.append(call.given["value"])
    is_metric = any(each.has("metric") for each in values)
    alone = said.get("rank_zero_only") is True or "sync_dist_group" in said
    if alone or not (synced or is_metric):
        return None
    return Collective(
        name=call.name,
        pairs_with=LOG,
        line=call.node.lineno,
        why=knowledge.LOG_SYNCED if synced else knowledge.LOG_OF_METRIC,
        on_step=said.get("on_step") if synced else False,
    )


def name_by_batch(call: Call) -> Decision | None:
    """What of a batch is in the name that something is logged under: each rank then reduces under
    its own.
    """
    if call.name not in knowledge.LOGS or not call.node.args:
        return None
    names = call.args[0]
    if call.last == "log_dict" and names.has("keyed") and names.count == VARIES:
        return _named(call.node.args[0], call)
    texts = getattr(call.node.args[0], "values", ())
    for text, value in zip(texts, names.parts, strict=False):
        if not isinstance(text, ast.FormattedValue) or value.level < DATA:
            continue
        if knowledge.BATCHES & names_in(text):
            return _named(text.value, call)
    return None


def _named(node: ast.expr, call: Call) -> Decision:
    return Decision(
        text=text_of(node),
        key=text_of(node),
        value=Abstract(VARIES),
        kind="name",
        line=call.node.lineno,
        end=call.node.end_lineno or 0,
    )


def _of_unwrapped(call: Call) -> bool:
    """Whether it is asked of a model, or given one, that is to be wrapped only behind it."""
    return any(each.has("unwrapped") for each in (call.owner, *call.args[:1]))


def of_a_group(call: Call) -> bool:
    """Whether it is given another group than that of all ranks, or to be made alone."""
    alone = ("no_dist", "use_local_synchronization")
    if any(each.arg in alone for each in call.node.keywords):
        return True
    if any(each.has("group") for each in (*call.args, *call.given.values())):
        return True
    keywords = [each for each in call.node.keywords if each.arg not in ("src", "dst")]
    names = {
        dotted(inner)
        for each in (*call.node.args, *keywords)
        for inner in nodes(each, ast.Name, ast.Attribute)
    } - {"dist.group", "torch.distributed.group"}
    return any(
        not each.endswith("WORLD")
        and not call.env.get(each, Abstract()).has("nothing")
        and (
            says(each.lower(), knowledge.GROUP_NAME)
            or call.env.get(each, Abstract()).has("group")
        )
        for each in names
    )


def guess_of_helper(called: Definition, call: Call | None, file: SourceFile) -> str:
    """What must hold for a helper's collectives to be made by all ranks; empty if nothing."""
    of_parameters = "param_groups" in file.mentioned
    if call is not None and of_a_group(call) and not of_parameters:
        return "its group has all ranks"
    once = bool(file.changed) and any(
        names_in(each.test) & file.changed for each in nodes(called.node, ast.If)
    )
    return "it is called for the first time" if once else ""
