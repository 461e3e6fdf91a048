"""The callback of running_trainer.py, for trainers of the package pytorch_lightning."""

from __future__ import annotations

from pytorch_lightning import Callback

from nemo_patches.patching.trainer_begins import TrainerBegins


class RunningTrainer(TrainerBegins, Callback):  # type: ignore[misc]  # Lightning is not looked into
    """Where a launcher pickles its trainer, it is found by its name."""
