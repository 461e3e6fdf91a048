"""Which calls of Lightning and torchmetrics are collectives, on two ranks; the code rules of the
doctor go by it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import asr_models
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from ranks import run_ranks

pytestmark = pytest.mark.one_nemo

COLLECTIVE = {
    "self.log(sync_dist=True)",
    "self.all_gather",
    "strategy.barrier",
    "strategy.broadcast",
    "strategy.reduce",
    "strategy.reduce_boolean_decision",
    "metric.compute",
    "trainer.log_dir",
    "trainer.save_checkpoint",
    "backward",
    "trainer.callback_metrics",
}
LOCAL = {
    "self.log",
    "self.log(sync_dist=True, on_epoch=True, on_step=False)",
    "metric.update",
    "trainer.global_step",
}


def begun() -> int:
    """Collectives that this rank has begun in the default group."""
    return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]


class Model(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, folder: str, skips: bool) -> None:
        super().__init__()
        self.net, self.metric = torch.nn.Linear(4, 1), torchmetrics.MeanMetric()
        self.folder, self.skips = folder, skips
        self.made: dict[str, int] = {}

    def count(self, name: str, action: Callable[[], Any]) -> None:
        before = begun()
        action()
        self.made[name] = begun() - before

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        if self.skips:
            return None
        loss, strategy = self.net(batch).mean(), self.trainer.strategy
        self.count("self.log", lambda: self.log("local", loss))
        self.count(
            "self.log(sync_dist=True)", lambda: self.log("shared", loss, sync_dist=True)
        )
        epoch = {"sync_dist": True, "on_epoch": True, "on_step": False}
        self.count(
            "self.log(sync_dist=True, on_epoch=True, on_step=False)",
            lambda: self.log("epoch", loss, **epoch),
        )
        self.count("self.all_gather", lambda: self.all_gather(loss))
        self.count("strategy.barrier", lambda: strategy.barrier("here"))
        self.count("strategy.broadcast", lambda: strategy.broadcast("text"))
        self.count("strategy.reduce", lambda: strategy.reduce(loss.detach()))
        self.count(
            "strategy.reduce_boolean_decision",
            lambda: strategy.reduce_boolean_decision(True),
        )
        self.count("metric.update", lambda: self.metric.update(loss.detach()))
        self.count("metric.compute", lambda: self.metric.compute())
        self.count("trainer.log_dir", lambda: self.trainer.log_dir)
        self.count("trainer.global_step", lambda: self.trainer.global_step)
        return loss

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.before = begun()

    def on_after_backward(self) -> None:
        self.made["backward"] = begun() - self.before

    def on_train_epoch_end(self) -> None:
        self.count("trainer.callback_metrics", lambda: self.trainer.callback_metrics)
        path = os.path.join(self.folder, "all.ckpt")
        self.count(
            "trainer.save_checkpoint", lambda: self.trainer.save_checkpoint(path)
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(rank: int, size: int, folder: str) -> tuple[dict[str, int], str]:
    made: dict[str, int] = {}
    for skips in (False, True):
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size)
        )  # the first training took them out
        model = Model(folder, skips)
        trainer = asr_models.trainer_of(default_root_dir=folder, num_sanity_val_steps=0)
        try:
            trainer.fit(
                model, torch.utils.data.DataLoader(torch.zeros(2, 4), batch_size=1)
            )
        except RuntimeError as error:
            return made, str(error)
        made = model.made
    return made, ""


def test_which_calls_are_collectives(tmp_path: Any) -> None:
    for result in run_ranks(train, 2, str(tmp_path)):
        made, error = result.value
        assert {name for name, number in made.items() if number} == COLLECTIVE
        assert {name for name, number in made.items() if not number} == LOCAL
        assert "returning None in distributed training is not supported" in error
