"""NP123: a trainer that Lightning refuses, compared with Lightning's own Trainer where it is
installed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from configs import LHOTSE, NEST, WARNING, found

pytestmark = pytest.mark.one_nemo

REFUSED: list[dict[str, Any]] = [
    {"strategy": None},
    {"strategy": "dpp"},
    {"strategy": "ddp2"},
    {"strategy": "horovod"},
    {"strategy": 5},
    {"strategy": "fsdp"},
    {"accelerator": "ddp"},
    {"accelerator": "GPU"},
    {"accelerator": None},
    {"precision": "fp16"},
    {"precision": "float32"},
    {"limit_train_batches": 1.5},
    {"limit_val_batches": -1},
    {"limit_test_batches": "10"},
    {"val_check_interval": 1.5},
    {"val_check_interval": 0.5, "check_val_every_n_epoch": None},
    {"val_check_interval": 1.0, "check_val_every_n_epoch": None},
    {"val_check_interval": 0.5, "check_val_every_n_epoch": None, "fast_dev_run": True},
    {"check_val_every_n_epoch": 0.5},
    {"overfit_batches": 1.5},
    {"max_steps": -2},
    {"max_steps": None},
    {"max_steps": "100"},
    {"max_epochs": -2},
    {"num_nodes": 0},
    {"num_nodes": "2"},
    {"gradient_clip_algorithm": "l2"},
    {"gradient_clip_algorithm": 2},
    {"gradient_clip_val": "norm"},
    {"profiler": "nsys"},
    {"fast_dev_run": -1},
    {"max_time": "12:00:00"},
    {"max_time": 12},
    {"reload_dataloaders_every_n_epochs": -1},
    {"reload_dataloaders_every_n_epochs": None},
    {"devices": 0},
    {"devices": "0"},
    {"devices": []},
    {"devices": -1},
    {"devices": None},
]
TAKEN: list[dict[str, Any]] = [
    {"strategy": "DDP"},
    {"strategy": "auto"},
    {"strategy": "ddp_find_unused_parameters_true"},
    {"precision": 32},
    {"precision": "bf16"},
    {"precision": None},
    {"limit_train_batches": None},
    {"limit_train_batches": 1000.0},
    {"limit_val_batches": 0.0},
    {"limit_val_batches": True},
    {"val_check_interval": 100.0},
    {"val_check_interval": 5, "check_val_every_n_epoch": None},
    {"val_check_interval": None, "check_val_every_n_epoch": None},
    {"check_val_every_n_epoch": 0},
    {"max_steps": 1e5},
    {"max_epochs": None},
    {"max_epochs": -1},
    {"gradient_clip_algorithm": "NORM", "gradient_clip_val": 1.0},
    {"gradient_clip_algorithm": None, "gradient_clip_val": None},
    {"profiler": "simple"},
    {"max_time": "00:12:00:00"},
    {"max_time": None},
    {"reload_dataloaders_every_n_epochs": 1},
    {"devices": "auto"},
]


def overrides(settings: dict[str, Any]) -> list[str]:
    def text(value: Any) -> str:
        return (
            "null"
            if value is None
            else f"'{value}'"
            if isinstance(value, str)
            else str(value)
        )

    return [f"++trainer.{key}={text(value)}" for key, value in settings.items()]


def test_the_doctor_refuses_what_lightning_refuses(tmp_path: Path) -> None:
    on_cpu = {"accelerator": "cpu", "strategy": "auto", "devices": 1}
    for refused, cases in ((True, REFUSED), (False, TAKEN)):
        for case in cases:
            said = found(tmp_path, "NP123", NEST, *overrides({**on_cpu, **case}))
            assert [finding.severity for finding in said] == [WARNING] * refused, case
            assert all("the job stops at its start" in each.what for each in said)
    with contextlib.suppress(ImportError):
        from lightning.pytorch import Trainer
        from lightning.pytorch.utilities.exceptions import MisconfigurationException

        quiet = {"logger": False, "enable_checkpointing": False, "barebones": False}
        for case in TAKEN:
            Trainer(**{**quiet, **on_cpu, **case})
        for case in REFUSED:
            with pytest.raises(
                (ValueError, TypeError, AttributeError, MisconfigurationException)
            ):
                Trainer(**{**quiet, **on_cpu, **case})


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"val_check_interval": 1000, "limit_train_batches": 100}, True),
        ({"val_check_interval": 1000.0, "limit_train_batches": 100.0}, True),
        ({"val_check_interval": 1000, "limit_train_batches": 1000}, False),
        ({"val_check_interval": 1000, "limit_train_batches": 1.0}, False),
        ({"val_check_interval": 1000, "limit_train_batches": 0}, False),
        (
            {
                "val_check_interval": 1000,
                "limit_train_batches": 100,
                "check_val_every_n_epoch": None,
            },
            False,
        ),
        (
            {
                "val_check_interval": 1000,
                "limit_train_batches": 100,
                "fast_dev_run": True,
            },
            False,
        ),
        ({"val_check_interval": 1000, "overfit_batches": 10}, True),
        ({"val_check_interval": "???", "limit_train_batches": 100}, False),
    ],
)
def test_validation_in_an_epoch_that_is_too_short_for_it(
    tmp_path: Path, settings: dict[str, Any], refused: bool
) -> None:
    said = found(tmp_path, "NP123", NEST, *overrides(settings))
    assert len(said) == refused
    if refused:
        assert "an epoch has" in said[0].what


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"limit_train_batches": 0.5}, True),
        ({"val_check_interval": 0.25}, True),
        ({"limit_val_batches": 0.1}, True),
        ({"limit_val_batches": 0.0}, False),
        ({"limit_train_batches": 1.0}, False),
        ({"val_check_interval": 0.25, "limit_train_batches": 0}, False),
        ({"val_check_interval": 0.25, "limit_train_batches": 100}, False),
        ({"val_check_interval": 0.25, "limit_train_batches": 1.0}, True),
        ({"val_check_interval": 0.25, "fast_dev_run": True}, False),
    ],
)
def test_lhotse_has_no_length_to_take_a_share_of(
    tmp_path: Path, settings: dict[str, Any], refused: bool
) -> None:
    assert len(found(tmp_path, "NP123", LHOTSE, *overrides(settings))) == refused
    assert found(tmp_path, "NP123", NEST, *overrides(settings)) == []


@pytest.mark.installed
@pytest.mark.parametrize(("limit", "refused"), [(4, False), (1.0, True)])
def test_a_limit_is_a_length_to_take_a_share_of_for_lightning_too(
    limit: float, refused: bool
) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import (
        BoringModel,
        RandomIterableDataset,
    )
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from torch.utils.data import DataLoader

    class Model(BoringModel):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(RandomIterableDataset(32, 64))

    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    limits: dict[str, Any] = {
        "limit_train_batches": limit,
        "limit_val_batches": 1,
        "max_epochs": 1,
    }
    trainer = Trainer(
        accelerator="cpu", devices=1, val_check_interval=0.5, **limits, **quiet
    )
    with (
        pytest.raises(MisconfigurationException)
        if refused
        else contextlib.nullcontext()
    ):
        trainer.fit(Model())
    assert trainer.global_step == (0 if refused else 4)


def test_none_for_what_is_not_known_and_a_trainer_that_is_not_lightnings(
    tmp_path: Path,
) -> None:
    for key in (
        "strategy",
        "accelerator",
        "precision",
        "devices",
        "num_nodes",
        "max_steps",
        "limit_train_batches",
    ):
        assert found(tmp_path, "NP123", NEST, f"++trainer.{key}='???'") == []
    assert (
        found(tmp_path, "NP123", NEST, "trainer.strategy={_target_: my.Strategy}") == []
    )
    assert (
        len(
            found(
                tmp_path,
                "NP123",
                NEST,
                "trainer.strategy={find_unused_parameters: true}",
            )
        )
        == 1
    )
    assert (
        found(
            tmp_path, "NP123", "model: {a: 1}\ntrainer: {_target_: x, strategy: null}\n"
        )
        == []
    )
    assert found(tmp_path, "NP123", NEST) == found(tmp_path, "NP123", LHOTSE) == []
