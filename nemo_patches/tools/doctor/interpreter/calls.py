"""What a call gives that is neither a helper of the file nor a collective."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from nemo_patches.tools.doctor.interpreter import knowledge
from nemo_patches.tools.doctor.interpreter.members import OPERATIONS, applied
from nemo_patches.tools.doctor.interpreter.names import is_loader, parts_of, says
from nemo_patches.tools.doctor.interpreter.source_file import SourceFile
from nemo_patches.tools.doctor.interpreter.values import (
    AGREED,
    DATA,
    FILLED,
    SAME,
    UNKNOWN,
    VARIES,
    Abstract,
    mixed,
    tagged,
)
from nemo_patches.tools.doctor.syntax import constant, dotted, last_part, text_of


@dataclass  # to freeze it takes longer than much of what is asked of it
class Call:
    """A call with what is known of it.

    name: as written; origin: by the imports; function: what is called; owner: what it is a method
    of. env: the names where it is called; subjects: what the file and the class are about;
    in_module: whether its class has a forward of its own.
    """

    node: ast.Call
    name: str
    origin: str
    function: Abstract
    owner: Abstract
    args: Sequence[Abstract]
    given: Mapping[str, Abstract]
    file: SourceFile
    env: Mapping[str, Abstract]
    subjects: frozenset[str]
    in_module: bool

    @cached_property
    def last(self) -> str:
        return last_part(self.name)


def called(call: Call) -> Abstract:
    """By what is known of the function, and else by its name and what it is given."""
    kinds = (_of_ranks, _known, _of_items)
    value = next((each for kind in kinds if (each := kind(call)) is not None), None)
    value = _by_name(call) if value is None else value
    drops = call.given.get("drop_last", Abstract())
    if call.last == "DataLoader" and drops.decided and "collate_fn" not in call.given:
        value = value.tagged("fills")
    if call.owner.has("full") and call.last in knowledge.ALL_ITEMS:
        value = value.tagged("full")
    if "disable" in call.given and _of_rank(call):  # a bar counts where it is shown
        value = value.with_entry("n", tagged("rank", level=VARIES))
    return value


def _of_ranks(call: Call) -> Abstract | None:
    """What the ranks' numbers decide."""
    node = call.node
    file = call.file
    if call.origin in ("os.environ.get", "os.getenv"):
        variable = constant(node.args[0]) if node.args else None
        return file.source(f"${variable}") or Abstract()
    if call.name in OPERATIONS and not call.given:
        columns = [each.at for each in call.args]
        at = applied(OPERATIONS[call.name], columns, text_of(node))
        if at is not None:
            return mixed(call.args)._replace(at=at)
    bare = not node.args and not node.keywords
    said = knowledge.SAID_BY.get(call.last)
    settings = [text_of(each) for each in node.args] == ["args"]  # is_primary(args)
    if call.last == "get_dist_info":
        pair = [file.source(each) or Abstract() for each in ("rank", "world_size")]
        return Abstract(parts=tuple(pair))
    if bare or (settings and said == "first rank") or said == "ranks":
        return file.source(call.name) or file.by_rank.get(call.last)
    # In a group, which may be that of all ranks.
    in_group = call.last == "get_rank" and call.origin.startswith("torch.distributed")
    return tagged("rank", level=VARIES) if in_group else None


def _known(call: Call) -> Abstract | None:
    node = call.node
    if last_part(call.origin) == "partial" and call.args:
        return Abstract(ref=call.args[0].ref)
    if (
        last_part(call.origin) in knowledge.DEALING
        or (last_part(call.origin) == "islice" and _of_rank(call))
        or (call.last == "split" and _mixed(call).has("rounded"))
    ):
        return _dealt(call)
    if last_part(call.origin) in knowledge.EVEN_SAMPLERS:
        return Abstract(count=SAME, item=Abstract(DATA))
    if call.owner.has("instance") and call.last in knowledge.CONTAINERS:
        return call.owner  # model.cuda()
    if call.args and call.args[0].has("instance") and call.last in knowledge.CONVERTING:
        return call.args[0]
    if says(call.origin, knowledge.METRICS):
        without = [each.arg for each in node.keywords if constant(each.value) is False]
        alone = "sync_on_compute" in without or mixed(call.args).has("one device")
        return tagged("one device" if alone else "metric")
    if call.origin == "logging.getLogger":
        return Abstract(ref=text_of(node))
    made = knowledge.MAKERS.get(last_part(call.origin))
    if made:
        numbers = {each.arg: constant(each.value) for each in node.keywords}
        alone = numbers.get("devices") == 1 and numbers.get("num_nodes", 1) == 1
        return tagged("one device" if alone else made)
    second = node.args[1] if len(node.args) > 1 else node
    single = dotted(second).endswith("SingleDeviceStrategy")
    if call.name == "isinstance" and single:
        return call.file.constant(False)
    if call.name == "getattr" and constant(second) == "grad":
        return tagged("gradient")
    if call.last in knowledge.SEEDING and _of_rank(call):
        call.file.seeded_by_rank = True
    if says(call.origin, knowledge.OF_PROCESS):
        size = call.given.get("size")
        drawn = tagged(*(["random"] if "rand" in call.last else []), level=VARIES)
        return drawn._replace(count=size.level if size else None)
    if says(call.origin, knowledge.LOCKS) and not _of_rank(call):
        return tagged("lock")
    if call.last in knowledge.FILES:
        own = any(each.level == DATA for each in (call.owner, *call.args))
        # Of a file that this rank's data name, no two ranks ask.
        return Abstract(VARIES) if own else tagged("file", level=VARIES)
    return AGREED if _sounds_agreed(call) else None


