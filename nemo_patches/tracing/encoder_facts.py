"""What a trace records about an encoder: its flag, config and normalisation, DDP, its length-sized buffers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from nemo_patches.growth import LENGTH_SIZED, growth, private_tensors
from nemo_patches.tracing.records import NOT_SET, Encoder

# By what a normalisation layer's class is called; the first that some layer has. SyncBatchNorm talks to other ranks.
_NORMALISATIONS = {
    "SyncBatchNorm": "sync_batch_norm",
    "BatchNorm": "batch_norm",
    "GroupNorm": "group_norm",
    "InstanceNorm": "instance_norm",
    "LayerNorm": "layer_norm",
    "RMSNorm": "rms_norm",
}


def facts(encoder: torch.nn.Module, t: float, e: int, name: str, ddp: bool) -> Encoder:
    """Walks the encoder's modules, so not for every call."""
    flag = getattr(encoder, "sync_max_audio_length", None)
    pos_emb_max_len = getattr(encoder, "pos_emb_max_len", None)
    registered, grown = {}, {}
    for path, module in encoder.named_modules():
        for buffer in {*LENGTH_SIZED, *growth.names.get(type(module), ())}:
            place = f"{path}.{buffer}" if path else buffer
            if isinstance(tensor := module._buffers.get(buffer), torch.Tensor):
                registered[place] = list(tensor.shape)
            if isinstance(tensor := private_tensors(module).get(buffer), torch.Tensor):
                grown[place] = list(tensor.shape)
    return Encoder(
        t=t,
        e=e,
        name=name,
        flag=flag if isinstance(flag, bool) else None,
        configured=configured_flag(encoder),
        pos_emb_max_len=pos_emb_max_len if isinstance(pos_emb_max_len, int) else None,
        normalisation=_normalisation(encoder),
        ddp=ddp,
        registered=registered,
        grown=grown,
    )


def positions(encoder: torch.nn.Module) -> int:
    """The signal length that the encoder's length-sized buffers allow; 0 if it has none."""
    return int(getattr(encoder, "max_audio_length", 0))


def active_ddp() -> torch.nn.Module | None:
    """The DistributedDataParallel whose forward is running; it notes itself, so nobody needs to search for it."""
    return cast("torch.nn.Module | None", getattr(DistributedDataParallel, "_active_ddp_module", None))


def first_layer(encoder: torch.nn.Module) -> torch.nn.Module | None:
    """The first of its layers: `layers[0]`, or, in a ConvASREncoder, `encoder[0]`. None where it has neither."""
    for name in ("layers", "encoder"):
        layers = encoder._modules.get(name)
        if isinstance(layers, torch.nn.ModuleList | torch.nn.Sequential) and len(layers):
            return layers[0]
    return None


def configured_flag(encoder: torch.nn.Module) -> str:
    """`sync_max_audio_length` in the config that NeMo made the encoder from, as of records.Encoder.configured."""
    config: Any = vars(encoder).get("_cfg")
    try:
        value = config.get("sync_max_audio_length")
    except Exception:  # no config, or an interpolation in it that leads nowhere
        return "?"
    return NOT_SET if value is None else str(value).lower()


def _normalisation(encoder: torch.nn.Module) -> str:
    kinds = {type(module).__name__ for module in encoder.modules()}
    return next((name for part, name in _NORMALISATIONS.items() if any(part in kind for kind in kinds)), "")
