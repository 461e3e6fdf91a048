"""NP105: force_finite for training on a stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import ERROR, LHOTSE, NOTE, WARNING, found

pytestmark = pytest.mark.one_nemo

FINITE = "+model.train_ds.force_finite=true"
STREAM = "+model.train_ds.shar_path=x"


def test_a_stream_that_ends_on_each_rank_by_itself(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP105", LHOTSE, FINITE, STREAM)
    assert finding.severity is ERROR
    assert "model.train_ds" in finding.what
    assert "4 ranks" in finding.what


def test_a_warning_where_the_config_does_not_tell_whether_it_is_a_stream(
    tmp_path: Path,
) -> None:
    (finding,) = found(
        tmp_path, "NP105", LHOTSE, FINITE, "+model.train_ds.input_cfg=other.yaml"
    )
    assert finding.severity is WARNING


@pytest.mark.parametrize(
    "override",
    [
        "trainer.devices=1",
        "+trainer.limit_train_batches=100",
        "++model.train_ds.force_finite=false",
    ],
)
def test_none_otherwise(tmp_path: Path, override: str) -> None:
    assert found(tmp_path, "NP105", LHOTSE, FINITE, STREAM, override) == []
    assert found(tmp_path, "NP105", LHOTSE, FINITE) == []


def test_none_for_other_sets_and_loaders(tmp_path: Path) -> None:
    validation = (
        "+model.validation_ds.force_finite=true",
        "+model.validation_ds.shar_path=x",
    )
    assert found(tmp_path, "NP105", LHOTSE, *validation) == []
    nemo = (
        "++model.train_ds={use_lhotse: false, manifest_filepath: x, is_tarred: true,"
        " force_finite: true}"
    )
    assert found(tmp_path, "NP105", LHOTSE, nemo) == []


def test_what_is_made_a_stream_ends_too(tmp_path: Path) -> None:
    forced = "+model.train_ds.force_iterable_dataset=true"
    (finding,) = found(tmp_path, "NP105", LHOTSE, forced)
    assert finding.severity is ERROR
    repeated = "model.train_ds.manifest_filepath=[[a.json],[b.json]]"
    assert found(tmp_path, "NP105", LHOTSE, forced, repeated) == []
    assert (
        found(tmp_path, "NP105", LHOTSE, forced, "+model.train_ds.input_cfg=other.yaml")
        == []
    )


def test_an_entrys_own_switch(tmp_path: Path) -> None:
    entry = (
        "+model.train_ds.input_cfg=[{type: parquet, manifest_filepath: x, force_finite:"
        " %s}]"
    )
    assert found(tmp_path, "NP105", LHOTSE, entry % "true")[0].severity is ERROR
    assert found(tmp_path, "NP105", LHOTSE, entry % "false", FINITE) == []


def test_batches_of_one_size_are_as_many_on_all_ranks(tmp_path: Path) -> None:
    fixed = "model.train_ds.batch_duration=null", "+model.train_ds.batch_size=8"
    (finding,) = found(tmp_path, "NP105", LHOTSE, FINITE, STREAM, *fixed)
    assert finding.severity is NOTE
    assert "4 ranks" in finding.what
