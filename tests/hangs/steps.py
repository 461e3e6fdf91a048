"""Hangs of training steps: ranks that do not make the same collectives."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from group import Rank
from small_models import Speech, conformer, encode, numbers
from torch.nn.parallel import DistributedDataParallel

STEPS, AT_STEP = 8, 4


def length_sync(rank: Rank) -> None:
    """Rank 1 hangs in a read; a step begins with the length sync (broadcast_buffers=False)."""
    rank.join()
    model = DistributedDataParallel(conformer(), broadcast_buffers=False)
    for step in range(STEPS):
        if step == AT_STEP and rank.number == 1:
            rank.read_audio()
        encode(model, step).sum().backward()


def buffer_broadcast(rank: Rank) -> None:
    """Rank 0 hangs in a read; DDP begins each step with the broadcast of its buffers."""
    rank.join()
    model = DistributedDataParallel(conformer())
    for step in range(STEPS):
        if step == AT_STEP and rank.number == 0:
            rank.read_audio()
        encode(model, step).sum().backward()


def growing_positions(rank: Rank) -> None:
    """The length sync is off, and rank 0 has a batch that outgrows its positional encoding."""
    rank.join()
    model = DistributedDataParallel(
        conformer(sync_max_audio_length=False, pos_emb_max_len=30)
    )
    for step in range(STEPS):
        frames = 400 if step == AT_STEP and rank.number == 0 else 60
        encode(model, step, frames).sum().backward()


def skipped_backward(rank: Rank) -> None:
    """Rank 1 skips a batch between forward and backward, as loops do when the loss is NaN."""
    rank.join()
    model = DistributedDataParallel(conformer())
    for step in range(STEPS):
        loss = encode(model, step).sum()
        if step == AT_STEP and rank.number == 1:
            continue
        loss.backward()


def log_keys(rank: Rank) -> None:
    """log(..., sync_dist=True) with a key that only rank 0 logs: each key is a collective."""

    class LogsWhatItHas(Speech):
        def training_step(self, number: int, batch_idx: int) -> Any:
            loss = super().training_step(number, batch_idx)
            self.log("loss", loss, sync_dist=True)
            if batch_idx == AT_STEP and self.global_rank == 0:
                self.log("loss_of_long_files", loss, sync_dist=True)
            return loss

    rank.trainer().fit(LogsWhatItHas(), numbers(STEPS))


def reduce_on_one_rank(rank: Rank) -> None:
    """Rank 0 reduces its loss for the log; the others do not."""

    class ReducesToLog(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == AT_STEP and trainer.is_global_zero:
                reduce_loss(outputs["loss"])

    rank.trainer(callbacks=[ReducesToLog()]).fit(Speech(), numbers(STEPS))


def reduce_loss(loss: torch.Tensor) -> None:
    dist.all_reduce(loss.detach().clone())
