"""A config against the one that NeMo publishes for that kind of model, or any other: what differs and matters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor.config import Config, Value
from nemo_patches.tools.doctor.datasets import ROLES
from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.interpolations import UNKNOWN
from nemo_patches.tools.doctor.trees import Keys
from nemo_patches.tools.doctor.yaml_text import LOADER

NOT_SET = "not set"
_REFERENCES = Path(__file__).with_name("references.yaml")

# What of a section says how ranks run together, with what NeMo or Lightning takes where it is not set.
_WHOLE = ("encoder", "preprocessor", "joint")
_ENCODER: dict[str, Any] = {
    "att_context_style": "regular",
    "causal_downsampling": False,
    "conv_kernel_size": 31,
    "conv_norm_type": "batch_norm",
    "dropout": 0.1,
    "dropout_att": 0.0,
    "dropout_emb": 0.1,
    "dropout_pre_encoder": 0.1,
    "feat_out": -1,
    "ff_expansion_factor": 4,
    "n_heads": 4,
    "pos_emb_max_len": 5000,
    "reduction_factor": 1,
    "self_attention_model": "rel_pos",
    "stochastic_depth_drop_prob": 0.0,
    "stochastic_depth_mode": "linear",
    "stochastic_depth_start_layer": 1,
    "subsampling": "striding",
    "subsampling_conv_channels": -1,
    "subsampling_factor": 4,
    "sync_max_audio_length": True,
    "untie_biases": True,
    "use_bias": True,
    "xscaling": True,
}
_PREPROCESSOR: dict[str, Any] = {
    "dither": 1e-5,
    "features": 64,
    "frame_splicing": 1,
    "log": True,
    "normalize": "per_feature",
    "pad_to": 16,
    "pad_value": 0.0,
    "sample_rate": 16000,
    "window": "hann",
    "window_size": 0.02,
    "window_stride": 0.01,
}
_SET: dict[str, Any] = {
    **dict.fromkeys(
        ("batch_size", "batch_duration", "quadratic_duration", "bucket_batch_size", "bucket_duration_bins")
    ),
    **dict.fromkeys(("max_duration", "min_duration", "session_len_sec", "bucketing_batch_size", "num_buckets")),
    "bucketing_strategy": "synced_randomized",
    "drop_last": False,
    "force_finite": False,
    "force_map_dataset": False,
    "is_tarred": False,
    "num_workers": 0,
    "pin_memory": False,
    "seed": 0,
    "shard_seed": "trng",
    "shuffle": NOT_SET,  # NeMo's models differ
    "tarred_shard_strategy": "scatter",
    "use_bucketing": False,
    "use_lhotse": False,
}
_TRAINER: dict[str, Any] = {
    "accelerator": "auto",
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "gradient_clip_val": None,
    "limit_train_batches": 1.0,
    "limit_val_batches": 1.0,
    "num_sanity_val_steps": 2,
    "precision": "32-true",
    "strategy": "auto",
    "sync_batchnorm": False,
    "use_distributed_sampler": True,
    "val_check_interval": 1.0,
}
_ALONE: dict[Keys, Any] = {("model", "skip_nan_grad"): False, ("exp_manager", "create_preemption_callback"): True}


@dataclass(frozen=True)
class Difference:
    """One setting that differs; `other` is the default where the other config leaves it to that."""

    own: Value
    other: Any
    is_default: bool

    def __str__(self) -> str:
        own = f"{self.own.key}: {NOT_SET}" if not self.own.given else str(self.own)
        other = "null" if self.other is None else self.other
        return f"{own}; there: {other}{', the default' * (self.is_default and other != NOT_SET)}"


def reference(name: str) -> Mapping[str, Any]:
    """The settings of a config by its name in references.yaml, or of a file. Raises DoctorError."""
    references: dict[str, dict[str, Any]] = yaml.load(_REFERENCES.read_text("utf-8"), Loader=LOADER)
    if name in references:
        return references[name]
    if not os.path.exists(name):
        raise DoctorError(f"--against {name!r} is not allowed; allowed: a file, {', '.join(references)}")
    return dict(settings(reading.load(Path(name))))


def differences(config: Config, other: Mapping[str, Any]) -> Iterator[Difference]:
    """What differs, in the order of the config; values that only the job will know differ from none."""
    own = dict(settings(config))
    for key in [*own, *(key for key in other if key not in own)]:
        default = _default(tuple(key.split(".")))
        mine, theirs = own.get(key, default), other.get(key, default)
        if mine != theirs and UNKNOWN not in (mine, theirs) and _is_there(config, key):
            yield Difference(config.get(key), theirs, key not in other)


def settings(config: Config) -> Iterator[tuple[str, Any]]:
    """The settings that matter, by their path."""
    for keys, section in config.mappings():
        for key, value in section.items():
            if not isinstance(value, dict) and _matters(keys, key):
                yield ".".join((*keys, key)), value


def _matters(keys: Keys, key: str) -> bool:
    if keys == ("trainer",):
        return key in _TRAINER
    if keys[:2] == ("trainer", "strategy") or (*keys, key) in _ALONE:
        return True
    if any(name in ROLES for name in keys):
        return key in _SET
    return bool(keys) and keys[0] == "model" and any(name in _WHOLE for name in keys)


def _default(keys: Keys) -> Any:
    """What holds where a setting is not there: null for all that is not listed."""
    if keys in _ALONE:
        return _ALONE[keys]
    section = keys[-2] if len(keys) > 1 else ""
    of_a_set = _SET if any(name in ROLES for name in keys) else {}
    return {"encoder": _ENCODER, "preprocessor": _PREPROCESSOR, "trainer": _TRAINER}.get(section, of_a_set).get(
        keys[-1]
    )


def _is_there(config: Config, key: str) -> bool:
    """Whether the config has the section at all: a set or a joint that it lacks is no difference in a setting."""
    return config.get(key.rpartition(".")[0]).given
