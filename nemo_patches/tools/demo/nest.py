"""The demo's model: that of examples/nest/nest.yaml, with a small encoder and a small codebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_patches.tools.demo.jobs import BATCH_SIZE

FEATURES = 80  # mel bins
WIDTH = 32  # of the encoder
CODES = 64  # in the quantizer's codebook

# In a checkout, a link to the example; a wheel has no examples.
_EXAMPLE = Path(__file__).with_name("nest.yaml")
_SMALL = [
    f"num_classes={CODES}",
    "masking.mask_prob=0.05",
    "encoder.n_layers=2",
    f"encoder.d_model={WIDTH}",
    "encoder.subsampling_conv_channels=16",
    "encoder.ff_expansion_factor=2",
    "encoder.n_heads=2",
    "optim.sched.warmup_steps=100",
]
_DATA = {
    "batch_size": BATCH_SIZE,
    "channel_selector": "average",  # a user's audio may be stereo
    "shuffle": False,
    "num_workers": 0,
    "pin_memory": False,
    "max_duration": 60.0,  # as in NeMo's config: inputs outgrow the positional encodings
}


def model(folder: Path, rank: int) -> dict[str, Any]:
    """The model's config. folder: with the manifests."""
    small = OmegaConf.create({"model": OmegaConf.from_dotlist(_SMALL)})
    config = OmegaConf.merge(OmegaConf.load(_EXAMPLE), small).model
    for name in ("train", "validation"):
        manifests = {
            "manifest_filepath": f"{folder}/{name}-{rank}.json",
            "noise_manifest": f"{folder}/noise.json",
        }
        config[f"{name}_ds"].update(_DATA, **manifests)
    del config.train_ds.min_duration
    # Not every release has the flag; both are as by default.
    del config.encoder.sync_max_audio_length, config.encoder.pos_emb_max_len
    resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
    del resolved["noise"]  # both data sets have it
    return resolved


def conformer() -> dict[str, Any]:
    """The encoder's arguments."""
    return {
        name: value
        for name, value in model(Path(), 0)["encoder"].items()
        if name != "_target_"
    }


def make(config: dict[str, Any], trainer: Any) -> Any:
    """NeMo's model with this config."""
    from nemo.collections.asr.models import EncDecDenoiseMaskedTokenPredModel

    made = EncDecDenoiseMaskedTokenPredModel(
        cfg=OmegaConf.create(config), trainer=trainer
    )
    # NeMo 2.1 and 2.2 keep their parent class's decoder, which trains nothing: DDP stops at the
    # second step with it.
    made._modules.pop("decoder_ssl", None)
    return made
