"""Begins the watch of a Lightning job whose launcher says nothing of several ranks: once its trainer has them."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from nemo_patches.patching import start_up


class JobWatch(Callback):  # type: ignore[misc]  # Lightning is not looked into
    """In a process that stays alone it imports nothing of ours."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The process group is there now, and no data loader has forked a worker yet."""
        if trainer.world_size > 1:
            start_up.begin_watch()
