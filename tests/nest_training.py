"""A training script as a user has it, without a word of nemo_patches in its training: NEST pre-training on two ranks.

Run by torchrun, or alone, when Lightning starts the other rank. Rank 1 stalls once before the encoder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

STEPS, STALL_AT, STALL = 4, 1, 7.0


def main(folder: Path) -> None:
    import lightning.pytorch as pl
    import torch
    from nemo.collections.asr.models import EncDecDenoiseMaskedTokenPredModel
    from omegaconf import OmegaConf

    from nemo_patches.tools.demo import nest  # the configuration only
    from nemo_patches.tools.demo.jobs import Job

    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    config = nest.model(Job("training", True, rank, 2, 0, folder, timedelta(0)))
    config["train_ds"]["num_workers"] = 1
    model = EncDecDenoiseMaskedTokenPredModel(cfg=OmegaConf.create(config), trainer=trainer)

    def stall(*_: object) -> None:
        if rank == 1 and trainer.global_step == STALL_AT:
            time.sleep(STALL)  # the straggler itself, not a wait of the test's

    model.encoder.register_forward_pre_hook(stall)
    trainer.fit(model)
    print(
        json.dumps({"rank": trainer.global_rank, "size": trainer.world_size, "steps": trainer.global_step}), flush=True
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
