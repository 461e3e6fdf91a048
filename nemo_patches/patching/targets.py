"""The table of NeMo's classes and methods with a length sync, and the code that is expected."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import cast

from nemo_patches.sync.places import function_of, is_ours, layers, place_of


def names(text: str) -> frozenset[str]:
    """The names in a text, with spaces between them."""
    return frozenset(text.split())


# What the methods' code reads, apart from its own arguments; `co_names` of the compiled function.
_REDUCE = names(
    """
    torch distributed is_initialized tensor float32 all_reduce ReduceOp MAX int item
    max_audio_length
    """
)
_GROW = _REDUCE | {"set_max_audio_length"}
_GROW_FLAG = _GROW | {"sync_max_audio_length"}
_GROW_INLINE = _REDUCE | names(
    """
    next parameters device arange hasattr seq_range register_buffer named_modules isinstance
    MaskedConv1d update_masked_length SqueezeExcite set_max_len
    """
)


# What the diffs of patches/ put into NeMo: a module, and the function that its encoders call
# instead of the reduce.
BOUNDED_SYNC = "nemo.collections.asr.parts.utils.bounded_length_sync"
BOUNDED_FUNCTION = "max_length_in_time"
# Why a target is left as it is.
HAS_DIFF = "a diff of patches/ has bounded it in this NeMo"
NO_REDUCE = "no reduce here: nothing to bound"


class DriftError(RuntimeError):
    """NeMo's code is not what this version of nemo_patches knows; nothing was patched."""


@dataclass(frozen=True)
class Target:
    """One method with the unbounded reduce.

    reads: for each known version of the method, the names that its code reads.
    setter: the method that grows the buffers; empty where `method` does so itself.
    """

    module: str
    owner: str
    method: str
    reads: tuple[frozenset[str], ...]
    setter: str = "set_max_audio_length"
    parameters: tuple[str, ...] = ("self", "seq_length", "device")

    def __str__(self) -> str:
        return f"{self.owner}.{self.method}"

    def find_owner(self, module: ModuleType) -> type | None:
        """The class itself: NeMo's @experimental wraps some classes in a callable that prints a
        warning.
        """
        return cast("type | None", layers(getattr(module, self.owner, None))[-1])

    def nothing_to_bound(self, module: ModuleType) -> str:
        """Why there is nothing to patch: HAS_DIFF, or NO_REDUCE; empty where NeMo's reduce is."""
        method = vars(self.find_owner(module) or object).get(self.method)
        return self.left_in(method.__code__) if type(method) is FunctionType else ""

    def left_in(self, method: CodeType) -> str:
        """Like nothing_to_bound(), of the method's code."""
        names = set(method.co_names)
        if BOUNDED_FUNCTION in names:
            return HAS_DIFF
        # What calls something unknown may reduce there, and a wrapper reads nothing.
        expected = f"({', '.join(self.parameters)})"
        if "max_audio_length" not in names or _parameters(method) != expected:
            return ""
        known = (
            reads - {"all_reduce"} for reads in self.reads if "all_reduce" in reads
        )
        return NO_REDUCE if any(names <= reads for reads in known) else ""

    def drift(self, module: ModuleType) -> str:
        """How `module` differs from what is known: what was expected, and what was found; empty if
        it does not.
        """
        owner = self.find_owner(module)
        if not isinstance(owner, type):
            return self.no_class(owner)

        def find(method: str) -> CodeType | str:
            function = owner.__dict__.get(method)
            plain = type(function) is FunctionType and not hasattr(
                function, "__wrapped__"
            )
            return cast(FunctionType, function).__code__ if plain else repr(function)

        problem = self.drift_of(find)
        return problem and self._put_there(owner, module) + problem

    def source_file(self) -> Path | None:
        """The file of `module`, found without importing it; None where the installed NeMo does not
        have it.

        Raises ModuleNotFoundError without NeMo.
        """
        nemo, package, *inner = self.module.split(".")
        # Imports no more than nemo itself.
        spec = importlib.util.find_spec(f"{nemo}.{package}")
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        files = (Path(folder, *inner).with_suffix(".py") for folder in folders)
        return next((file for file in files if file.is_file()), None)

    def no_class(self, instead: object) -> str:
        return f"{self.module}: expected a class {self.owner}, found {instead!r}"

    def _put_there(self, owner: type, module: ModuleType) -> str:
        """Says who has wrapped or replaced a method that apply() would replace; empty if it is
        NeMo's own.
        """
        for method in filter(None, (self.method, self.setter)):
            found = vars(owner).get(method)
            text: list[str] = []
            for layer in layers(found):
                if is_ours(layer):
                    text.append("nemo_patches' own, of before revert()")
                    break
                is_nemos = getattr(function_of(layer), "__globals__", None) is vars(
                    module
                )
                text.append("NeMo's own" if is_nemos else place_of(layer))
            if found is not None and text != ["NeMo's own"]:
                advice = "take that off before apply(), or put it on after apply()"
                return f"{self.owner}.{method} is {', around '.join(text)}; {advice}: "
        return ""

    def drift_of(self, find: Callable[[str], CodeType | str]) -> str:
        """find: the code of a method, or what is there instead of a plain function, as text."""
        methods = {self.method: self.parameters}
        if self.setter:
            methods[self.setter] = ("self", "max_audio_length")
        for method, parameters in methods.items():
            code = find(method)
            actual = code if isinstance(code, str) else _parameters(code)
            expected = f"({', '.join(parameters)})"
            if actual != expected:
                text = f"expected a plain function {expected}, found {actual}"
                return f"{self.owner}.{method}: {text}"
        reads = frozenset(cast(CodeType, find(self.method)).co_names)
        if reads in self.reads:
            return ""
        closest = min(self.reads, key=lambda known: len(known ^ reads))
        return (
            f"{self.owner}.{self.method}: expected code that reads {sorted(closest)}; "
            f"found without {sorted(closest - reads)} and with {sorted(reads - closest)}"
        )


