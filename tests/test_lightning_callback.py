"""The callback under Lightning's own trainer, on two ranks with DDP: what it logs of a straggler and of a fallback."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from typing import Any

import encoders
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from ranks import Result, free_port, run_ranks

import nemo_patches
from nemo_patches.lightning import LengthSyncCallback

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
STEPS, LAG, TIMEOUT, STALL = 60, 0.2, 2.0, 4.0  # the lag: well above what a busy machine makes of a step


class Small(pl.LightningModule):
    """A real encoder, in training. Rank 1 is late at every batch, and once by more than the timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoders.conformer()
        self.in_bar: set[str] = set()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            time.sleep(STALL if batch_idx == STEPS // 2 else LAG)  # the straggler itself
        lengths = torch.full((batch.shape[0],), batch.shape[2])
        outputs, _ = self.encoder(audio_signal=batch, length=lengths)
        self.in_bar |= set(self.trainer.progress_bar_metrics)
        return outputs.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train(rank: int, size: int, port: int, folder: str) -> tuple[set[str], int]:
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": "test"},
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    nemo_patches.apply(timeout=TIMEOUT)
    model = Small()
    features = model.encoder._feat_in
    data = torch.utils.data.DataLoader(torch.zeros(size * STEPS, features, 40), batch_size=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy="ddp",
        max_epochs=1,
        log_every_n_steps=5,
        logger=CSVLogger(folder),
        callbacks=[LengthSyncCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    return model.in_bar, nemo_patches.status().encoders[0].fallbacks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[Result]:
    return run_ranks(train, 2, free_port(), str(folder), group=False)


@pytest.fixture(scope="module")
def rows(results: list[Result], folder: Path) -> list[dict[str, float]]:
    (file,) = folder.rglob("metrics.csv")
    with file.open() as text:
        found = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(text)]
    return [row for row in found if "length_sync/straggler" in row]


def test_the_straggler_is_named_and_its_lag_is_what_it_was(rows: list[dict[str, float]]) -> None:
    assert len(rows) >= 2
    calm = rows[0]
    assert calm["length_sync/straggler"] == 1
    assert LAG / 2 < calm["length_sync/lag_s/rank_1"] == calm["length_sync/lag_s/max"] < LAG * 3
    assert calm["length_sync/lag_s/rank_0"] == 0
    assert calm["length_sync/waiting_share/rank_0"] > 0.4 > calm["length_sync/waiting_share/rank_1"]
    assert calm["length_sync/calls/rank_0"] > 0


def test_a_fallback_is_logged_and_is_in_the_progress_bar(rows: list[dict[str, float]], results: list[Result]) -> None:
    in_bar, fallbacks = results[0].value
    assert fallbacks >= 1
    assert rows[-1]["length_sync/fallbacks/rank_0"] >= 1
    assert {"length_sync_fallbacks", "length_sync_missing"} & in_bar
    assert results[1].value[0] == set()


def test_it_says_nothing_on_stderr_of_its_own(results: list[Result]) -> None:
    for result in results:
        assert result.lines("LengthSyncCallback") == []
