"""Begins the watch of a Lightning job whose launcher says nothing of several ranks."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer


class JobWatch(Callback):  # type: ignore[misc]  # Lightning is not looked into
    """In a process that stays alone it imports nothing of ours."""

    def __init__(self, begin_watch: Callable[[], None]) -> None:
        self._begin_watch = begin_watch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The process group is there now, and no data loader has forked a worker yet."""
        if trainer.world_size > 1:
            self._begin_watch()
