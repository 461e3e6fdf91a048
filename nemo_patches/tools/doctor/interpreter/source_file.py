"""What is known of a file as a whole: imports, classes, wrapped modules, attributes."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any

from nemo_patches.tools.doctor.interpreter import knowledge
from nemo_patches.tools.doctor.interpreter.members import (
    Members,
    SampleMember,
    members_of,
)
from nemo_patches.tools.doctor.interpreter.names import parts_of, sounds_like_data
from nemo_patches.tools.doctor.interpreter.values import (
    AGREED,
    DATA,
    FILLED,
    SAME,
    UNKNOWN,
    VARIES,
    Abstract,
    joined,
    tagged,
)
from nemo_patches.tools.doctor.syntax import (
    constant,
    dotted,
    functions,
    last_part,
    nodes,
    text_of,
)

_MOST_BASES = 20
# Of an annotation, all but the class: Optional[X], Union[X, None], X | None, and in quotes.
_PERHAPS = r"""^'?(\w+\.)*(Optional|Union)\[|, None|\]|None \| | \| None|['"]"""
# What each line of knowledge.SOURCES says on a member.
_ON_MEMBER: dict[str, Callable[[SampleMember], Any]] = {
    "rank": lambda each: each.rank,
    "first rank": lambda each: each.rank == 0,
    "last rank": lambda each: each.rank == each.ranks - 1,
    "ranks": lambda each: each.ranks,
    "ranks of a node": lambda each: each.ranks // each.nodes,
    "nodes": lambda each: each.nodes,
    "one rank": lambda _: False,
    "several ranks": lambda _: True,
    "distributed type": lambda _: "several",
    "not distributed": lambda _: "NO",
    "rank's text": lambda each: str(each.rank),
    "ranks' text": lambda each: str(each.ranks),
}
# What a file is about, by the names in it.
_SUBJECTS = {
    "measures": {"torchmetrics"},
    "parallel": knowledge.IN_PARALLEL,
    "sharded": knowledge.SHARDING,
    "transformers": {"transformers"},
    "zero": {"DeepSpeedPlugin", "zero_optimization"},
}
_NAMING = (
    "id",
    "attr",
    "module",
    "name",
    "value",
)  # fields of nodes with names in them


@dataclass(frozen=True, eq=False)
class Definition:
    """A function or a class of the file, or the module. outer: the names around a function in a
    function.
    """

    name: str
    node: Any
    owner: Definition | None = None
    methods: dict[str, Definition] = field(default_factory=dict)
    outer: Mapping[str, Abstract] | None = None


