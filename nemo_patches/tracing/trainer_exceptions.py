"""Records exceptions that leave Lightning's trainer:
Hydra, around it, hides them from the interpreter.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from nemo_patches.tracing.recorder import tracing


class TrainerExceptions(Callback):  # type: ignore[misc]  # Lightning is not looked into
    """Where there is a trace. The user's code may catch the exception: then training goes on."""

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, SystemExit) and not exception.code:
            return  # the user's code ends the process normally
        if tracing.recorder is not None:
            tracing.recorder.trainer_failed(exception)
