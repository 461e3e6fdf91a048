"""NP108: evaluation on a stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import ERROR, LHOTSE, NEST, WARNING, found

pytestmark = pytest.mark.one_nemo


def test_lhotse_never_ends_a_stream(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP108", LHOTSE, "+model.validation_ds.shar_path=x")
    assert finding.severity is ERROR
    assert "validation never ends" in finding.what
    (finding,) = found(
        tmp_path, "NP108", LHOTSE, "+model.test_ds={use_lhotse: true, shar_path: x}"
    )
    assert finding.severity is WARNING


def test_nemos_tar_files_end_on_each_rank_by_itself(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP108", NEST, "+model.validation_ds.is_tarred=true")
    assert finding.severity is WARNING
    assert "4 ranks" in finding.what


@pytest.mark.parametrize(
    "override",
    [
        "+trainer.limit_val_batches=10",
        "+trainer.limit_val_batches='???'",
        "+trainer.limit_val_batches=10.0",
        "+trainer.limit_val_batches=0.0",
        "+trainer.fast_dev_run=true",
        "+trainer.overfit_batches=2",
    ],
)
def test_none_with_a_number_of_batches(tmp_path: Path, override: str) -> None:
    assert (
        found(tmp_path, "NP108", LHOTSE, "+model.validation_ds.shar_path=x", override)
        == []
    )
    assert (
        found(tmp_path, "NP108", NEST, "+model.validation_ds.is_tarred=true", override)
        == []
    )


def test_none_for_what_is_no_stream(tmp_path: Path) -> None:
    assert found(tmp_path, "NP108", LHOTSE) == []
    assert found(tmp_path, "NP108", NEST) == []


def test_none_for_training_nor_where_counts_cannot_differ(tmp_path: Path) -> None:
    assert found(tmp_path, "NP108", LHOTSE, "+model.train_ds.shar_path=x") == []
    assert (
        found(
            tmp_path,
            "NP108",
            NEST,
            "+model.validation_ds.is_tarred=true",
            "trainer.devices=1",
        )
        == []
    )
    assert (
        found(tmp_path, "NP108", LHOTSE, "+model.validation_ds.shar_path=x", "~trainer")
        == []
    )


def test_the_limit_is_that_of_the_sets_own_role(tmp_path: Path) -> None:
    test = "+model.test_ds={use_lhotse: true, shar_path: x}"
    assert found(tmp_path, "NP108", LHOTSE, test, "+trainer.limit_test_batches=3") == []
    assert (
        len(found(tmp_path, "NP108", LHOTSE, test, "+trainer.limit_val_batches=3")) == 1
    )


def test_speechlm2_makes_all_evaluation_finite_itself(tmp_path: Path) -> None:
    text = (
        "model: {a: 1}\ndata:\n  validation_ds:\n    datasets:\n      one: {shar_path:"
        " x}\ntrainer: {devices: 2}\n"
    )
    assert found(tmp_path, "NP108", text) == []
    assert (
        len(found(tmp_path, "NP108", text.replace("model: {a: 1}\ndata:", "model:")))
        == 1
    )


def test_made_finite_a_stream_is_read_whole_by_every_worker_of_every_rank(
    tmp_path: Path,
) -> None:
    finite = (
        "+model.validation_ds.shar_path=x",
        "+model.validation_ds.force_finite=true",
    )
    (finding,) = found(tmp_path, "NP108", LHOTSE, *finite)
    assert finding.severity is WARNING
    assert "4 ranks" in finding.what
    workers = "+model.validation_ds.num_workers=2"
    (finding,) = found(tmp_path, "NP108", LHOTSE, *finite, workers)
    assert "4 ranks" in finding.what
    assert (
        len(found(tmp_path, "NP108", LHOTSE, *finite, workers, "trainer.devices=1"))
        == 1
    )
    assert found(tmp_path, "NP108", LHOTSE, *finite, "trainer.devices=1") == []
    assert (
        found(
            tmp_path,
            "NP108",
            LHOTSE,
            *finite,
            workers,
            "+model.validation_ds.force_map_dataset=true",
        )
        == []
    )


def test_of_several_manifests_each_is_a_set_of_its_own_but_input_cfg_is_mixed(
    tmp_path: Path,
) -> None:
    assert (
        found(
            tmp_path,
            "NP108",
            LHOTSE,
            "model.validation_ds.manifest_filepath=[a.json,b.json]",
        )
        == []
    )
    mixed = (
        "+model.validation_ds.input_cfg=[{type: nemo, manifest_filepath: a},{type:"
        " nemo, manifest_filepath: b}]"
    )
    (finding,) = found(tmp_path, "NP108", LHOTSE, mixed)
    assert finding.severity is ERROR


def test_what_is_advised_reads_each_entry_once(tmp_path: Path) -> None:
    for entry in (
        "{type: parquet, manifest_filepath: x}",
        "{type: lhotse_shar, shar_path: x}",
    ):
        inputs = f"+model.validation_ds.input_cfg=[{entry}]"
        (endless,) = found(tmp_path, "NP108", LHOTSE, inputs)
        (whole,) = found(
            tmp_path, "NP108", LHOTSE, inputs, "+model.validation_ds.force_finite=true"
        )
        for finding in (endless, whole):
            assert "force_map_dataset: true" in finding.instead
        advised = "{force_finite: true, force_map_dataset: true, shard_seed: 0}"
        for rule in ("NP108", "NP122"):
            assert (
                found(tmp_path, rule, LHOTSE, inputs, f"+model.validation_ds={advised}")
                == []
            )


def test_what_is_made_a_stream_is_not_to_be_made_both(tmp_path: Path) -> None:
    (finding,) = found(
        tmp_path, "NP108", LHOTSE, "+model.validation_ds.force_iterable_dataset=true"
    )
    assert "4 ranks" in finding.what
    assert "force_iterable_dataset: false" in finding.instead
    assert "force_map_dataset" not in finding.instead
