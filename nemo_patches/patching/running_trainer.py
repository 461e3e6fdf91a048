"""A callback that sees a Lightning trainer begin: it has ranks, and knows the last batch."""

from __future__ import annotations

import sys
from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer


class RunningTrainer(Callback):  # type: ignore[misc]  # Lightning is not looked into
    """In a process that stays alone it imports nothing of ours."""

    def __init__(self, begin_reports: Callable[[], None] | None = None) -> None:
        """begin_reports: where the launcher has said nothing of several ranks."""
        self._begin_reports = begin_reports

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The process group is there now, and no data loader has forked a worker yet."""
        if self._begin_reports is not None and trainer.world_size > 1:
            self._begin_reports()
        subscriber = sys.modules.get("nemo_patches.watch.subscriber")
        if subscriber is not None:
            subscriber.trains_with(trainer)
