"""A training script as NeMo's users have it: hydra_runner, Lightning, DDP. One rank raises, where
it is told to.

    torchrun --nproc-per-node 3 tests/hydra_app.py +place=training_step +culprit=1 +step=2

Or all do, and the script catches it: `caught` trains again, `stopped` has no more to do.
"""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from nemo.core.config import hydra_runner
from omegaconf import DictConfig

sys.path.append(str(Path(__file__).parent))
import encoders

CAUGHT, STOPPED = "caught", "stopped"


class Utterances(torch.utils.data.Dataset[torch.Tensor]):
    """odd: what comes of the utterance at that index."""

    def __init__(self, size: int, odd: int = -1, place: str = "") -> None:
        self.size, self.odd, self.place = size, odd, place

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.odd and self.place == "download":
            raise ConnectionResetError(104, "Connection reset by peer")
        return torch.ones(encoders.FEATURES, 65 if index == self.odd else 64)


class Model(pl.LightningModule):
    def __init__(self, place: str, step: int) -> None:
        super().__init__()
        self.encoder = encoders.conformer()
        self.place, self.step = place, step

    def setup(self, stage: str) -> None:
        if self.place == "setup":
            raise FileNotFoundError(
                2, "No such file or directory", "/data/manifest.json"
            )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        encoded, _ = self.encoder(
            audio_signal=batch, length=torch.full((len(batch),), batch.shape[-1])
        )
        return encoded.square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.place in ("training_step", CAUGHT, STOPPED) and batch_idx == self.step:
            raise ValueError("no such audio: a_17.wav")
        return self(batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if self.place == "validation" and batch_idx == 1:
            raise KeyError("transcript")
        self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class FullDisk(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, *arguments: Any, **_: Any) -> None:
        if arguments[-1] == self.step:
            raise OSError(28, "No space left on device")


@hydra_runner(config_path=".", config_name=None)
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(1)
    if cfg.place not in (CAUGHT, STOPPED):
        train(cfg, cfg.place if int(os.environ["RANK"]) == cfg.culprit else "")
        return
    with contextlib.suppress(ValueError):
        train(cfg, cfg.place)
    if cfg.place == CAUGHT:
        train(cfg, "")


def train(cfg: DictConfig, place: str) -> None:
    odd = 2 * cfg.step + 1 if place in ("worker", "download") else -1
    training = torch.utils.data.DataLoader(
        Utterances(40, odd, place), batch_size=2, num_workers=1
    )
    validation = torch.utils.data.DataLoader(Utterances(6), batch_size=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(timeout=timedelta(seconds=cfg.get("group_timeout", 60))),
        max_epochs=1,
        val_check_interval=cfg.step if cfg.place == "validation" else None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[FullDisk(cfg.step)] if place == "callback" else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(place, cfg.step), training, validation)


if __name__ == "__main__":
    main()
