"""Hangs of checkpoints, most of them of ModelCheckpoint and NeMo's child of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import small_models
import torch
import torch.distributed as dist
from dead_mount import path_on_it
from group import Rank
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from nemo.utils.exp_manager import exp_manager
from omegaconf import OmegaConf
from small_models import Speech, conformer, encode, numbers
from torch.nn.parallel import DistributedDataParallel

STEPS, AT_STEP = 8, 4


def nest_checkpoint(rank: Rank) -> None:
    """NEST's val_loss differs between ranks, and so does the name of the best checkpoint, which
    only rank 0 writes.
    """
    trainer = rank.trainer(
        max_steps=4, max_epochs=-1, limit_val_batches=1.0, val_check_interval=2
    )
    parameters = {
        "monitor": "val_loss",
        "always_save_nemo": True,
        "save_best_model": True,
    }
    manager = {
        "exp_dir": str(rank.folder / "experiments"),
        "name": "nest",
        "use_datetime_version": False,
        "create_tensorboard_logger": False,
        "checkpoint_callback_params": parameters,
    }
    exp_manager(trainer, OmegaConf.create(manager))
    batches = [small_models.nest_batch(2 * number + rank.number) for number in range(4)]
    model = small_models.nest(trainer, rank.folder, rank.number)
    trainer.fit(model, small_models.loader(batches), small_models.loader(list(batches)))


def save_on_rank_0(rank: Rank) -> None:
    """Rank 0 alone calls trainer.save_checkpoint, which ends with a barrier."""

    class SavesOnRank0(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == AT_STEP and trainer.is_global_zero:
                trainer.save_checkpoint(rank.folder / "model.ckpt")

    rank.trainer(callbacks=[SavesOnRank0()]).fit(Speech(), numbers(STEPS))


def save_on_exception(rank: Rank) -> None:
    """Rank 1 raises, and OnExceptionCheckpoint first saves a checkpoint: a barrier that the others
    never enter.
    """

    class Fails(Speech):
        def training_step(self, number: int, batch_idx: int) -> Any:
            if batch_idx == AT_STEP and self.global_rank == 1:
                raise ValueError("a transcript is empty")
            return super().training_step(number, batch_idx)

    trainer = rank.trainer(
        callbacks=[OnExceptionCheckpoint(rank.folder)], enable_checkpointing=True
    )
    trainer.fit(Fails(), numbers(STEPS))


def checkpoint_by_step(rank: Rank) -> None:
    """ModelCheckpoint saves every four optimizer steps, and rank 1 has skipped one step."""

    class SkipsAStep(Speech):
        automatic_optimization = False

        def training_step(self, number: int, batch_idx: int) -> None:
            self.manual_backward(super().training_step(number, batch_idx))
            if batch_idx != 1 or self.global_rank == 0:
                self.optimizers().step()
            self.optimizers().zero_grad()

    saves = ModelCheckpoint(
        rank.folder / "checkpoints", every_n_train_steps=AT_STEP, save_top_k=-1
    )
    rank.trainer(callbacks=[saves], enable_checkpointing=True).fit(
        SkipsAStep(), numbers(STEPS)
    )


def dead_mount(rank: Rank) -> None:
    """The checkpoint's file system does not answer (here: a FIFO that nobody reads)."""
    path = path_on_it(rank.folder)

    class Saves(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == AT_STEP:
                trainer.save_checkpoint(path)

    rank.trainer(callbacks=[Saves()]).fit(Speech(), numbers(STEPS))


def by_the_clock(rank: Rank) -> None:
    """Each rank's own clock says when to save, and rank 1's is one step late; saving ends with a
    barrier.
    """
    rank.join()
    model = DistributedDataParallel(conformer())
    for step in range(STEPS):
        encode(model, step).sum().backward()
        if step - rank.number == AT_STEP:
            save_checkpoint(rank, model)


def save_checkpoint(rank: Rank, model: torch.nn.Module) -> None:
    if rank.number == 0:
        torch.save(model.state_dict(), rank.folder / "model.ckpt")
    dist.barrier()


def interrupted_save(rank: Rank) -> None:
    """Rank 0 finds files of an earlier save, and raises; the script logs that and trains on, the
    others wait.
    """
    rank.join()
    model = DistributedDataParallel(conformer())
    if rank.number == 0:
        checkpoint_folder(rank).mkdir()
    for step in range(STEPS):
        encode(model, step).sum().backward()
        if step == AT_STEP:
            try:
                save_new_checkpoint(rank, model)
            except FileExistsError as error:
                print(f"no checkpoint: {error}")


def checkpoint_folder(rank: Rank) -> Path:
    return rank.folder / f"step_{AT_STEP}"


def save_new_checkpoint(rank: Rank, model: torch.nn.Module) -> None:
    if rank.number == 0:
        checkpoint_folder(rank).mkdir()
        torch.save(model.state_dict(), checkpoint_folder(rank) / "model.ckpt")
    dist.barrier()
