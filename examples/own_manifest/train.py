"""Train a CTC model on your own manifest: torchrun ... train.py MANIFEST [KEY=VALUE]...; keys:
ctc/finetune.yaml.
"""

import sys
from pathlib import Path

import lightning.pytorch as pl
from nemo.collections.asr.models import EncDecCTCModel
from omegaconf import OmegaConf

import nemo_patches

nemo_patches.apply()
config = OmegaConf.load(Path(__file__).parent.parent / "ctc" / "finetune.yaml")
config.model.train_ds.manifest_filepath = (
    config.model.validation_ds.manifest_filepath
) = sys.argv[1]
config = OmegaConf.merge(config, OmegaConf.from_cli(sys.argv[2:]))
trainer = pl.Trainer(**config.trainer)
model = EncDecCTCModel(cfg=config.model, trainer=trainer)
trainer.fit(model)
model.save_to("trained.nemo")
