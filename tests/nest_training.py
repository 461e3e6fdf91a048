"""examples/nest/pretrain.py on two ranks of this machine's CPU, small, where rank 1 stalls once
before the encoder.

Run by torchrun, or alone, when Lightning starts the other rank. In the training there is not a word
of nemo_patches.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STEPS, STALL_AT, STALL = 4, 1, 12.0
EXAMPLE = Path(__file__).parent.parent / "examples" / "nest"


def overrides(folder: Path) -> list[str]:
    """What the example needs to be small, and its data: what the demo writes, a manifest for each
    rank.
    """

    def manifest(name: str) -> str:
        return f"{folder}/{name}-${{oc.env:LOCAL_RANK,0}}.json"

    return [
        f"model.train_ds.manifest_filepath='{manifest('train')}'",
        f"model.validation_ds.manifest_filepath='{manifest('validation')}'",
        f"model.train_ds.noise_manifest={folder}/noise.json",
        f"model.validation_ds.noise_manifest={folder}/noise.json",
        "model.train_ds.batch_size=2",
        "model.train_ds.num_workers=1",
        "model.num_classes=64",
        "model.encoder.n_layers=2",
        "model.encoder.d_model=32",
        "model.encoder.n_heads=2",
        "model.encoder.subsampling_conv_channels=16",
        "~model.encoder.sync_max_audio_length",  # as in most configs, where NeMo then takes true
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        f"trainer.max_steps={STEPS}",
        "+trainer.limit_val_batches=0",
        "+trainer.use_distributed_sampler=false",
        "+trainer.enable_progress_bar=false",
        "exp_manager=null",
    ]


def main() -> None:
    sys.path.insert(0, str(EXAMPLE))
    import lightning.pytorch as pl
    import pretrain
    import torch
    from nemo.core.config import hydra_runner

    class Stall(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            def stall(*_: object) -> None:
                # What the data loaders differ by is none of the stall's
                torch.distributed.barrier()
                if trainer.global_rank == 1 and trainer.global_step == STALL_AT:
                    time.sleep(STALL)  # the straggler itself, not a wait of the test's

            module.encoder.register_forward_pre_hook(stall)

    @hydra_runner(config_path=str(EXAMPLE), config_name="nest_ddp")  # type: ignore[untyped-decorator]
    def train(config: Any) -> None:
        torch.set_num_threads(1)
        trainer = pretrain.train(config, [Stall()])
        end = {
            "rank": trainer.global_rank,
            "size": trainer.world_size,
            "steps": trainer.global_step,
        }
        # At once: both ranks write into one pipe.
        os.write(1, f"{json.dumps(end)}\n".encode())

    train()


if __name__ == "__main__":
    main()
