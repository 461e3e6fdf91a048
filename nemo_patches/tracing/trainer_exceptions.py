"""Records exceptions that leave Lightning's trainer: Hydra, around it, hides them from the interpreter."""

from __future__ import annotations

import logging

from lightning.pytorch import Callback, LightningModule, Trainer

from nemo_patches.sync.rank_log import raised_by_signal_handler, report
from nemo_patches.tracing.recorder import tracing


class TrainerExceptions(Callback):  # type: ignore[misc]  # Lightning is not looked into
    """For the trace. The user's code may catch the exception: then it goes on."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SystemExit) and not exception.code:
            return  # the user's code ends the process normally
        try:
            if tracing.recorder is not None:
                tracing.recorder.trainer_failed(exception)
        except Exception as error:  # the user's exception goes its way
            if raised_by_signal_handler(error):
                raise
            report(logging.ERROR, f"an exception was not recorded, by an error of its own, please report it: {error!r}")
