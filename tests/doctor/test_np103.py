"""NP103: Lhotse's sampler under Lightning's."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NEST, WARNING, found

from nemo_patches.tools.doctor.finding import Change

pytestmark = pytest.mark.one_nemo


def test_lhotse_with_lightnings_sampler(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP103", LHOTSE, "~trainer.use_distributed_sampler")
    assert finding.severity is WARNING
    assert "model.validation_ds" in finding.what
    assert finding.change == Change(("trainer", "use_distributed_sampler"), False)


def test_no_safe_change_where_a_set_is_not_lhotses(tmp_path: Path) -> None:
    mixed = "~trainer.use_distributed_sampler", "model.validation_ds.use_lhotse=false"
    (finding,) = found(tmp_path, "NP103", LHOTSE, *mixed)
    assert finding.change is None


@pytest.mark.parametrize(
    "override",
    [
        "trainer.use_distributed_sampler=false",
        "trainer.devices=1",
        "~model.train_ds",
        "++model.x=1",
    ],
)
def test_none_otherwise(tmp_path: Path, override: str) -> None:
    assert found(tmp_path, "NP103", LHOTSE, override) == []
    assert found(tmp_path, "NP103", NEST) == []


def test_none_for_streams_which_lightning_leaves_alone(tmp_path: Path) -> None:
    streams = [f"+model.{name}.shar_path=x" for name in ("train_ds", "validation_ds")]
    assert (
        found(tmp_path, "NP103", LHOTSE, "~trainer.use_distributed_sampler", *streams)
        == []
    )


def test_no_safe_change_where_each_rank_would_take_its_share_of_its_own_order(
    tmp_path: Path,
) -> None:
    own = "~trainer.use_distributed_sampler", "model.train_ds.shard_seed=trng"
    (finding,) = found(tmp_path, "NP103", LHOTSE, *own)
    assert finding.change is None and "a whole number as shard_seed" in finding.instead
    assert (
        found(tmp_path, "NP103", LHOTSE, *own, "+model.train_ds.shuffle=false")[
            0
        ].change
        is not None
    )


def test_none_for_types_that_are_streams_or_not_known(tmp_path: Path) -> None:
    for name in ("parquet", "my_own"):
        inputs = f"[{{type: {name}, manifest_filepath: x}}]"
        sets = [
            f"+model.{role}.input_cfg={inputs}"
            for role in ("train_ds", "validation_ds")
        ]
        assert (
            found(tmp_path, "NP103", LHOTSE, "~trainer.use_distributed_sampler", *sets)
            == []
        )
