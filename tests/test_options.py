"""options/ is imported by setting alone, and before anything is changed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import asr_models
import pytest
from asr_models import Batches, loader
from ranks import Result, run_ranks

import nemo_patches

pytestmark = pytest.mark.one_nemo
STEPS = 20


def options() -> set[str]:
    return {name for name in sys.modules if name.startswith("nemo_patches.options")}


def imported(rank: int, size: int, folder: str) -> dict[str, set[str]]:
    """After trainings under DDP, what is imported of options/."""
    asr_models.prepare()
    seen = {}
    nemo_patches.apply(timeout=60)
    trainer = asr_models.trainer_of(max_epochs=1, limit_val_batches=1)
    trainer.fit(
        asr_models.ctc(trainer),
        loader(Batches(range(STEPS))),
        loader(Batches(range(1))),
    )
    assert trainer.global_step == STEPS
    str(nemo_patches.status())
    seen["defaults"] = options()
    saves = asr_models.trainer_of(
        [checkpoint_callback(folder)], max_epochs=1, enable_checkpointing=True
    )
    saves.fit(asr_models.ctc(saves), loader(Batches(range(1))))
    seen["NeMo's checkpoints"] = options()
    nemo_patches.apply(
        metrics="deferred", stop_together="training", checkpoints="stock"
    )
    seen["by setting"] = options()
    return seen


def checkpoint_callback(folder: str) -> Any:
    from nemo.utils.callbacks.nemo_model_checkpoint import NeMoModelCheckpoint

    return NeMoModelCheckpoint(
        dirpath=folder, prefix="model", save_nemo_on_train_end=False
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    return run_ranks(imported, 2, str(tmp_path_factory.mktemp("checkpoints")))


def test_a_training_by_default_imports_nothing_of_it(results: list[Result]) -> None:
    for result in results:
        assert result.value["defaults"] == set()


def test_the_first_use_of_nemos_checkpoint_callback_imports_its_part_alone(
    results: list[Result],
) -> None:
    for result in results:
        parts = {
            "nemo_patches.options.checkpoints",
            "nemo_patches.options.patient_rounds",
        }
        assert result.value["NeMo's checkpoints"] == {"nemo_patches.options", *parts}


def test_a_setting_imports_its_part(results: list[Result]) -> None:
    for result in results:
        parts = {"deferred_metrics", "stop_together"}
        assert {f"nemo_patches.options.{part}" for part in parts} <= result.value[
            "by setting"
        ]


def alone_with_a_callback(rank: int, size: int, folder: str) -> set[str]:
    asr_models.prepare()
    nemo_patches.apply()
    trainer = asr_models.trainer_of(
        [checkpoint_callback(folder)], enable_checkpointing=True
    )
    trainer.fit(asr_models.ctc(trainer), loader(Batches(range(1))))
    return options()


def test_one_rank_alone_has_no_need_of_it(tmp_path: Path) -> None:
    (result,) = run_ranks(alone_with_a_callback, 1, str(tmp_path))
    assert result.value == set()


BROKEN = {
    "metrics": ("deferred", "deferred_metrics"),
    "stop_together": ("training", "stop_together"),
}


def refused(rank: int, size: int, setting: str) -> dict[str, Any]:
    """A second apply() whose setting cannot be imported."""
    value, part = BROKEN[setting]
    nemo_patches.apply(timeout=7)
    before = str(nemo_patches.status())
    sys.modules[f"nemo_patches.options.{part}"] = None  # type: ignore[assignment]  # as a broken file would be
    with pytest.raises(ImportError) as error:
        nemo_patches.apply(timeout=8, checkpoints="stock", **{setting: value})
    unchanged = str(nemo_patches.status()) == before
    nemo_patches.revert()
    with pytest.raises(ImportError):
        nemo_patches.apply(**{setting: value})
    return {
        "error": str(error.value),
        "unchanged": unchanged,
        "patched": nemo_patches.status().patched,
    }


@pytest.mark.parametrize("setting", BROKEN)
def test_a_setting_that_cannot_be_imported_leaves_the_old_ones_in_force(
    setting: str,
) -> None:
    (result,) = run_ranks(refused, 1, setting, group=False)
    assert BROKEN[setting][1] in result.value["error"]
    assert result.value["unchanged"]
    assert result.value["patched"] == ()


def under_auto_apply(rank: int, size: int) -> tuple[str, ...]:
    from nemo_patches.patching.monkeypatch import this_process
    from nemo_patches.patching.targets import TARGETS

    os.environ["NEMO_PATCHES_METRICS"] = "deferred"
    sys.modules["nemo_patches.options.deferred_metrics"] = None  # type: ignore[assignment]
    for name in (
        *(target.module for target in TARGETS if target.module in sys.modules),
        "nemo.collections.asr",
    ):
        this_process.on_import(name)
    return nemo_patches.status().patched


def test_under_auto_apply_that_is_said_and_the_rest_is_patched() -> None:
    (result,) = run_ranks(under_auto_apply, 1, group=False)
    assert "ConformerEncoder.update_max_seq_length" in result.value
    assert not [target for target in result.value if "epoch" in target]
    assert len(result.lines("ERROR", "metrics are not deferred")) == 1
