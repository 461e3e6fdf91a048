"""What in a file of Python is a collective:
torch's, Lightning's, a metric's, the backward pass, an encoder's call.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nemo_patches.tools.doctor.batch_data import assignments
from nemo_patches.tools.doctor.syntax import (
    LOOPS,
    assigned,
    constant,
    dotted,
    last_part,
    nodes,
    text_of,
    words,
)

_OF_TORCH = words("""
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce
    all_reduce_coalesced all_to_all all_to_all_single barrier broadcast
    broadcast_object_list gather gather_object init_device_mesh initialize_mesh_device
    monitored_barrier new_group reduce reduce_scatter reduce_scatter_tensor scatter
    scatter_object_list
    """)
_OF_CHECKPOINT = words("""
    async_save get_model_state_dict get_optimizer_state_dict get_state_dict load load_state_dict
    save save_state_dict set_model_state_dict set_optimizer_state_dict set_state_dict
    """)
_GROUPS = ("new_group", "new_subgroups", "new_subgroups_by_enumeration")
_GROUP = re.compile(r"group|mesh|\bpg\b|_pg\b")
_OF_SHARDS = words("""
    GatheredParameters consolidate_state_dict distribute_module distribute_tensor
    full_optim_state_dict full_tensor optim_state_dict redistribute
    scatter_full_optim_state_dict sharded_optim_state_dict summon_full_params unshard
    """)
_OF_MEGATRON = words("load_checkpoint save_checkpoint")
_MODULES = ("torch.distributed", "deepspeed.comm")
_TAKE_PART = "in which all ranks take part"
_GATHERS = "which gathers sharded parameters"
# Functions by the beginning of where they are from, and why they are collectives.
_BY_ORIGIN = (
    (_MODULES, _OF_TORCH, ""),
    ("torch.distributed.checkpoint", _OF_CHECKPOINT, _TAKE_PART),
    ("megatron.", _OF_MEGATRON, _TAKE_PART),
    ("", _OF_SHARDS, _GATHERS),
)
_SHARDING = words("FullyShardedDataParallel FSDP fully_shard")
# What wraps modules for several ranks: whether it shards them, and a part of where it is from.
_WRAPPING = {
    **dict.fromkeys(_SHARDING, (True, "")),
    **dict.fromkeys(("auto_wrap", "wrap"), (True, "fsdp")),
    **dict.fromkeys(("DistributedDataParallel", "DDP"), (False, "")),
    "initialize": (False, "deepspeed"),
}
# For code that imports them elsewhere.
_USUAL_NAMES = ("dist", "distributed", "torch.distributed")
_OF_STRATEGY = words("all_gather barrier broadcast reduce reduce_boolean_decision")
_OF_HOLDER = {  # by the last part of what the method is of
    "accelerator": words("backward gather gather_for_metrics reduce wait_for_everyone"),
    "fabric": words("all_gather all_reduce backward barrier broadcast save"),
    "pl_module": words("all_gather"),
    "strategy": _OF_STRATEGY,
    "training_type_plugin": _OF_STRATEGY,
}
_OF_ACCELERATOR = words("get_state_dict save_model save_state")
_TRAINERS = ("trainer", "self.trainer")
_OF_TRAINER = words("fit predict save_checkpoint test validate")
# By the name: what it pairs with, why, and what must hold.
_PROPERTIES_OF_TRAINER = {
    "log_dir": ("broadcast", "which broadcasts rank 0's folder", ""),
    **dict.fromkeys(
        ("callback_metrics", "logged_metrics"),
        (
            "metrics",
            "which reduces what was logged",
            "a metric in it was logged with sync_dist, and has not been reduced yet",
        ),
    ),
}
_OF_ENGINE = words("save_16bit_model save_checkpoint save_fp16_model")
_ENCODERS = words("encoder perception pre_encoder")
# Packages beside which an encoder may be NeMo's, in a file that does not import NeMo.
_BESIDE_NEMO = sys.stdlib_module_names | words("""
    accelerate deepspeed einops hydra lhotse librosa lightning megatron numpy omegaconf
    pytorch_lightning scipy soundfile torch torchaudio torchmetrics tqdm wandb
    """)
_LOGS = ("self.log", "self.log_dict", "pl_module.log", "pl_module.log_dict")
_STEP = re.compile("^forward$|step|batch")
_ADDING = ("append", "extend", "update")
_METRIC_WORDS = words("acc accuracy auroc bleu cer f1 metric metrics wer")
_IN_PARALLEL = words(
    "DistributedDataParallel FullyShardedDataParallel fully_shard init_process_group"
    " deepspeed accelerate"
)
_LIGHTNING_BASES = words("LightningDataModule LightningModule ModelPT")
_LIGHTNING_METHODS = words("training_step configure_optimizers validation_step")

BACKWARD = "backward"
COMPUTE = "compute"
ENCODER = "encoder"
FORWARD = "forward"
LOG = "log"
UNUSED = "forward, and no backward"


@dataclass(frozen=True)
class Collective:
    """A call that every rank must make: its name as written, and what it pairs with on the other
    ranks.

    why: what makes it one, where the name does not say so. guess: what must hold for it to be one,
    else empty.
    on_step: of Lightning's log, whether it reduces at once; False: at the epoch's end; None: that
    is up to the hook.
    """

    name: str
    pairs_with: str
    line: int
    why: str = ""
    guess: str = ""
    on_step: object = None


@dataclass(frozen=True)
class Names:
    """What the names of a file stand for, by its imports."""

    tree: ast.Module

    @cached_property
    def _origins(self) -> dict[str, str]:
        origins: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                renamed = (each for each in node.names if each.asname)
                origins |= {str(each.asname): each.name for each in renamed}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Assign) and dotted(node.value) in _MODULES:
                origins |= dict.fromkeys(map(dotted, node.targets), dotted(node.value))
        return origins

    def origin(self, node: ast.expr) -> str:
        """A dotted name with its first part as it was imported; as written where it was not
        imported.
        """
        written = dotted(node)
        first, _, rest = written.partition(".")
        return ".".join(filter(None, (self._origins.get(first, first), rest)))

    @cached_property
    def assigned(self) -> dict[str, list[ast.expr]]:
        """What the module's own names are assigned, of those that no function changes."""
        return {
            name: values
            for name, values in assignments(self.tree).items()
            if values and name not in self.changed
        }

    @cached_property
    def changed(self) -> frozenset[str]:
        """Global variables that functions assign."""
        return frozenset(
            name for each in nodes(self.tree, ast.Global) for name in each.names
        )

    @cached_property
    def returned(self) -> dict[str, ast.expr]:
        """The one expression that a function of the file returns, or that `self.name` is, by the
        name.
        """
        found: dict[str, list[ast.expr]] = {}
        methods = {
            each for owner in nodes(self.tree, ast.ClassDef) for each in owner.body
        }
        for node in nodes(self.tree, ast.FunctionDef):
            value = _returned(node.body)
            if value is not None:
                name = f"self.{node.name}" if node in methods else node.name
                found.setdefault(name, []).append(value)
        for assign in nodes(self.tree, ast.Assign):
            for name in map(dotted, assign.targets):
                if name.startswith("self.") and name.count(".") == 1:
                    found.setdefault(name, []).append(assign.value)
        return {name: values[0] for name, values in found.items() if len(values) == 1}

    @cached_property
    def groups(self) -> frozenset[str]:
        """The names of groups that the file makes."""
        return assigned(
            self.tree,
            lambda value: any(
                dotted(call.func).endswith(_GROUPS) for call in nodes(value, ast.Call)
            ),
        )

    @cached_property
    def defined(self) -> frozenset[str]:
        return frozenset(each.name for each in nodes(self.tree, ast.FunctionDef))

    def _parts(self, *kinds: str) -> set[str]:
        return {
            part
            for node in ast.walk(self.tree)
            for kind in kinds
            for part in str(getattr(node, kind, "")).split(".")
        }

    @cached_property
    def mentioned(self) -> set[str]:
        """The parts of the names that it uses."""
        return self._parts("id", "attr")

    @cached_property
    def imported(self) -> set[str]:
        return self._parts("module", "name")

    @cached_property
    def foreign(self) -> bool:
        """Whether it is another project's than NeMo's, whose encoders have no length sync."""
        packages = set[str]()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                packages |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                whole = "" if node.level else str(node.module)
                packages.add(whole.partition(".")[0])
        return "nemo" not in packages and not packages <= _BESIDE_NEMO

    @cached_property
    def in_parallel(self) -> bool:
        """Whether the file wraps a model for several ranks, so that its backward pass is a
        collective.
        """
        return not _IN_PARALLEL.isdisjoint(self.mentioned | self.imported)

    @cached_property
    def sharded(self) -> bool:
        """Whether the file shards parameters, so that a state_dict gathers them."""
        return not self.mentioned.isdisjoint(_SHARDING)

    @cached_property
    def wrapped(self) -> dict[str, bool]:
        """The modules that it wraps for several ranks, by the last part of their names; whether
        they are sharded.
        """
        found = dict(self._wrapping(self.tree))
        for call in nodes(self.tree, ast.Call):
            owner, _, last = dotted(call.func).rpartition(".")
            if owner.endswith("engine") and last == "backward":
                found.setdefault(last_part(owner), False)
        loops = [node for node in ast.walk(self.tree) if isinstance(node, LOOPS)]
        for loop in loops:  # for layer in layers: fully_shard(layer)
            if any(found.get(name) for name in _names_in(loop.target)):
                found.update(dict.fromkeys(_names_in(loop.iter)[-1:], True))
        for loop in loops:
            kinds = [found[name] for name in _names_in(loop.iter) if name in found]
            if kinds:
                found.update(dict.fromkeys(_names_in(loop.target)[-1:], kinds[0]))
        return found

    @cached_property
    def perhaps_sharded(self) -> frozenset[str]:
        """Those of `wrapped` that a test decides on."""
        return frozenset(
            name
            for branch in nodes(self.tree, ast.If)
            for name, _ in self._wrapping(branch)
        )

    def _wrapping(self, node: ast.AST) -> Iterator[tuple[str, bool]]:
        """The modules that a tree wraps, by the last part of their names; whether it shards
        them.
        """
        for each in ast.walk(node):
            if isinstance(each, ast.Assign):
                for call in nodes(each.value, ast.Call):
                    origin = self.origin(call.func)
                    kind, package = _WRAPPING.get(last_part(origin), (None, ""))
                    if kind is not None and package in origin:
                        for target in each.targets:
                            yield from ((name, kind) for name in _names_in(target)[:1])
            elif (
                isinstance(each, ast.Call)
                and each.args
                and last_part(dotted(each.func)) == "fully_shard"
            ):
                yield last_part(dotted(each.args[0])), True


