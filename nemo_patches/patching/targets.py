"""The table of NeMo's classes and methods with a length sync, and what they must look like to be patched."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import cast

# What the methods' code reads, apart from its own arguments; `co_names` of the compiled function.
_REDUCE = frozenset(
    {
        "torch",
        "distributed",
        "is_initialized",
        "tensor",
        "float32",
        "all_reduce",
        "ReduceOp",
        "MAX",
        "int",
        "item",
        "max_audio_length",
    }
)
_GROW = _REDUCE | {"set_max_audio_length"}
_GROW_FLAG = _GROW | {"sync_max_audio_length"}
_GROW_INLINE = _REDUCE | {
    "next",
    "parameters",
    "device",
    "arange",
    "hasattr",
    "seq_range",
    "register_buffer",
    "named_modules",
    "isinstance",
    "MaskedConv1d",
    "update_masked_length",
    "SqueezeExcite",
    "set_max_len",
}


class DriftError(RuntimeError):
    """NeMo's code is not what this version of nemo_patches knows; nothing was patched."""


@dataclass(frozen=True)
class Target:
    """One method with the unbounded reduce. `reads` are the sets of names that its known versions read."""

    module: str
    owner: str
    method: str
    reads: tuple[frozenset[str], ...]
    setter: str = "set_max_audio_length"  # the method that grows the buffers; empty where `method` does so itself
    parameters: tuple[str, ...] = ("self", "seq_length", "device")

    def __str__(self) -> str:
        return f"{self.owner}.{self.method}"

    def find_owner(self, module: ModuleType) -> type | None:
        """The class; NeMo's @experimental hides some in a callable that only says so."""
        return cast("type | None", inspect.unwrap(getattr(module, self.owner, None)))  # type: ignore[arg-type]

    def drift(self, module: ModuleType) -> str:
        """What in `module` is not as expected, with what was expected and what was found; empty where all is."""
        owner = self.find_owner(module)
        if not isinstance(owner, type):
            return f"{self.module}: expected a class {self.owner}, found {owner!r}"
        problem = _signature_drift(owner, self.method, self.parameters)
        if not problem and self.setter:
            problem = _signature_drift(owner, self.setter, ("self", "max_audio_length"))
        if problem:
            return problem
        found = frozenset(owner.__dict__[self.method].__code__.co_names)
        if found in self.reads:
            return ""
        closest = min(self.reads, key=lambda reads: len(reads ^ found))
        return (
            f"{self.owner}.{self.method}: expected code that reads {sorted(closest)}; "
            f"found without {sorted(closest - found)} and with {sorted(found - closest)}"
        )


TARGETS = (
    Target(
        "nemo.collections.asr.modules.conformer_encoder",
        "ConformerEncoder",
        "update_max_seq_length",
        (_GROW_FLAG, _GROW),
    ),
    Target(
        "nemo.collections.asr.modules.squeezeformer_encoder", "SqueezeformerEncoder", "update_max_seq_length", (_GROW,)
    ),
    Target(
        "nemo.collections.asr.modules.transformer_encoder", "TransformerEncoder", "update_max_seq_length", (_GROW_FLAG,)
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


def _signature_drift(owner: type, method: str, parameters: tuple[str, ...]) -> str:
    function = owner.__dict__.get(method)
    expected = f"{owner.__name__}.{method}: expected a plain function ({', '.join(parameters)}), found "
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return expected + repr(function)
    found = tuple(inspect.signature(function).parameters)
    return "" if found == parameters else f"{expected}({', '.join(found)})"
