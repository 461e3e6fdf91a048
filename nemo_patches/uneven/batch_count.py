"""Counts the batches that Lightning trains on, for comparing the ranks' parameters."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from nemo_patches.uneven.parameter_watch import parameter_watch


class BatchCount(Callback):  # type: ignore[misc]  # Lightning is not looked into
    """Counts for all trainers of this process."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parameter_watch.training_began()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        parameter_watch.batch_began()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parameter_watch.training_ended()
