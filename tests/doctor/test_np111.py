"""NP111: keys for the size of a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NEST, WARNING, found

pytestmark = pytest.mark.one_nemo


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("model.train_ds.batch_duration=null",),
            "no key gives the size of a batch (batch_size, bucket_batch_size, ",
        ),
        (("~model.train_ds.batch_duration",), "no key gives the size of a batch"),
        (
            ("+model.train_ds.use_multimodal_sampling=true",),
            "(batch_size, bucket_batch_size, batch_tokens)",
        ),
        (
            ("~model.train_ds.batch_duration", "+model.train_ds.batch_tokens=100"),
            "no key gives the size of a batch",
        ),
        (("model.train_ds.batch_duration=0",), "batch_duration is 0, which is no size"),
        (("model.validation_ds.batch_size=0",), "batch_size is 0, which is no size"),
        (
            ("model.validation_ds.batch_size=8.0",),
            "batch_size is 8.0, which is no size",
        ),
        (
            ("+model.train_ds.bucket_duration_bins=[5,3,9]",),
            "bucket_duration_bins are not in ascending order",
        ),
        (("+model.train_ds.bucket_duration_bins=[]",), "bucket_duration_bins is empty"),
        (("+model.train_ds.bucket_batch_size=[8,4]",), "without bucket_duration_bins"),
        (
            (
                "+model.train_ds.bucket_batch_size=[8,4]",
                "+model.train_ds.bucket_duration_bins=[10,20,40]",
            ),
            "2 batch sizes for 3 buckets",
        ),
    ],
)
def test_lhotse(tmp_path: Path, overrides: tuple[str, ...], said: str) -> None:
    (finding,) = found(tmp_path, "NP111", LHOTSE, *overrides)
    assert finding.severity is WARNING
    assert said in finding.what


def test_none_otherwise(tmp_path: Path) -> None:
    assert found(tmp_path, "NP111", NEST) == []
    assert found(tmp_path, "NP111", LHOTSE) == []
    fixed = (
        "model.train_ds.batch_duration=null",
        "+model.train_ds.bucket_batch_size=[8,4]",
    )
    assert (
        found(
            tmp_path,
            "NP111",
            LHOTSE,
            *fixed,
            "+model.train_ds.bucket_duration_bins=[10,20]",
        )
        == []
    )
    assert (
        found(tmp_path, "NP111", NEST, "+model.train_ds.bucketing_batch_size=null")
        == []
    )


def test_null_is_no_size_and_what_is_to_be_given_no_fault(tmp_path: Path) -> None:
    assert found(tmp_path, "NP111", NEST, "+model.train_ds.batch_duration=null") == []
    assert (
        found(tmp_path, "NP111", LHOTSE, "+model.train_ds.bucketing_batch_size=null")
        == []
    )
    assert found(tmp_path, "NP111", LHOTSE, "model.train_ds.batch_duration='???'") == []
    assert (
        found(tmp_path, "NP111", LHOTSE, "+model.train_ds.bucket_duration_bins=[3,5,5]")
        == []
    )
    (finding,) = found(tmp_path, "NP111", NEST, "~model.train_ds.batch_size")
    assert "model.train_ds" in finding.what
    of_others = (
        "+model.train_ds.dataloader_params={batch_size: 8}",
        "+model.train_ds.micro_batch_size=8",
    )
    for key in of_others:
        assert found(tmp_path, "NP111", NEST, "~model.train_ds.batch_size", key) == []
        assert (
            found(tmp_path, "NP111", LHOTSE, "~model.train_ds.batch_duration", key)
            == []
        )
    buckets = (
        "model.train_ds.is_tarred=true",
        "model.train_ds.tarred_audio_filepaths=[[a.tar],[b.tar]]",
    )
    assert found(tmp_path, "NP111", NEST, *buckets) == []
    assert (
        found(
            tmp_path,
            "NP111",
            NEST,
            *buckets,
            "+model.train_ds.bucketing_batch_size=???",
        )
        == []
    )
    untold = (
        "+model.train_ds.bucketing_batch_size=[8,4]",
        "model.train_ds.batch_size=???",
    )
    assert found(tmp_path, "NP111", NEST, *buckets, *untold) == []
    # One bucket of two files.
    plain = "model.train_ds.tarred_audio_filepaths=[a.tar,b.tar]"
    assert found(tmp_path, "NP111", NEST, buckets[0], plain, untold[0]) == []
    assert found(tmp_path, "NP111", NEST, buckets[1], untold[0]) == []  # not tarred
