"""A callback that sees a Lightning trainer begin: it has ranks, and knows the last batch."""

from __future__ import annotations

from lightning.pytorch import Callback

from nemo_patches.patching.trainer_begins import TrainerBegins


class RunningTrainer(TrainerBegins, Callback):  # type: ignore[misc]  # Lightning is not looked into
    """For trainers of lightning.pytorch."""