TARGETS = (
    Target(
        "nemo.collections.asr.modules.conformer_encoder",
        "ConformerEncoder",
        "update_max_seq_length",
        (_GROW_FLAG, _GROW),
    ),
    Target(
        "nemo.collections.asr.modules.squeezeformer_encoder",
        "SqueezeformerEncoder",
        "update_max_seq_length",
        (_GROW,),
    ),
    Target(
        "nemo.collections.asr.modules.transformer_encoder",
        "TransformerEncoder",
        "update_max_seq_length",
        (_GROW_FLAG,),
    ),
    Target(
        "nemo.collections.asr.modules.conv_asr",
        "ConvASREncoder",
        "update_max_sequence_length",
        (_GROW_INLINE,),
        setter="",
    ),
    Target(
        "nemo.collections.nlp.models.token_classification.punctuation_capitalization_lexical_audio_model",
        "PunctuationCapitalizationLexicalAudioModel",
        "update_max_seq_length",
        (_GROW,),
    ),
)

_SAVE = names(
    """
    AppState _backup_existing_nemo_ckpt _format_nemo_checkpoint_name always_save_nemo barrier
    best_model_path debug distributed exists get_filesystem info inject_model_parallel_rank
    is_global_rank_zero is_initialized logging model_parallel_size model_restore_path
    on_save_checkpoint os path previous_best_path rm save_best_model save_to super torch warning
    """
)
_LOADS_BEST = names("deepcopy load load_state_dict state_dict")  # NeMo before 3.0
_CANDIDATES = names(
    """
    Tensor callback_metrics current_epoch deepcopy get global_step int isinstance tensor torch
    """
)
# Of the checkpoint callback, whose ranks take rank 0's view: the methods of which more than the
# call is relied upon.
CHECKPOINT_TARGETS = (
    Target(
        module="nemo.utils.callbacks.nemo_model_checkpoint",
        owner="NeMoModelCheckpoint",
        method="on_save_checkpoint",
        reads=(_SAVE, _SAVE | _LOADS_BEST),
        setter="",
        parameters=("self", "trainer", "pl_module", "checkpoint"),
    ),
)
# What it inherits, and is put into NeMo's class.
CHECKPOINT_BASES = (
    Target(
        module="lightning.pytorch.callbacks.model_checkpoint",
        owner="ModelCheckpoint",
        method="_monitor_candidates",
        reads=(_CANDIDATES,),
        setter="",
        parameters=("self", "trainer"),
    ),
)


def _parameters(code: CodeType) -> str:
    stars = (code.co_flags & inspect.CO_VARARGS > 0) + (
        code.co_flags & inspect.CO_VARKEYWORDS > 0
    )
    return f"({', '.join(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars])})"
