"""The demo's NEST pre-training under Lightning's DDP, on one rank."""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.seed import isolate_rng

from nemo_patches.tools.demo import nest
from nemo_patches.tools.demo.jobs import (
    STALL_AFTER_STEPS,
    TRAINING_STEPS,
    VALIDATE_EVERY,
    Notice,
    RankJob,
    TrainingStep,
)


def cpu_trainer(devices: int, **settings: Any) -> Any:
    """A trainer under DDP, for ranks that are already started; it logs, saves and shows nothing unless told to."""
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": devices,
            "strategy": "ddp",
            "plugins": [LightningEnvironment()],  # also where a cluster's variables are set
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,  # each rank has data of its own
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        }
    )


def pretrain(job: RankJob, events: Connection) -> None:
    """Train and evaluate, and tell the parent of every step."""
    reporter = _Reporter(events)
    trainer = cpu_trainer(
        job.world_size,
        max_steps=TRAINING_STEPS,
        max_epochs=-1,
        val_check_interval=VALIDATE_EVERY,
        check_val_every_n_epoch=None,
        callbacks=[reporter, _RandomStateKeeper()],
    )
    pl.seed_everything(0)
    model = nest.make(nest.model(job.folder, job.rank), trainer)
    if job.rank == job.slow_rank and job.stall:

        def stall_before_the_encoder(*_: object) -> None:
            if trainer.global_step == STALL_AFTER_STEPS:  # in one training step, and in no evaluation
                events.send(Notice.STALLS)
                time.sleep(job.stall.total_seconds())

        model.encoder.register_forward_pre_hook(stall_before_the_encoder)
    reporter.time_calls_of(model.encoder)
    trainer.fit(model)


class _Reporter(pl.Callback):  # type: ignore[misc]  # Lightning's types are not followed
    """Tells the parent of each step when it is completed."""

    def __init__(self, events: Connection) -> None:
        self._events = events
        self._began = self._took = 0.0

    def time_calls_of(self, encoder: torch.nn.Module) -> None:
        """Time the encoder's calls, without the hooks that were registered before."""

        def begin(*_: object) -> None:
            self._began = time.monotonic()

        def end(*_: object) -> None:
            self._took = time.monotonic() - self._began

        encoder.register_forward_pre_hook(begin)
        encoder.register_forward_hook(end)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._events.send(TrainingStep(float(outputs["loss"]), timedelta(seconds=self._took)))

    def on_validation_batch_end(self, *_: object, **__: object) -> None:
        self._events.send(Notice.VALIDATED)


class _RandomStateKeeper(pl.Callback):  # type: ignore[misc]
    """Restores the random state (torch's, numpy's, Python's) after each evaluation.

    NEST draws random numbers for an evaluation's noise and masks, so that one more batch would change the training
    after it, in stock NeMo as with nemo_patches. With this, losses can be compared with those after an even evaluation.
    """

    def on_validation_start(self, *_: object) -> None:
        self._isolated = isolate_rng(include_cuda=False)
        self._isolated.__enter__()

    def on_validation_end(self, *_: object) -> None:
        self._isolated.__exit__(None, None, None)
