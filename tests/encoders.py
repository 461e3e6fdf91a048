"""Small real NeMo encoders for tests, one maker for each target class that the installed NeMo has."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# What the encoders' positional encodings are built for; tests use longer inputs.
POSITIONS = 60
FEATURES = 16


CONFORMER: dict[str, Any] = {
    "feat_in": FEATURES,
    "n_layers": 1,
    "d_model": 16,
    "n_heads": 2,
    "subsampling": "dw_striding",
    "subsampling_factor": 8,
    "subsampling_conv_channels": 8,
    "conv_kernel_size": 5,
    "pos_emb_max_len": POSITIONS,
}


def conformer(**changes: Any) -> torch.nn.Module:
    from nemo.collections.asr.modules import ConformerEncoder

    return ConformerEncoder(**{**CONFORMER, **changes})


def squeezeformer(**changes: Any) -> torch.nn.Module:
    from nemo.collections.asr.modules.squeezeformer_encoder import SqueezeformerEncoder

    settings = {
        **CONFORMER,
        "n_layers": 3,
        "subsampling_factor": 4,
        "time_reduce_idx": 1,
    }
    return SqueezeformerEncoder(**{**settings, **changes})


def transformer(**changes: Any) -> torch.nn.Module:
    from nemo.collections.asr.modules.transformer_encoder import TransformerEncoder

    settings = {
        "feat_in": FEATURES,
        "n_layers": 1,
        "d_model": 32,
        "n_heads": 2,
        "pos_emb_max_len": POSITIONS,
    }
    return TransformerEncoder(**{**settings, **changes})


def conv_asr(**changes: Any) -> torch.nn.Module:
    from nemo.collections.asr.modules import ConvASREncoder

    block = {
        "filters": 16,
        "repeat": 1,
        "kernel": [3],
        "stride": [2],
        "dilation": [1],
        "dropout": 0.1,
        "residual": False,
        "separable": True,
        "se": True,
    }
    return ConvASREncoder(
        jasper=[block, {**block, "stride": [1]}],
        activation="relu",
        feat_in=FEATURES,
        **changes,
    )


FORWARD_ONLY = ("transformer",)  # its FlexAttention has no backward on CPU


PUNCTUATION = (
    "nemo.collections.nlp.models.token_classification.punctuation_capitalization_lexical_audio_model",
    "PunctuationCapitalizationLexicalAudioModel",
)


def punctuation(built_for: int = POSITIONS) -> Any:
    """A target that is no encoder and not among the makers: bare, no language model and no audio
    encoder.

    Its collection takes long to import. It has what its length sync and padding mask need, and one
    parameter more.
    """
    module, name = PUNCTUATION
    owner: Any = getattr(importlib.import_module(module), name)
    owner = getattr(owner, "__wrapped__", owner)  # NeMo's @experimental
    model = owner.__new__(owner)
    torch.nn.Module.__init__(model)
    model.audio_proj = torch.nn.Linear(1, 1)
    model.set_max_audio_length(built_for)
    return model


def makers() -> dict[str, Callable[..., torch.nn.Module]]:
    """By name, those that the installed NeMo has. Nothing of it is imported for that."""
    nemo = importlib.util.find_spec("nemo")
    assert nemo is not None and nemo.submodule_search_locations is not None
    (folder,) = nemo.submodule_search_locations
    found = {"conformer": conformer, "conv_asr": conv_asr}
    for name, module, maker in (
        ("squeezeformer", "squeezeformer_encoder", squeezeformer),
        ("transformer", "transformer_encoder", transformer),
    ):
        if Path(folder, "collections/asr/modules", f"{module}.py").exists():
            found[name] = maker
    return found


def has_flag(encoder: torch.nn.Module) -> bool:
    """Whether the encoder's config can switch the sync off (the Conformer's cannot in NeMo 2.1)."""
    return hasattr(encoder, "sync_max_audio_length")


def run(
    encoder: torch.nn.Module, frames: int, seed: int = 0, batch: int = 2
) -> torch.Tensor:
    """One forward with random features of `frames` frames; the encoded tensor."""
    chance = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, FEATURES, frames, generator=chance)
    encoded = encoder(audio_signal=features, length=torch.tensor([frames] * batch))
    return encoded[0]


def sync(encoder: torch.nn.Module, length: int) -> float:
    """Only the length sync and the growth of one call, without the layers behind it; the seconds
    that it took.
    """
    update = (
        getattr(encoder, "update_max_seq_length", None)
        or encoder.update_max_sequence_length
    )
    start = time.monotonic()
    update(seq_length=length, device=torch.device("cpu"))
    return time.monotonic() - start


def length_sized(encoder: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The positional rows and ranges that the encoder's forward reads, by name."""
    return {
        f"{path}.{name}": getattr(module, name)
        for path, module in encoder.named_modules()
        for name in ("pe", "seq_range")
        if isinstance(getattr(module, name, None), torch.Tensor)
    }


def wrong_rows(encoder: torch.nn.Module) -> int:
    """How many positional rows or range elements differ from what they should be at their length."""
    wrong = 0
    for path, module in encoder.named_modules():
        if isinstance(getattr(module, "pe", None), torch.Tensor):
            fresh = type(module)(d_model=module.d_model, dropout_rate=0.0)
            fresh.extend_pe(
                (
                    (module.pe.size(1) + 1) // 2
                    if "Rel" in type(module).__name__
                    else module.pe.size(1)
                ),
                "cpu",
                module.pe.dtype,
            )
            wrong += int((fresh.pe != module.pe).any(-1).sum())
        if isinstance(getattr(module, "seq_range", None), torch.Tensor):
            wrong += int(
                (module.seq_range != torch.arange(len(module.seq_range))).sum()
            )
        assert path is not None
    return wrong