def _sounds_agreed(call: Call) -> bool:
    """Not where it gathers, scatters or reduces along a dimension of a tensor."""
    first = call.args[0] if call.args else Abstract()
    along = first.at is not None and isinstance(first.at[0], int)
    along = along and len(call.args) > 1
    along = along or "index" in call.given
    local = along or says(call.origin, knowledge.OF_ONE_RANK)
    return bool(parts_of(call.last) & knowledge.AGREEING) and not local


def _of_rank(call: Call) -> bool:
    given = (*call.args, *call.given.values())
    values = [each for one in given for each in (one, *one.parts)]
    return any(each.has("rank") or call.file.members.differ(each.at) for each in values)


def _dealt(call: Call) -> Abstract:
    """Shares of something, or this rank's: one more or less than another's."""
    value = _mixed(call)
    even = value.has("even") or "apply_padding" in call.given
    if _of_rank(call):
        return value._replace(count=SAME if even else VARIES)
    return value._replace(count=SAME).tagged("dealt")


def _by_name(call: Call) -> Abstract:
    node = call.node
    features = (
        call.last in ("len", "size")
        and call.args
        and (call.args[0].has("shape") or isinstance(node.args[0], ast.UnaryOp))
    )
    of_form = (
        (call.last in knowledge.STRUCTURE and not _converts(call))
        or parts_of(call.last) & knowledge.GRADIENTS
        or parts_of(call.name) & knowledge.GROUP_WORDS
    )
    if of_form or features:
        return Abstract()
    unsized = call.owner.has("any size") or call.owner.count == UNKNOWN
    if call.last in knowledge.SIZES and unsized:
        return Abstract(UNKNOWN)
    value = _mixed(call)
    if call.last in knowledge.COUNTING and value.level in (UNKNOWN, DATA):
        value = value._replace(level=DATA).tagged("counted")
    if "norm" in parts_of(call.last) and value.has(
        "gradient"
    ):  # they have been reduced
        return Abstract()
    if call.name == "len" and call.args:
        first = call.args[0]
        of_all = first.has("full") or (
            dotted(node.args[0]).endswith("dataset") and first.count != VARIES
        )
        varies = (first.turns >= DATA and not of_all) or (
            first.has("letter") and first.level == DATA
        )
        value = value._replace(level=VARIES if varies else SAME, count=first.count)
        own = ["file"] if first.count == VARIES else []  # not what a folder has
        return value.without("gradient", *own)
    by_function = isinstance(node.func, ast.Name) or call.last == "tolist"
    enough = DATA if by_function else UNKNOWN
    asked = [constant(each) for each in node.args]
    if call.name.endswith(".size") and call.owner.has("full") and asked == [0]:
        return Abstract()
    if call.last in knowledge.READ_OFF and value.level >= enough:
        value = value._replace(level=VARIES).without("gradient", "next")
    if call.origin == "re.compile":
        value = value.tagged("pattern")
    of_pattern = call.origin.startswith("re.") or call.owner.has("pattern")
    if of_pattern and call.last in knowledge.FINDING and value.level == DATA:
        value = value._replace(level=VARIES).tagged("chosen")
    if call.origin in knowledge.NEW_TENSORS and all(
        isinstance(each, (ast.Constant, ast.List)) for each in node.args
    ):
        new = [] if "requires_grad" in call.given else ["new"]
        value = value.tagged("nothing", *new)
    given = [*call.args, *call.given.values()]
    if call.last in knowledge.SIZED and any(each.level for each in given):
        value = value.tagged("own_size")
    value = as_layer(call, value)
    if call.last == "ceil":
        value = value.tagged("rounded")
    if last_part(call.origin) in knowledge.DICTS:
        value = value.tagged("grows", *(f"{FILLED}{each}" for each in call.given))
        if any(each.has("keyed") for each in call.args):
            value = value._replace(count=VARIES)
    if call.name == "dict" or call.last[:1].isupper():
        value = value._replace(entries=tuple(call.given.items())).tagged("object")
        if call.name != "dict":  # what an object decides is in what it is asked
            value = value._replace(level=min(value.level, DATA))
    if call.name in ("frozenset", "set") or (
        call.owner.has("set") and call.last in knowledge.OF_SETS
    ):
        numbers = bool(call.args) and call.args[0].at is not None
        value = value if numbers else value.tagged("set")
    queue = knowledge.QUEUES & parts_of(dotted(getattr(node.func, "value", node)))
    if call.name == "next" or (queue and call.last in knowledge.TAKING):
        count = VARIES if call.args and call.args[0].count == VARIES else None
        return value._replace(count=count).tagged("next")
    if call.last in knowledge.SELECTING and len(call.args) > 1:
        return value._replace(count=call.args[1].turns)
    if call.last == "DataLoader" and any(each.count == VARIES for each in given):
        return value._replace(count=VARIES)
    return value._replace(count=UNKNOWN) if is_loader(text_of(node)) else value


