"""Hangs of validation."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import small_models
import torch
import torch.distributed as dist
import torchmetrics
from group import Rank
from small_models import Speech, conformer, encode, loader, numbers
from torch.nn.parallel import DistributedDataParallel

BATCHES = 3


def uneven_validation(rank: Rank) -> None:
    """Rank 0 has one more validation batch; in each, WER's compute() runs two barriers and two
    all_gathers.
    """
    trainer = rank.trainer(limit_val_batches=1.0, max_epochs=2)
    validation = small_models.Batches(range(BATCHES + (rank.number == 0)))
    trainer.fit(
        small_models.ctc(trainer),
        loader(small_models.Batches(range(2))),
        loader(validation),
    )


def fuse_loss_wer(rank: Rank) -> None:
    """The joint computes WER in each sub-batch of 2: rank 0's validation batches have three, rank
    1's one.
    """
    trainer = rank.trainer(limit_val_batches=1.0, max_epochs=2)
    validation = small_models.Stream(range(BATCHES), size=6 if rank.number == 0 else 2)
    trainer.fit(
        small_models.rnnt(trainer, fused=True),
        loader(small_models.Batches(range(2))),
        loader(validation),
    )


def encoder_on_some_ranks(rank: Rank) -> None:
    """A frozen encoder in front of a language model: rank 1's second batch has text only, and runs
    no encoder.
    """
    rank.join()
    encoder, model = (
        conformer().eval(),
        DistributedDataParallel(torch.nn.Linear(small_models.HIDDEN, 1)),
    )
    for step in range(BATCHES):
        embedded = torch.zeros(2, small_models.HIDDEN)
        if step != 1 or rank.number == 0:
            with torch.no_grad():
                embedded = encode(encoder, step).mean(-1)
        model(embedded).sum().backward()


def chunked_audio(rank: Rank) -> None:
    """Long audio is encoded chunk by chunk, so the number of encoder calls depends on the rank's
    own audio.
    """
    rank.join()
    encoder, model = (
        conformer().eval(),
        DistributedDataParallel(torch.nn.Linear(small_models.HIDDEN, 1)),
    )
    for _ in range(BATCHES):
        with torch.no_grad():
            chunks = [
                encode(encoder, chunk).mean(-1)
                for chunk in range(4 if rank.number == 0 else 1)
            ]
        model(torch.stack(chunks).mean(0)).sum().backward()


def rank_0_validates(rank: Rank) -> None:
    """Between epochs rank 0 alone validates, and the others wait for it in a barrier."""
    rank.join()
    encoder = conformer()
    model = DistributedDataParallel(encoder)
    for epoch in range(2):
        for step in range(BATCHES):
            encode(model, step).sum().backward()
        if rank.number == 0:
            with torch.no_grad():
                encode(encoder, epoch)
        dist.barrier()


def metric_on_rank_0(rank: Rank) -> None:
    """A callback reads the validation metric on rank 0 only; computing it is a collective."""

    class Reads(pl.Callback):  # type: ignore[misc]
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if trainer.is_global_zero:
                print_metric(module.error)

    class Measured(Speech):
        def __init__(self) -> None:
            super().__init__()
            self.error = torchmetrics.MeanMetric()

        def validation_step(self, number: int, batch_idx: int) -> Any:
            self.error(super().validation_step(number, batch_idx))

    rank.trainer(callbacks=[Reads()], limit_val_batches=1.0, max_epochs=2).fit(
        Measured(), numbers(8), numbers(2)
    )


def print_metric(metric: torchmetrics.Metric) -> None:
    print(metric.compute())