class SourceFile:
    """What does not change while it is read, and what its functions tell each other."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.members: Members = members_of(tree)
        self.origins = dict(_origins(tree))
        self.mentioned = {
            part
            for node in nodes(tree, ast.AST)
            for kind in _NAMING
            if isinstance(text := getattr(node, kind, ""), str)
            for part in text.split(".")
        }
        self.changed = {name for each in nodes(tree, ast.Global) for name in each.names}
        # By what an argument may be called that is one: meter, a Meter.
        self.classes = {
            re.sub(r"(?<=[a-z])(?=[A-Z])", "_", each.name).lower(): each.name
            for each in nodes(tree, ast.ClassDef)
        }
        self.loaded = {
            each.id
            for each in nodes(tree, ast.Name)
            if not isinstance(each.ctx, ast.Store)
        }
        self.subjects = {
            subject
            for subject, names in _SUBJECTS.items()
            if not names.isdisjoint(self.mentioned)
        }
        if _averages_gradients(tree) and not self.mentioned & knowledge.REDUCING:
            self.subjects.discard("parallel")
        if "zero" in self.subjects and _shards_parameters(tree):
            self.subjects.add("zero 3")
        self.full = frozenset({"full"} if _fills_batches(tree) else ())
        self.lacks_fields = _lacks_fields(tree)
        # Whether each layer that is called is a collective.
        self.gathers_layers = (
            "zero 3" in self.subjects and "set_z3_leaf_modules" not in self.mentioned
        )
        self.synced_norms = not self.mentioned.isdisjoint(knowledge.SYNCED_NORMS)
        packages = _packages(tree)
        self.imported = packages - {""}
        if packages & knowledge.TRAINERS:
            self.subjects.add("trains")
        if (
            "nemo" in packages
            or packages <= knowledge.BESIDE_NEMO | sys.stdlib_module_names
        ):
            self.subjects.add("ours")
        self.samples = any(  # has a sampler of its own
            dotted(each).endswith("Sampler")
            for of_class in nodes(tree, ast.ClassDef)
            for each in of_class.bases
        )
        # DDP gives all ranks rank 0's buffers at the next step, if it is not told otherwise.
        self.shares_buffers = all(
            each.arg != "broadcast_buffers" for each in nodes(tree, ast.keyword)
        )
        # The names of those that DDP gives to all ranks.
        self.buffers = {
            constant(each.args[0])
            for each in nodes(tree, ast.Call)
            if last_part(dotted(each.func)) == "register_buffer" and each.args
        }
        if not (self.shares_buffers and self.mentioned & knowledge.DDP):
            self.buffers = set()
        self.constants: dict[object, Abstract] = {}
        self.sources: dict[str, Abstract | None] = {}
        self.wrapped = dict(_deepspeed_engines(tree))
        self.attributes: dict[str, dict[str, Abstract]] = {}
        # By the last part of a name, what attributes of any object and globals are set to.
        self.set_to: dict[str, list[Abstract]] = {}
        self.by_rank: dict[str, Abstract] = {}
        self.given: dict[Definition, dict[str, list[Abstract]]] = {}
        self.given_before: dict[ast.AST, dict[str, list[Abstract]]] = {}
        self.env: dict[str, Abstract] = {}
        self.definitions: list[Definition] = []
        # What is set in the body of each class.
        self.of_classes: list[tuple[str, dict[str, Abstract]]] = []
        self.being_read: list[object] = []
        self.summaries: dict[Any, Any] = {}
        self.seeded_by_rank = False
        self.calls_joined: dict[ast.AST, set[bool]] = {}
        self.joined = set[ast.AST]()  # functions that are called within join() alone
        self.signalled = set[str]()  # names of functions that signals run
        # What handles records, and of which loggers: how their text begins.
        self.handlers: dict[ast.AST, tuple[Definition, str]] = {}
        self.handles_alarm = False  # by one of them
        for each in nodes(tree, ast.Call):
            if self.origin(dotted(each.func)) == "signal.signal" and len(each.args) > 1:
                name = last_part(dotted(each.args[1]))
                if name not in ("SIG_DFL", "SIG_IGN"):
                    self.signalled.add(name)
                    self.handles_alarm |= dotted(each.args[0]).endswith("ALRM")
        # Whether DDP waits for the gradient of each parameter of a class of this file, or ZeRO
        # gathers each for what trains it.
        trainers = any(each.endswith("Trainer") for each in self.mentioned)
        self.used_whole = self.gathers_layers and "trains" in self.subjects and trainers
        self.spawned = {  # functions whose first argument is the rank
            dotted(each.args[0])
            for each in nodes(tree, ast.Call)
            if dotted(each.func).endswith("spawn") and each.args
        }
        self.calls = Counter(dotted(each.func) for each in nodes(tree, ast.Call))
        self.work = 0

    def begin_round(self) -> None:
        """Forget what is read anew, but not attributes and wrapped modules."""
        for name, values in self.set_to.items():
            told = [each for each in values if self.members.differ(each.at)]
            others = [each for each in values if not each.has("const", "nothing")]
            self.by_rank.update((name, each) for each in values if each.has("signal"))
            if told and all(each in told for each in others):
                self.by_rank[name] = told[0]
        self.set_to = {}
        first = not self.given_before
        self.given_before = {each.node: known for each, known in self.given.items()}
        for definition, given in self.given.items() if first else ():
            values = [value for known in given.values() for value in known]
            if definition.owner and any(each.has("agreed") for each in values):
                # They were set from what the arguments are called.
                of_class = self.attributes.get(definition.owner.name, {})
                for name in [key for key in of_class if of_class[key].level]:
                    del of_class[name]
        self.given = {}
        self.joined = {
            node for node, seen in self.calls_joined.items() if False not in seen
        }
        self.calls_joined = {}
        self.definitions = []
        self.of_classes = []
        self.summaries = {}
        self.work = 0
        self.env = {}

    def origin(self, name: str) -> str:
        """Where a name is from, by the imports: `dist.barrier` is torch.distributed.barrier."""
        first, dot, rest = name.partition(".")
        return f"{self.origins.get(first, first)}{dot}{rest}"

    def reference(self, name: str) -> str | None:
        """The whole name of what is imported; None of others."""
        first = name.partition(".")[0]
        return (
            self.origin(name)
            if first in self.origins or first in self.imported
            else None
        )

    def constant(self, value: object) -> Abstract:
        key = type(value), value  # 1 is True, and is another constant
        if key not in self.constants:
            tags = frozenset({"nothing" if value is None else "const"})
            at = (value,) * len(self.members)
            self.constants[key] = Abstract(at=at, tags=tags)
        return self.constants[key]

    def source(self, name: str) -> Abstract | None:
        """What a name says on each member; None where it says nothing of ranks."""
        if name not in self.sources:
            self.sources[name] = self._source(name)
        return self.sources[name]

    def _source(self, name: str) -> Abstract | None:
        said = knowledge.SAID_BY.get(last_part(name))
        if said is None:
            return None
        owner = self.origin(name).rpartition(".")[0]
        if last_part(name) in knowledge.READY and not owner.endswith(
            knowledge.READY_OWNERS
        ):
            return None
        at = tuple(map(_ON_MEMBER[said], self.members.every))
        sized = said in ("ranks", "ranks' text", "ranks of a node")
        return Abstract(at=at, tags=frozenset({"sized"} if sized else ()))

    def start(
        self, definition: Definition, given: Mapping[str, Abstract]
    ) -> dict[str, Abstract]:
        """The names that a function begins with: its arguments, as they are given or by what they
        are called.
        """
        env = dict(self.env if definition.outer is None else definition.outer)
        env.update(given)
        for each in reversed(self.bases(definition.owner)[0]):
            env.update(self.attributes.get(each.name, {}))
        reduced = frozenset[str]()  # what a trainer's callback is given
        if any(
            last_part(each) in knowledge.GIVEN_REDUCED
            for each in self.bases(definition.owner)[1]
        ):
            reduced = knowledge.REDUCED
        begins_sampler = definition.name.endswith("Sampler.__init__") or (
            definition.name.endswith(".__init__")
            and any(
                each.endswith("Sampler") for each in self.bases(definition.owner)[1]
            )
        )
        args = definition.node.args
        ranks = _ranks(definition.node)
        if definition.name in self.spawned:
            ranks |= {each.arg for each in args.args[:1]}
        for argument, default in _arguments(args):
            if argument.arg in reduced:
                env[argument.arg] = AGREED
                continue
            said = self.source("rank" if argument.arg in ranks else argument.arg)
            value = given.get(argument.arg) or said or self._argument(argument, default)
            if definition.name.endswith(".__init__") and "optional" not in value.tags:
                value = value._replace(level=min(value.level, UNKNOWN))
            if not given:
                value = self._as_called(definition, argument.arg, value)
            if begins_sampler and value.level == DATA:  # of the whole data set
                value = value._replace(level=UNKNOWN)
            if (
                given
                and argument.arg not in given
                and isinstance(default, ast.Constant)
            ):
                value = self.constant(default.value)
            if argument.arg in _prepared(definition.node):
                value = value.without("ddp", "fsdp").tagged("unwrapped")
            env[argument.arg] = value
        for each in filter(None, (args.vararg, args.kwarg)):
            env[each.arg] = given.get(each.arg) or Abstract(UNKNOWN)
        return env

    def _as_called(
        self, definition: Definition, name: str, value: Abstract
    ) -> Abstract:
        """What an argument is that its name says nothing of: as the file's calls give it."""
        given = self.given_before.get(definition.node, {}).get(name, [])
        if given and not any(each.has("ddp", "fsdp") for each in given):
            value = value.without("ddp", "fsdp")
        lacks = {each.has("nothing") for each in given}
        if len(lacks) > 1 and all(each.has("apart") for each in given):
            return tagged("alone", level=VARIES)  # it is None on some ranks
        if value.at is not None:
            return value
        if not value.level:
            # By its type: a length of this rank's batch is a number, too.
            differ = [each for each in given if each.level == VARIES]
            return reduce(
                joined, (each for each in differ if each.count is None), value
            )
        for each in given:
            if self.members.differ(each.at) or each.has("alone"):
                return each
        called = reduce(joined, given or [value])
        if value.level == DATA:
            # What a name says counts less than what all ranks agreed on.
            return called if called.has("agreed", "full", "keyed") else value
        if parts_of(name) & knowledge.OTHER_NAMES and called.count != VARIES:
            return value
        return called

    def _argument(self, argument: ast.arg, default: ast.expr | None) -> Abstract:
        name = argument.arg
        types = {last_part(dotted(each)) for each in nodes(argument, ast.AST)}
        optional = isinstance(default, ast.Constant)
        tensor = "Tensor" in types
        level = DATA if tensor or sounds_like_data(name) else UNKNOWN
        if (
            (isinstance(default, ast.Constant) and default.value is not None)
            or types & knowledge.PLAIN_TYPES
            or parts_of(name)
            & (knowledge.MODEL | knowledge.AGREEING | knowledge.OF_SETTINGS)
            or name in ("self", "cls")
        ):
            level = SAME
        wrapped = {
            knowledge.WRAPPERS[each][0] for each in types & knowledge.WRAPPERS.keys()
        }
        tags = {*self.wrapped.get(name, ()), *wrapped}
        annotated = argument.annotation
        named = _class_in(annotated) if annotated else self.classes.get(name, "")
        of = self.env.get(named, Abstract()).ref
        if isinstance(of, Definition) and isinstance(of.node, ast.ClassDef):
            return Abstract(level, tags=frozenset({*tags, "instance"}), ref=of)
        if tensor and not sounds_like_data(name):
            tags.add("any size")
        if parts_of(name) & (knowledge.TEXTS | knowledge.OF_SETTINGS) and not tensor:
            tags.add("named")
        if level == DATA and optional:
            tags.add("optional")
        elif level == DATA and name in knowledge.BATCHES:
            tags |= {"batch", *self.full}
        count = None
        if len(name) == 1:  # a list of anything; a tensor, if its length is asked for
            tags.add("letter")
            count = min(level, UNKNOWN)
        return Abstract(level, tags=frozenset(tags), count=count)

    def bases(self, definition: Definition | None) -> tuple[list[Definition], set[str]]:
        """A class and its bases in this file, the nearest first, and the names of the others."""
        is_class = isinstance(getattr(definition, "node", None), ast.ClassDef)
        found = [definition] if definition is not None and is_class else []
        others = set[str]()
        for each in found[:_MOST_BASES]:
            for base in each.node.bases:
                ref = self.env.get(dotted(base), Abstract()).ref
                if isinstance(ref, Definition) and ref not in found:
                    found.append(ref)
                elif ref is None:
                    others.add(self.origin(dotted(base)))
        return found, others

    def method(
        self, definition: Definition | None, name: str, *, beyond: bool = False
    ) -> Definition | None:
        """A method of a class or of its bases. beyond: of its bases alone, as super() has it."""
        if definition is None:
            return None
        for each in self.bases(definition)[0]:
            if name in each.methods and not (beyond and each is definition):
                return each.methods[name]
        return None

    def keep_attributes(self, of_class: str, known: Mapping[str, Abstract]) -> None:
        """What a method has set, joined with what others have."""
        kept = self.attributes.setdefault(of_class, {})
        for key, value in known.items():
            if self.shares_buffers and value.has("updated"):
                continue
            tags = [each for each in value.tags if not each.startswith(FILLED)]
            value = value._replace(tags=frozenset(tags))
            if value.has("alone") and any(
                each.has("agreed") for each in self.set_to.get(last_part(key), ())
            ):
                value = AGREED  # one rank decides, and tells the others
            kept[key] = joined(kept[key], value) if key in kept else value


