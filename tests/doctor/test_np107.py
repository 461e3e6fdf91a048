"""NP107: a limit on duration with tar files."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, WARNING, found

pytestmark = pytest.mark.one_nemo

TARRED = "model.train_ds.is_tarred=true"


def test_a_limit_may_leave_ranks_with_different_numbers_of_batches(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP107", NEST, TARRED)
    assert finding.severity is WARNING
    assert "model.train_ds.max_duration may leave a rank with fewer batches" in finding.what


@pytest.mark.parametrize(
    "override",
    [
        "model.train_ds.is_tarred=false",
        "~model.train_ds.max_duration",
        "+trainer.limit_train_batches=100",
        "+model.train_ds.tarred_shard_strategy=replicate",
        "trainer.devices=1",
        "+model.train_ds.use_lhotse=true",
    ],
)
def test_none_otherwise(tmp_path: Path, override: str) -> None:
    assert found(tmp_path, "NP107", NEST, TARRED, override) == []
