"""NP115: data loaders' workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, NOTE, found

pytestmark = pytest.mark.one_nemo


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model.train_ds.num_workers=0",), "model.train_ds: audio is read on the training thread"),
        (("~model.train_ds.num_workers",), "model.train_ds: audio is read on the training thread"),
        (("+model.train_ds.persistent_workers=false",), "NeMo does not hand that on"),
        (("trainer.accelerator=cpu",), "pin_memory has no effect on the CPU"),
        (("+model.validation_ds.pin_memory=true",), "each validation forks workers beside"),
    ],
)
def test_notes(tmp_path: Path, overrides: tuple[str, ...], said: str) -> None:
    (finding,) = found(tmp_path, "NP115", NEST, *overrides)
    assert finding.severity is NOTE
    assert said in finding.what


def test_none_otherwise(tmp_path: Path) -> None:
    assert found(tmp_path, "NP115", NEST) == []
    pinned = "+model.validation_ds.pin_memory=true"
    assert found(tmp_path, "NP115", NEST, pinned, "model.validation_ds.num_workers=0") == []
    assert found(tmp_path, "NP115", NEST, "model.train_ds.num_workers=0", "trainer.devices=1") == []


def test_forks_matter_only_beside_a_pinning_training_loader_on_several_ranks(tmp_path: Path) -> None:
    pinned = "+model.validation_ds.pin_memory=true"
    for override in ("model.train_ds.pin_memory=false", "model.train_ds.num_workers=???", "trainer.devices=1"):
        assert found(tmp_path, "NP115", NEST, pinned, override) == []
    assert found(tmp_path, "NP115", NEST, "model.train_ds.pin_memory=false", "trainer.accelerator=cpu") == []
    test = "+model.test_ds={manifest_filepath: x, num_workers: 8, pin_memory: true}"
    assert found(tmp_path, "NP115", NEST, test) == []
