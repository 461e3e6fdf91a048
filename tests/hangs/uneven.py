"""Hangs of training in which ranks have different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import small_models
import torch
import torch.distributed as dist
from group import Rank
from small_models import Speech, conformer, encode, loader, numbers
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import nemo_patches

BATCHES = 4  # of rank 1; rank 0 has one more


def uneven_training(rank: Rank) -> None:
    """Iterable data without a length, and rank 0 has one batch more; two epochs."""
    trainer = rank.trainer(max_epochs=2)
    trainer.fit(Speech(), loader(NumberStream(BATCHES + (rank.number == 0))))
    save(trainer, rank)


def save(trainer: Any, rank: Rank) -> None:
    """At the script's end; all ranks wait for each other in it."""
    trainer.save_checkpoint(rank.folder / "last.ckpt")


class NumberStream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def training_meets_validation(rank: Rank) -> None:
    """Rank 1 has no more batches and validates (WER's all_gather); rank 0 still trains (DDP's
    broadcast).
    """
    trainer = rank.trainer(limit_val_batches=1.0)
    training = small_models.Stream(range(BATCHES + (rank.number == 0)))
    trainer.fit(
        small_models.ctc(trainer),
        loader(training),
        loader(small_models.Batches(range(2))),
    )


def epoch_ends_early(rank: Rank) -> None:
    """Rank 1's data raises an IndexError, which Python takes for the end of the iteration."""

    class Augmented:
        def __getitem__(self, index: int) -> int:
            if index == BATCHES and rank.number == 1:
                return [][index]
            if index > BATCHES + 1:
                raise IndexError
            return index

    class OfRecordings(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(Augmented())

    trainer = rank.trainer(max_epochs=2)
    trainer.fit(Speech(), loader(OfRecordings()))
    save(trainer, rank)


def timer(rank: Rank) -> None:
    """max_time: Lightning's Timer broadcasts one number after every batch, and rank 1 has fewer; no
    NeMo encoder.
    """

    class Classifier(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, number: int, batch_idx: int) -> Any:
            return self.layer(torch.ones(2, 4)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trainer = rank.trainer(max_time="00:01:00:00", max_epochs=2)
    trainer.fit(Classifier(), loader(NumberStream(BATCHES + (rank.number == 0))))
    save(trainer, rank)


def own_loop(rank: Rank) -> None:
    """A training loop without Lightning, with a monitored_barrier at its end, as in CosyVoice and
    WeNet.
    """
    rank.join()
    model = DistributedDataParallel(conformer())
    batches: Any = numbers(BATCHES + (rank.number == 0))
    for number in nemo_patches.stop_together(batches) if rank.patched else batches:
        encode(model, number).sum().backward()
    dist.monitored_barrier(timeout=timedelta(seconds=30))
