"""Tells the stall reports which Lightning trainer runs: its loop knows the last batch."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from nemo_patches.watch import subscriber


class KnownTrainer(Callback):  # type: ignore[misc]  # Lightning is not looked into
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        subscriber.trains_with(trainer)
