"""Fine-tuning of a FastConformer with a CTC decoder over characters, with NVIDIA NeMo 3.0.

Not a word of nemo_patches in it.

    nemo-patches doctor examples/ctc/finetune.yaml trainer.devices=8 ...
    nemo-patches run -- torchrun --nproc-per-node 8 examples/ctc/finetune.py \\
        +init_from_nemo_model=pretrained.nemo \\
        model.train_ds.manifest_filepath=train.json \\
        model.validation_ds.manifest_filepath=validation.json

Manifests are NeMo's: one JSON object per line, with audio_filepath, duration and text. Without a
model to start from (init_from_nemo_model or init_from_pretrained_model) it trains from scratch.
"""

from __future__ import annotations

import lightning.pytorch as pl
from nemo.collections.asr.models import EncDecCTCModel
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager
from nemo.utils.trainer_utils import resolve_trainer_cfg
from omegaconf import DictConfig


def train(config: DictConfig) -> pl.Trainer:
    """Train as the config says, to the end."""
    trainer = pl.Trainer(**resolve_trainer_cfg(config.trainer))
    if config.get("exp_manager"):
        exp_manager(trainer, config.exp_manager)
    model = EncDecCTCModel(cfg=config.model, trainer=trainer)
    model.maybe_init_from_pretrained_checkpoint(config)
    trainer.fit(model)
    return trainer


@hydra_runner(config_path=".", config_name="finetune")
def main(config: DictConfig) -> None:
    train(config)


if __name__ == "__main__":
    main()