def methods_of(node: ast.ClassDef) -> Definition:
    """A class with its methods."""
    made = Definition(node.name, node)
    for name, each in functions(node).items():
        made.methods[name] = Definition(f"{node.name}.{name}", each, made)
    return made


def _class_in(annotation: ast.expr) -> str:
    """X of `Optional[X]`, `X | None` and `"X"`; no class of a list of X."""
    return re.sub(_PERHAPS, "", text_of(annotation))


@lru_cache(maxsize=1000)
def _prepared(function: ast.AST) -> set[str]:
    """The arguments that a function has wrapped itself: `model = self.prepare_model(model)`, or
    `fully_shard(model)`.
    """
    return {
        dotted(argument)
        for call in nodes(function, ast.Call)
        if prepares(call)
        for argument in call.args
    }


@lru_cache(maxsize=1000)
def _ranks(function: ast.AST) -> frozenset[str]:
    """The names that a function gives to init_process_group as its rank."""
    return frozenset(
        dotted(each.value)
        for call in nodes(function, ast.Call)
        if last_part(dotted(call.func)) == "init_process_group"
        for each in call.keywords
        if each.arg == "rank"
    )


def prepares(call: ast.Call) -> bool:
    return bool(parts_of(last_part(dotted(call.func))) & knowledge.PREPARING)


