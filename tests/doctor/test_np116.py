"""NP116: fuse_loss_wer in validation."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import ERROR, LHOTSE, WARNING, found

pytestmark = pytest.mark.one_nemo


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.validation_ds.batch_size=16",),  # issue 16003
        ("~model.validation_ds.batch_size", "+model.validation_ds.batch_duration=360"),
    ],
)
def test_lhotses_batches_differ_in_size(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    (finding,) = found(tmp_path, "NP116", LHOTSE, *overrides)
    assert finding.severity is ERROR
    assert "4 ranks" in finding.what


def test_tar_files(tmp_path: Path) -> None:
    tarred = (
        "++model.validation_ds={use_lhotse: false, manifest_filepath: x, is_tarred:"
        " true, batch_size: 16}"
    )
    (finding,) = found(tmp_path, "NP116", LHOTSE, tarred)
    assert finding.severity is WARNING


@pytest.mark.parametrize(
    "override",
    [
        "model.joint.fused_batch_size=16",
        "model.joint.fuse_loss_wer=false",
        "trainer.devices=1",
        "model.validation_ds.use_lhotse=false",  # Lightning's sampler gives all ranks the same size
        "model.validation_ds.batch_size=???",
    ],
)
def test_none_otherwise(tmp_path: Path, override: str) -> None:
    assert (
        found(tmp_path, "NP116", LHOTSE, "model.validation_ds.batch_size=16", override)
        == []
    )
    assert found(tmp_path, "NP116", LHOTSE) == []
