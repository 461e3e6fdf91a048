"""A Lightning callback: all ranks end a pass over a data loader after the same number of batches."""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from nemo_patches.options.even_loader import Counts, EvenLoader, even_loaders
from nemo_patches.sync.rank_log import report

_KINDS = {"train": "training", "val": "validation", "test": "test"}  # by Lightning's names


class StopTogether(Callback):  # type: ignore[misc]  # Lightning is not looked into
    """Opt-in, because it drops batches: those that a rank still has when another rank has no more.

    training, evaluation: the stages whose loaders end together. Loaders with a length agree once on the smallest;
    for others, the ranks tell each other one batch ahead. They wait for a late rank without limit, and name it.
    StopTogetherError if a rank has died, has no batch at all, or has left a pass at another batch than the others.
    """

    def __init__(self, training: bool = True, evaluation: bool = False) -> None:
        self._training, self._evaluation = training, evaluation
        self._counts: list[Counts] = []  # of this training's loaders, also of those that were reloaded
        self._said_other = False
        self._trainer: Trainer | None = None  # whose strategy hands its loaders to this callback
        self._limit: int | float = 1.0  # the trainer's own limit_train_batches, and val_check_interval
        self._interval: int | float = 1.0
        self._total = 0.0  # batches of a training pass, at most; inf: not known
        self._fractions: dict[str, float] = {}  # the trainer's own limits of evaluations, by name
        self._after_sanity: list[tuple[EvenLoader, int | None]] = []  # the limits of evaluations after the sanity check

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        first = next(callback for callback in trainer.callbacks if isinstance(callback, StopTogether))
        if trainer.world_size < 2:
            return
        if first is not self:  # the user's own comes before that of a setting
            stages, others = (self._training, self._evaluation), (first._training, first._evaluation)
            if stages != others and not self._said_other:
                self._said_other = True
                asked, holds = ("training={}, evaluation={}".format(*both) for both in (stages, others))
                report(logging.WARNING, f"StopTogether({asked}) has no effect: the trainer's first holds, ({holds})")
            return
        self.teardown(trainer, pl_module, stage)  # after an exception Lightning does not, of any trainer
        strategy, original = trainer.strategy, trainer.strategy.process_dataloader
        # Lightning from 2.6 on sets none where validations come by the clock.
        trainer.val_check_interval = getattr(trainer, "val_check_interval", 1.0)
        self._limit, self._interval, self._total, self._counts = 1.0, trainer.val_check_interval, 0.0, []

        def process_dataloader(loader: Any) -> Any:
            return self._even(trainer, original(loader))

        # Lightning has each loader of a stage go through it, at every reload, too.
        strategy.process_dataloader, self._trainer = process_dataloader, trainer

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if (served := self._trainer) is not None:
            self._trainer = None
            vars(served.strategy).pop("process_dataloader", None)
            served.val_check_interval = self._interval
            for name, fraction in self._fractions.items():
                setattr(served, name, fraction)
            self._fractions.clear()
            if not _is_all(self._limit):
                served.limit_train_batches = self._limit

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        while self._after_sanity:
            even, limit = self._after_sanity.pop()
            even.limit = limit

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """For the progress bar's total, and for what Lightning itself checks where it knows the number of batches."""
        interval = self._interval
        if self._trainer is not None:
            trainer.val_check_interval = interval  # by which checkpoint callbacks tell when to save
        if trainer.fit_loop.max_batches == math.inf and self._total:
            trainer.fit_loop.max_batches = self._total
            if isinstance(interval, int) and interval > self._total and trainer.check_val_every_n_epoch is not None:
                raise MisconfigurationException(
                    f"val_check_interval={interval} would never validate: no training pass has more than "
                    f"{self._total} batches; allowed: 1 to {self._total}, a fraction, or any with "
                    "check_val_every_n_epoch=None"
                )

    on_train_epoch_start = on_train_start  # the loaders may have been reloaded

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """To the loggers, from rank 0: what its own training loaders have left out so far."""
        metrics = {
            "stop_together/passes_cut": float(sum(counts.passes_cut for counts in self._counts)),
            "stop_together/batches_left_out": float(sum(counts.left_out for counts in self._counts)),
        }
        for logger in trainer.loggers if self._counts and trainer.global_rank == 0 else ():
            logger.log_metrics(metrics, step=trainer.global_step)

    def _even(self, trainer: Trainer, loader: Any) -> Any:
        stage = trainer.state.stage.dataloader_prefix
        if not (self._training if trainer.training else self._evaluation and stage in _KINDS):
            return loader
        even = even_loaders.make(loader, _KINDS[stage], may_be_empty=not trainer.training)
        if not isinstance(even, EvenLoader):
            text = "ranks cannot tell each other that a loader has ended: nemo_patches is off, or torch.distributed is"
            report(logging.WARNING, f"StopTogether does nothing for this {_KINDS[stage]} loader: {text}")
        elif trainer.training:
            self._counts.append(even.counts)
            self._own_limit(trainer, even)
        else:
            self._own_evaluation_limit(trainer, even, f"limit_{stage}_batches")
        return even

    def _own_evaluation_limit(self, trainer: Trainer, even: EvenLoader, name: str) -> None:
        """Have the loader keep a fraction of its batches. Lightning takes none of a loader that has no length, which
        an even one has not where the ranks' only announce theirs. A number it keeps itself; the loader knows it, too,
        so that it reads none ahead, which the next pass might miss."""
        limit = self._fractions.get(name, getattr(trainer, name))
        if isinstance(limit, float) and not _is_all(limit) and even.agreed_length != 0:
            even.limit = _share_of(even, name, limit)
            self._fractions[name] = limit
            setattr(trainer, name, 1.0)
        elif even.agreed_length is None:
            even.limit = limit if isinstance(limit, int) else None
        if even.agreed_length is None and trainer.sanity_checking and isinstance(trainer.num_sanity_val_steps, int):
            self._after_sanity.append((even, even.limit))
            steps = trainer.num_sanity_val_steps
            even.limit = steps if even.limit is None else min(steps, even.limit)

    def _own_limit(self, trainer: Trainer, even: EvenLoader) -> None:
        """Have the loader keep the trainer's limit of its batches: Lightning ends a pass only at the limit that it
        knows of itself, so that it would not validate after one that ended before."""
        if not _is_all(trainer.limit_train_batches):  # NeMo sets it for tarred data, when it makes the loader
            self._limit = trainer.limit_train_batches
        limit, length, has_length = self._limit, even.announced_length, even.agreed_length is not None
        if isinstance(limit, float) and not _is_all(limit):
            limit = _share_of(even, "limit_train_batches", limit)
        elif length is not None:
            limit = min(limit, length) if isinstance(limit, int) else length
        if not isinstance(limit, int) or not limit:
            self._total, trainer.val_check_interval = math.inf, self._interval
            return  # there is none, or Lightning says what is wrong with it
        even.limit, self._total = limit, max(self._total, limit)
        if has_length and isinstance(self._limit, int):
            return  # Lightning does the same
        trainer.limit_train_batches = 1.0
        if isinstance(self._interval, float) and self._interval != 1.0 and not has_length and self._total < math.inf:
            trainer.val_check_interval = max(int(self._total * self._interval), 1)
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        even.skipped = progress.completed if trainer.fit_loop.restarting else 0


def _share_of(even: EvenLoader, name: str, fraction: float) -> int:
    """So many of its batches. name: the trainer's limit."""
    length = even.announced_length
    if batches := int((length or 0) * fraction):
        return batches
    of = "has no length" if length is None else f"has {length} batches"
    raise MisconfigurationException(
        f"{name}={fraction} leaves no batch of {even.counters().loader}, which {of}; allowed: an integer, 1.0, or a "
        "fraction that leaves a batch"
    )


def _is_all(limit: int | float) -> bool:
    return isinstance(limit, float) and limit == 1.0
