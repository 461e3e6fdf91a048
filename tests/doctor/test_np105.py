"""NP105: force_finite for training on a stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import ERROR, LHOTSE, WARNING, found

pytestmark = pytest.mark.one_nemo

FINITE = "+model.train_ds.force_finite=true"
STREAM = "+model.train_ds.shar_path=x"


def test_a_stream_that_ends_on_each_rank_by_itself(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP105", LHOTSE, FINITE, STREAM)
    assert finding.severity is ERROR
    assert finding.what.startswith("model.train_ds is a stream that")
    assert "ends on each of 4 ranks after its own number of batches" in finding.what


def test_a_warning_where_the_config_does_not_tell_whether_it_is_a_stream(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP105", LHOTSE, FINITE, "+model.train_ds.input_cfg=other.yaml")
    assert finding.severity is WARNING
    assert "is a stream, if its input is one, that" in finding.what


@pytest.mark.parametrize(
    "override", ["trainer.devices=1", "+trainer.limit_train_batches=100", "++model.train_ds.force_finite=false"]
)
def test_none_otherwise(tmp_path: Path, override: str) -> None:
    assert found(tmp_path, "NP105", LHOTSE, FINITE, STREAM, override) == []
    assert found(tmp_path, "NP105", LHOTSE, FINITE) == []


def test_none_for_other_sets_and_loaders(tmp_path: Path) -> None:
    validation = "+model.validation_ds.force_finite=true", "+model.validation_ds.shar_path=x"
    assert found(tmp_path, "NP105", LHOTSE, *validation) == []
    nemo = "++model.train_ds={use_lhotse: false, manifest_filepath: x, is_tarred: true, force_finite: true}"
    assert found(tmp_path, "NP105", LHOTSE, nemo) == []
