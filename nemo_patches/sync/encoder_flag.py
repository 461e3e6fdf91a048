"""What is said of an encoder's `sync_max_audio_length`: in force, and by its config."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import torch

FLAG = "sync_max_audio_length"
NOT_SET = "not set"


def is_off(encoder: torch.nn.Module) -> bool:
    """Whether the encoder has no length sync: its own flag says so."""
    return not getattr(encoder, FLAG, True)


def flag_in_config(encoder: torch.nn.Module) -> str:
    """In the config that NeMo made the encoder from: "True", "False", NOT_SET; empty: no config."""
    config: Any = vars(encoder).get("_cfg")
    try:
        value = config.get(FLAG)
        return NOT_SET if value is None else str(value)
    except Exception:  # no config, or an interpolation in it that leads nowhere
        return ""


def flag_text(encoder: torch.nn.Module) -> str:
    """For example "sync_max_audio_length=False, set in the config"."""
    in_force = vars(encoder).get(FLAG)
    if in_force is None:
        return f"no {FLAG}"
    by_config = flag_in_config(encoder)
    if by_config == str(in_force):
        source = "set in the config"
    elif by_config == NOT_SET:
        source = NOT_SET
    elif by_config:
        source = f"and {by_config} in the config that it was made from"
    else:
        source = "its config is not known"
    return f"{FLAG}={in_force}, {source}"
