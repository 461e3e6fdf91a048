"""NP115: workers that are forked beside a pinning thread."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, NOTE, found

pytestmark = pytest.mark.one_nemo


PINNED = "+model.validation_ds.pin_memory=true"


def test_both_loaders_fork_and_pin(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP115", NEST, PINNED)
    assert finding.severity is NOTE
    assert "each validation forks workers beside" in finding.what


@pytest.mark.parametrize(
    "override",
    [
        "model.train_ds.pin_memory=false",
        "model.train_ds.num_workers=0",
        "model.train_ds.num_workers=???",
        "model.validation_ds.num_workers=0",
        "trainer.devices=1",
        "trainer.accelerator=cpu",
    ],
)
def test_none_otherwise(tmp_path: Path, override: str) -> None:
    assert found(tmp_path, "NP115", NEST) == []
    assert found(tmp_path, "NP115", NEST, PINNED, override) == []


def test_a_test_sets_workers_are_forked_when_training_is_over(tmp_path: Path) -> None:
    test = "+model.test_ds={manifest_filepath: x, num_workers: 8, pin_memory: true}"
    assert found(tmp_path, "NP115", NEST, test) == []
