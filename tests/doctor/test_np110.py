"""NP110: fully randomized buckets."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, NOTE, WARNING, found

pytestmark = pytest.mark.one_nemo

BUCKETS = "model.train_ds.is_tarred=true", "model.train_ds.tarred_audio_filepaths=[[a.tar],[b.tar]]"
RANDOM = "+model.train_ds.bucketing_strategy=fully_randomized"


def test_each_rank_draws_its_own_buckets(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP110", NEST, *BUCKETS, RANDOM)
    assert finding.severity is NOTE
    (finding,) = found(tmp_path, "NP110", NEST, *BUCKETS, RANDOM, "+model.train_ds.bucketing_batch_size=[8,4]")
    assert finding.severity is WARNING
    assert "and other batch sizes" in finding.what


def test_none_where_the_strategy_is_not_used(tmp_path: Path) -> None:
    assert found(tmp_path, "NP110", NEST, RANDOM) == []
    assert found(tmp_path, "NP110", NEST, *BUCKETS) == []
    assert found(tmp_path, "NP110", NEST, BUCKETS[0], "model.train_ds.tarred_audio_filepaths=a.tar", RANDOM) == []


def test_none_for_one_rank_one_bucket_or_lhotse(tmp_path: Path) -> None:
    assert found(tmp_path, "NP110", NEST, *BUCKETS, RANDOM, "trainer.devices=1") == []
    one = "model.train_ds.tarred_audio_filepaths=[[a.tar]]"
    assert found(tmp_path, "NP110", NEST, BUCKETS[0], one, RANDOM) == []
    plain = "model.train_ds.tarred_audio_filepaths=[a.tar,b.tar]"
    assert found(tmp_path, "NP110", NEST, BUCKETS[0], plain, RANDOM) == []
    assert found(tmp_path, "NP110", NEST, *BUCKETS, RANDOM, "+model.train_ds.use_lhotse=true") == []
    assert found(tmp_path, "NP110", NEST, "model.train_ds.is_tarred=false", BUCKETS[1], RANDOM) == []