@dataclass(frozen=True)
class Surroundings:
    """The file and the class that a function is in.

    node: None for a function of the module.
    """

    names: Names
    node: ast.ClassDef | None = None

    @cached_property
    def lightning(self) -> bool:
        """Whether it is a module of Lightning's, by its bases or by the methods it has."""
        bases = self.node.bases if self.node else []
        names = {last_part(dotted(base)) for base in bases}
        return bool(names & _LIGHTNING_BASES or self._methods & _LIGHTNING_METHODS)

    @cached_property
    def manual(self) -> bool:
        """Whether it says that it runs the backward pass by itself."""
        refused = assigned(self.node, lambda value: constant(value) is False)
        return any(name.endswith(".automatic_optimization") for name in refused)

    @cached_property
    def accumulated(self) -> frozenset[str]:
        """Attributes that it adds to in its steps: `self.outputs.append(...)`."""
        called = (
            dotted(call.func).rpartition(".")
            for each in self._functions
            if _STEP.search(each.name)
            for call in nodes(each, ast.Call)
        )
        return frozenset(
            owner
            for owner, _, last in called
            if last in _ADDING and owner.startswith("self.")
        )

    @cached_property
    def metrics(self) -> frozenset[str]:
        return assigned(
            self.node,
            lambda value: (
                isinstance(value, ast.Call)
                and self.names.origin(value.func).startswith("torchmetrics.")
            ),
        )

    @cached_property
    def _functions(self) -> list[ast.FunctionDef]:
        return list(nodes(self.node or ast.Pass(), ast.FunctionDef))

    def collective(self, call: ast.Call) -> Collective | None:
        """Which collective a call is; None if it is none, or one of a group that may have some
        ranks only.
        """
        name = dotted(call.func)
        origin = self.names.origin(call.func)
        owner, _, last = name.rpartition(".")
        holder = last_part(owner)
        made = Collective(name, pairs_with=last, line=call.lineno)
        if owner in _USUAL_NAMES:
            origin = f"torch.distributed.{last}"
        kind = last_part(origin)
        for modules, names, why in _BY_ORIGIN:
            if origin.startswith(modules) and kind in names and kind != origin:
                if names is not _OF_SHARDS and self.of_a_group(call):
                    return None
                return replace(made, pairs_with=kind, why=why)
        if kind == "optim_state_dict_to_load":
            return replace(made, guess="the state is sharded, or on rank 0 alone")
        if holder == "accelerator" and last in _OF_ACCELERATOR:
            return replace(made, guess="the model is sharded, by FSDP or DeepSpeed")
        gathers = name == "self.all_gather" and self.lightning
        if gathers or last in _OF_HOLDER.get(holder, ()):
            return None if self.of_a_group(call) else made
        evaluates = last == "evaluate" and "transformers" in self.names.imported
        if owner in _TRAINERS and (last in _OF_TRAINER or evaluates):
            return replace(made, why="which waits for all ranks")
        if last in _OF_ENGINE and "engine" in holder and self.names.in_parallel:
            return replace(made, why="which all ranks of DeepSpeed save in")
        if last == "clip_grad_norm_" and self.names.wrapped.get(holder):
            return replace(made, why="which reduces the norm of sharded gradients")
        return self._log(made, call) if name in _LOGS else self._of_model(made, call)

    def _of_model(self, made: Collective, call: ast.Call) -> Collective | None:
        owner, _, last = made.name.rpartition(".")
        holder = last_part(owner)
        if last == COMPUTE and not call.args:
            made = replace(made, why="which gathers the metric from all ranks")
            if owner in self.metrics:
                return made
            if not _METRIC_WORDS.isdisjoint(holder.lower().split("_")):
                return replace(made, guess="it is a metric of torchmetrics")
        if last == "state_dict" and holder.endswith("model") and self.names.sharded:
            guess = (
                "" if self.names.wrapped.get(holder) else "the model is wrapped in FSDP"
            )
            return replace(made, why="which gathers sharded parameters", guess=guess)
        runs_backward = last == "backward" and (
            self.lightning or self.names.in_parallel
        )
        if made.name == "self.manual_backward" or runs_backward:
            return replace(made, pairs_with=BACKWARD, why="which reduces the gradients")
        of_nemo = self.names.sharded or not self.names.foreign
        if last in _ENCODERS and made.name.startswith("self.") and of_nemo:
            return replace(made, pairs_with=ENCODER)
        return self._forward(call)

    def _forward(self, call: ast.Call) -> Collective | None:
        """The call of a module that is wrapped for several ranks."""
        module = call.func.value if isinstance(call.func, ast.Subscript) else call.func
        name = last_part(dotted(module))
        sharded = self.names.wrapped.get(name)
        if sharded is None:
            return None
        made = Collective(text_of(call.func), pairs_with=FORWARD, line=call.lineno)
        if sharded:
            perhaps = name in self.names.perhaps_sharded
            guess = "the module is sharded, which a test decides" if perhaps else ""
            return replace(made, why=_GATHERS, guess=guess)
        part = dotted(module).startswith("self.") and "forward" in self._methods
        guess = (
            "" if part else "the model has buffers, which are broadcast at each call"
        )
        return replace(made, why="whose gradients are reduced", guess=guess)

    def of_a_group(self, call: ast.Call) -> bool:
        """Whether it is given another group than that of all ranks, or to be made alone."""
        given = [each for each in call.keywords if each.arg not in ("src", "dst")]
        texts = {
            dotted(name)
            for each in (*call.args, *given)
            for name in nodes(each, ast.Name, ast.Attribute)
        }
        texts -= {"dist.group", "torch.distributed.group"}  # of group.WORLD
        named = (text.lower() for text in texts if not text.endswith("WORLD"))
        return (
            any(map(_GROUP.search, named))
            or any(each.arg == "no_dist" for each in given)
            or not self.names.groups.isdisjoint(texts)
        )

    @cached_property
    def _methods(self) -> frozenset[str]:
        return frozenset(each.name for each in self._functions)

    def property_read(self, node: ast.Attribute) -> Collective | None:
        """Which collective it is to read a property of Lightning's; None if it is none."""
        owner, _, last = dotted(node).rpartition(".")
        known = _PROPERTIES_OF_TRAINER.get(last)
        if known is None or owner not in _TRAINERS or isinstance(node.ctx, ast.Store):
            return None
        pairs_with, why, guess = known
        made = Collective(dotted(node), pairs_with, node.lineno)
        return replace(made, why=why, guess=guess)

    def _log(self, made: Collective, call: ast.Call) -> Collective | None:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if constant(given.get("rank_zero_only")) is True or "sync_dist_group" in given:
            return None
        if "sync_dist" in given and constant(given["sync_dist"]) is not False:
            on_step = constant(given.get("on_step"))
            why = "which reduces over all ranks by sync_dist"
            return replace(made, pairs_with=LOG, why=why, on_step=on_step)
        values = [*call.args[1:2], *filter(None, [given.get("value")])]
        if any(dotted(value) in self.metrics for value in values):
            return replace(
                made,
                pairs_with=LOG,
                why="which gathers a metric from all ranks",
                on_step=False,
            )
        return None


def _returned(body: Sequence[ast.stmt]) -> ast.expr | None:
    """What a function returns that does nothing but to choose it."""
    if not body:
        return None
    first, *rest = body
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return _returned(rest)
    if isinstance(first, ast.Try):
        return _returned(first.body)
    if isinstance(first, ast.If):
        yes = _returned(first.body)
        no = _returned(first.orelse or rest)
        return (
            ast.IfExp(first.test, yes, no)
            if yes is not None and no is not None
            else None
        )
    return first.value if isinstance(first, ast.Return) else None


def _names_in(node: ast.AST) -> list[str]:
    """The last parts of the names in an expression, without those of what is called."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return [last_part(dotted(node))]
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        parts = [*owner, *node.args]
    return [name for each in parts for name in _names_in(each)]
