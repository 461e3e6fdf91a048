"""NEST self-supervised pre-training with NVIDIA NeMo 3.0, as any training script.

Not a word of nemo_patches in it.

    nemo-patches doctor examples/nest/nest_ddp.yaml model.train_ds.manifest_filepath=train.json ...
    nemo-patches run -- torchrun --nproc-per-node 8 examples/nest/pretrain.py \\
        --config-name nest_ddp \\
        model.train_ds.manifest_filepath=train.json \\
        model.validation_ds.manifest_filepath=validation.json \\
        model.train_ds.noise_manifest=noise.json \\
        model.validation_ds.noise_manifest=noise.json

Manifests are NeMo's: one JSON object per line, with audio_filepath and duration.
"""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from nemo.collections.asr.models import EncDecDenoiseMaskedTokenPredModel
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager
from nemo.utils.trainer_utils import resolve_trainer_cfg
from omegaconf import DictConfig


def train(config: DictConfig, callbacks: Sequence[pl.Callback] = ()) -> pl.Trainer:
    """Train as the config says, to the end."""
    trainer = pl.Trainer(
        **resolve_trainer_cfg(config.trainer), callbacks=list(callbacks)
    )
    if config.get("exp_manager"):
        exp_manager(trainer, config.exp_manager)
    model = EncDecDenoiseMaskedTokenPredModel(cfg=config.model, trainer=trainer)
    trainer.fit(model)
    return trainer


@hydra_runner(config_path=".", config_name="nest")
def main(config: DictConfig) -> None:
    train(config)


if __name__ == "__main__":
    main()
