"""NP107: a limit on duration with tar files."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, WARNING, found

pytestmark = pytest.mark.one_nemo

TARRED = "model.train_ds.is_tarred=true"


def test_a_limit_may_leave_ranks_with_different_numbers_of_batches(
    tmp_path: Path,
) -> None:
    (finding,) = found(tmp_path, "NP107", NEST, TARRED)
    assert finding.severity is WARNING
    assert "model.train_ds.max_duration" in finding.what


@pytest.mark.parametrize(
    "override",
    [
        "model.train_ds.is_tarred=false",
        "~model.train_ds.max_duration",
        "+trainer.limit_train_batches=100",
        "+trainer.limit_train_batches=100.0",
        "+trainer.fast_dev_run=1",
        "+model.train_ds.tarred_shard_strategy=replicate",
        "trainer.devices=1",
        "+model.train_ds.use_lhotse=true",
    ],
)
def test_none_otherwise(tmp_path: Path, override: str) -> None:
    assert found(tmp_path, "NP107", NEST, TARRED, override) == []


def test_none_for_evaluation_for_lhotse_and_for_a_limit_that_is_to_be_given(
    tmp_path: Path,
) -> None:
    assert found(tmp_path, "NP107", NEST, "+model.validation_ds.is_tarred=true") == []
    lhotse = (
        "+model.train_ds.use_lhotse=true",
        "model.train_ds.tarred_audio_filepaths=a.tar",
    )
    assert found(tmp_path, "NP107", NEST, TARRED, *lhotse) == []
    assert (
        found(tmp_path, "NP107", NEST, TARRED, "+trainer.limit_train_batches=???") == []
    )


def test_it_reads_by_what_the_buckets_are_made_into_batches(tmp_path: Path) -> None:
    buckets = (
        "+model.train_ds.bucketing_strategy=fully_randomized",
        "+model.train_ds.bucketing_batch_size=[16,8]",
    )
    (finding,) = found(tmp_path, "NP107", NEST, TARRED, *buckets)
    keys = {value.keys[-1] for value in finding.read}
    assert keys > {"bucketing_strategy", "bucketing_batch_size"}