def function_of(ref: Any) -> Definition | None:
    """What a value refers to, if that is a function of the file."""
    is_function = isinstance(ref, Definition) and isinstance(ref.node, ast.FunctionDef)
    return ref if is_function else None


def is_decorated(definition: Definition, by: str) -> bool:
    """Whether it has a decorator whose name ends so."""
    every = definition.node.decorator_list
    return any(dotted(getattr(each, "func", each)).endswith(by) for each in every)


@lru_cache(maxsize=1000)
def evaluates(definition: Definition) -> bool:
    """Whether no backward pass begins at what it computes."""
    attributes = {each.attr for each in nodes(definition.node, ast.Attribute)}
    decorators = getattr(definition.node, "decorator_list", [])
    return ("eval" in attributes and "backward" not in attributes) or any(
        re.search(knowledge.WITHOUT_GRADIENTS, ast.unparse(each)) for each in decorators
    )


def is_property(definition: Definition) -> bool:
    return is_decorated(definition, "property")


def _arguments(args: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    defaults = [*args.defaults, *args.kw_defaults]
    without: list[ast.expr | None] = [None] * (len(every) - len(defaults))
    return zip(every, [*without, *defaults], strict=True)


def _origins(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in nodes(tree, ast.Import):
        for each in node.names:
            if each.asname:
                yield each.asname, each.name
    for source in nodes(tree, ast.ImportFrom):
        for each in () if source.level else source.names:
            yield each.asname or each.name, f"{source.module}.{each.name}"


def _packages(tree: ast.Module) -> set[str]:
    """Those that a file imports from; "" is its own."""
    whole = {each.name for node in nodes(tree, ast.Import) for each in node.names}
    parts = {
        "" if node.level else str(node.module) for node in nodes(tree, ast.ImportFrom)
    }
    return {name.partition(".")[0] for name in whole | parts}


def _averages_gradients(tree: ast.Module) -> bool:
    """Whether a file reduces gradients itself: dist.all_reduce(p.grad)."""
    return any(
        "reduce" in parts_of(last_part(dotted(call.func)))
        and any(each.attr == "grad" for each in nodes(call, ast.Attribute))
        for call in nodes(tree, ast.Call)
    )


def _shards_parameters(tree: ast.Module) -> bool:
    """Whether the file asks for ZeRO's stage 3, in a config or by an argument."""
    asked: list[tuple[object, ast.expr]] = [
        (each.arg, each.value) for each in nodes(tree, ast.keyword)
    ]
    for each in nodes(tree, ast.Dict):
        asked += [
            (constant(key), value)
            for key, value in zip(each.keys, each.values, strict=True)
        ]
    return any(
        name in ("stage", "zero_stage") and constant(value) == 3
        for name, value in asked
    )


def _fills_batches(tree: ast.Module) -> bool:
    """Whether each loader that a file makes leaves out a last batch that is not full."""
    made = [
        ast.unparse(call)
        for call in nodes(tree, ast.Call)
        if last_part(dotted(call.func)) == "DataLoader"
    ]
    full = {"drop_last=True" in each and "collate_fn" not in each for each in made}
    return full == {True}


def _lacks_fields(tree: ast.Module) -> bool:
    """Whether what makes samples or batches of them leaves out some fields of some."""
    makers: list[ast.FunctionDef | ast.ClassDef] = [
        *nodes(tree, ast.FunctionDef),
        *nodes(tree, ast.ClassDef),
    ]
    return any(
        _leaves_out(each)
        for each in makers
        if each.name == "__getitem__" or "collat" in each.name.lower()
    )


def _leaves_out(node: ast.AST) -> bool:
    """Whether None stands in the place of a field, or a key is set on one way alone."""
    chosen = [
        end for each in nodes(node, ast.IfExp) for end in (each.body, each.orelse)
    ]
    if any(isinstance(each, ast.Constant) and each.value is None for each in chosen):
        return True
    return any(_keys(each.body) != _keys(each.orelse) for each in nodes(node, ast.If))


def _keys(body: list[ast.stmt]) -> set[str]:
    """Of dicts, which these statements set."""
    sets = [each for one in body for each in nodes(one, ast.Assign)]
    targets = [target for each in sets for target in each.targets]
    keys = [constant(each.slice) for each in targets if isinstance(each, ast.Subscript)]
    return {each for each in keys if isinstance(each, str)}


def _deepspeed_engines(tree: ast.Module) -> Iterator[tuple[str, frozenset[str]]]:
    """`model_engine` of model_engine.backward(loss)."""
    for node in nodes(tree, ast.Call):
        name = dotted(node.func)
        if name.endswith("engine.backward"):
            yield name.split(".")[-2], frozenset({"ddp"})
