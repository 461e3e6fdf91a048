"""What a callback of ours does as a Lightning trainer begins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class TrainerBegins:
    """In a process that stays alone it imports nothing of ours."""

    def __init__(self, begin_reports: Callable[[], None] | None = None) -> None:
        """begin_reports: where the launcher has said nothing of several ranks."""
        self._begin_reports = begin_reports

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The process group is there now, and no data loader has forked a worker yet."""
        if self._begin_reports is not None and trainer.world_size > 1:
            self._begin_reports()
        subscriber = sys.modules.get("nemo_patches.watch.subscriber")
        if subscriber is not None:
            subscriber.trains_with(trainer)
