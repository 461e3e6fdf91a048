"""A Lightning callback: all ranks end a pass over a loader after the same number of batches."""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from nemo_patches.options.even_loader import EvenLoader, even_loaders
from nemo_patches.sync.rank_log import report

# By Lightning's names.
_KINDS = {"train": "training", "val": "validation", "test": "test"}


class StopTogether(Callback):  # type: ignore[misc]  # Lightning is not looked into
    """A Lightning callback: passes end on all ranks after the same number of batches.

    Opt-in, because it drops batches: those that a rank still has when another rank has no more.

    training, evaluation: the stages whose loaders end together. Loaders with a length agree once on
    the smallest; for others, the ranks tell each other one batch ahead. They wait for a late rank
    without limit, and name it. StopTogetherError if a rank has died, has no batch at all, or has
    left a pass at another batch than the others, and for a loader whose next pass may go on with
    one that was ended early.
    """

    def __init__(self, training: bool = True, evaluation: bool = False) -> None:
        self._training = training
        self._evaluation = evaluation
        # Whose strategy hands its loaders to this callback.
        self._trainer: Trainer | None = None
        # The trainer's limit and interval, while it sets up its loaders.
        self._given: tuple[Any, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size < 2:
            return
        first = next(one for one in trainer.callbacks if isinstance(one, StopTogether))
        if first is not self:  # the user's own comes before that of a setting
            if (first._training, first._evaluation) != (
                self._training,
                self._evaluation,
            ):
                asked = f"training={self._training}, evaluation={self._evaluation}"
                holds = f"training={first._training}, evaluation={first._evaluation}"
                text = f"has no effect: the trainer's first holds, ({holds})"
                report(logging.WARNING, f"StopTogether({asked}) {text}")
            return
        # After an exception Lightning does not, of any trainer.
        self.teardown(trainer, pl_module, stage)
        original = trainer.strategy.process_dataloader

        def process_dataloader(loader: Any) -> Any:
            return self._even(trainer, original(loader))

        # Lightning has each loader of a stage go through it, at every reload, too.
        trainer.strategy.process_dataloader = process_dataloader
        self._trainer = trainer

    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        if self._trainer is not None:
            vars(self._trainer.strategy).pop("process_dataloader", None)
            self._give_back(self._trainer)
            self._trainer = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loaders are set up.

        Lightning is to know how many batches there are, and when to validate.
        """
        self._give_back(trainer)
        limit = trainer.limit_train_batches
        # Not with validations by the clock, of Lightning 2.6.
        interval = vars(trainer).get("val_check_interval")
        if isinstance(limit, int) and trainer.fit_loop.max_batches == math.inf:
            trainer.fit_loop.max_batches = limit
            is_by_epochs = trainer.check_val_every_n_epoch is not None
            if isinstance(interval, int) and interval > limit and is_by_epochs:
                raise MisconfigurationException(
                    f"val_check_interval={interval} would never validate: no training pass has "
                    f"more than {limit} batches; allowed: 1 to {limit}, a fraction, or any with "
                    "check_val_every_n_epoch=None"
                )

    on_train_epoch_start = on_train_start  # the loaders may have been reloaded

    def _even(self, trainer: Trainer, loader: Any) -> Any:
        stage = trainer.state.stage.dataloader_prefix
        if not (
            self._training if trainer.training else self._evaluation and stage in _KINDS
        ):
            return loader
        even = even_loaders.make(
            loader, _KINDS[stage], may_be_empty=not trainer.training
        )
        if isinstance(even, EvenLoader) and trainer.training:
            self._keep_limit(trainer, even)
        elif isinstance(even, EvenLoader) and even.agreed_length is None:
            # Not one batch more: the next pass might miss it.
            even.limit = lambda: _evaluation_limit(trainer, stage)
        return even

    def _keep_limit(self, trainer: Trainer, even: EvenLoader) -> None:
        """Have the loader keep the trainer's limit of its batches.

        Lightning ends a pass only at the limit that it knows of itself, and would not validate
        after one that ended before.
        """
        if self._given is None:
            self._given = (
                trainer.limit_train_batches,
                vars(trainer).get("val_check_interval", 1.0),
            )
        limit, interval = self._given
        if not isinstance(limit, int):
            return  # none; or a fraction, which Lightning refuses where there is no length
        if even.agreed_length is not None:
            even.limit = lambda: limit
            return  # Lightning does the same
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        even.limit = lambda: (
            limit - (progress.completed if trainer.fit_loop.restarting else 0)
        )
        trainer.limit_train_batches = 1.0
        if isinstance(interval, float) and interval != 1.0:
            trainer.val_check_interval = max(int(limit * interval), 1)

    def _give_back(self, trainer: Trainer) -> None:
        if self._given is not None:
            trainer.limit_train_batches, trainer.val_check_interval = self._given
            self._given = None


def _evaluation_limit(trainer: Trainer, stage: str) -> int | None:
    limits = [getattr(trainer, f"limit_{stage}_batches")]
    if trainer.sanity_checking:
        limits.append(trainer.num_sanity_val_steps)
    return min((limit for limit in limits if isinstance(limit, int)), default=None)