def _converts(call: Call) -> bool:
    """`x.type(torch.half)`, which is none of Python's type(x)."""
    return call.name.endswith(".type") and bool(call.args)


def as_layer(call: Call, value: Abstract) -> Abstract:
    """What a call gives, with what is known of it where that is a layer."""
    if says(call.origin, knowledge.LAYERS):
        value = value.tagged(f"layer at {call.node.lineno}:{call.node.col_offset}")
    if says(call.origin, knowledge.BATCH_NORM):
        value = value.tagged("batchnorm")
    return value


def _mixed(call: Call) -> Abstract:
    value = mixed([call.owner, *call.args, *call.given.values()])
    keeps = call.last in knowledge.CONTAINERS
    if call.last == "deepcopy":  # of a model before it is wrapped, mostly
        value = value.without("ddp")
    return value if keeps else value.without("ddp", "fsdp", "metric", "@engine")


def _of_items(call: Call) -> Abstract | None:
    """How surely ranks differ in its number of items, and what one is; None of other calls."""
    if call.last not in knowledge.GIVING_ITEMS:
        return None
    value = _mixed(call)
    if call.last in knowledge.SAME_COUNT:
        return _entries(call, value)
    items = [
        item_of(each, text_of(inner))
        for each, inner in zip(call.args, call.node.args, strict=True)
    ]
    if call.last == "zip":  # labels beside outputs are those of a batch
        items = [each.without("named") for each in items]
        item = mixed(items)._replace(parts=tuple(items))
        turns = [each.turns for each in call.args]
        return value._replace(count=min(turns, default=SAME), item=item)
    if call.last == "range":
        share = len(call.args) > 2 and _of_rank(call)
        # Every so many from the rank's number on.
        count = VARIES if share and not call.args[1].has("sized") else None
        return value._replace(count=count, item=Abstract())
    if call.last == "islice" and call.args:
        stop = call.args[min(2, len(call.args) - 1)]
        most = VARIES if stop.has("nothing") else stop.level
        return value._replace(count=min(call.args[0].turns, most), item=items[0])
    if call.last in knowledge.PASSED_ON and call.args:
        item = items[0]
        if call.last == "enumerate":
            item = Abstract(parts=(Abstract(), item))
        if call.args[0].has("set") and call.last != "sorted":
            value = value.tagged("set")
        value = value._replace(count=call.args[0].count, item=item)
        lazy = call.last in ("enumerate", "iter", "tqdm")
        return _as_generator(value, call.args[0]) if lazy else value
    return None


def _as_generator(value: Abstract, first: Abstract) -> Abstract:
    """What takes its items one by one from another one."""
    kinds = first.tags & {"generator", "instance"}
    return value.tagged(*kinds)._replace(ref=first.ref) if kinds else value


def _entries(call: Call, value: Abstract) -> Abstract:
    of_dict = call.last in ("items", "keys", "values")
    count = VARIES if of_dict and call.owner.turns == VARIES else SAME
    key = Abstract(DATA) if call.owner.has("keyed") else Abstract()
    inner = item_of(value, text_of(call.node))
    item = {"keys": key, "items": inner._replace(parts=(key, inner))}.get(call.last)
    value = value.tagged("set") if call.owner.has("set") else value
    return value._replace(count=count, item=item)


def item_of(value: Abstract, text: str) -> Abstract:
    """One of the items of what is iterated."""
    if value.item is not None:
        return value.item
    level = min(value.level, DATA) if value.has("gradient") else value.level
    if parts_of(last_part(text.partition("(")[0])) & knowledge.PARTS_OF_MODELS:
        level = SAME
    if level < DATA and is_loader(text):
        level = DATA
    elif level == UNKNOWN and parts_of(text) & knowledge.MODEL:
        level = SAME
    batch = {"batch"} if is_loader(text) else set[str]()
    batch |= {"full"} if value.has("fills") else set()
    return Abstract(level, tags=value.tags & knowledge.CARRIED | batch)
