"""NP112: sets that are not shared out, and drop_last in evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NEST, NOTE, WARNING, found

pytestmark = pytest.mark.one_nemo

OFF = "+trainer.use_distributed_sampler=false"


def test_every_rank_reads_all(tmp_path: Path) -> None:
    training, validation = found(tmp_path, "NP112", NEST, OFF)
    assert (training.severity, validation.severity) == (WARNING, NOTE)
    assert "model.train_ds" in training.what


def test_drop_last_in_evaluation(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP112", NEST, "+model.validation_ds.drop_last=true")
    assert finding.severity is NOTE


def test_none_otherwise(tmp_path: Path) -> None:
    assert found(tmp_path, "NP112", NEST) == []
    assert found(tmp_path, "NP112", NEST, "model.train_ds.drop_last=false") == []  # Lightning's sampler pads
    assert found(tmp_path, "NP112", LHOTSE) == []
    assert found(tmp_path, "NP112", NEST, OFF, "trainer.devices=1") == []


def test_none_where_only_the_models_class_tells_who_reads_it(tmp_path: Path) -> None:
    untold = [f"+model.{name}.num_buckets=30" for name in ("train_ds", "validation_ds")]
    assert found(tmp_path, "NP112", NEST, OFF, *untold) == []


def test_none_for_tar_files_which_are_shared_out(tmp_path: Path) -> None:
    said = found(tmp_path, "NP112", NEST, OFF, "model.train_ds.is_tarred=true")
    assert ["model.validation_ds" in finding.what for finding in said] == [True]


def test_lightnings_sampler_is_not_advised_beside_lhotses(tmp_path: Path) -> None:
    training, _ = found(tmp_path, "NP112", NEST, OFF)
    assert "use_distributed_sampler" in training.instead
    (training,) = found(tmp_path, "NP112", NEST, OFF, "+model.validation_ds.use_lhotse=true")
    assert "use_lhotse: true" in training.instead
