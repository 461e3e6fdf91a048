"""NP124: a multi_config that NeMo's Lhotse loader refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, WARNING, found

pytestmark = pytest.mark.one_nemo

MULTI = """\
data:
  train_ds:
    multi_config: true
    seed: 0
    shard_seed: 0
    shuffle: true
    sampler_weights: {one: 0.5, two: 0.5}
    one: {manifest_filepath: a, batch_size: 4}
    two: {cuts_path: b, batch_size: 4}
trainer: {devices: 1}
"""


@pytest.mark.parametrize(
    "keys",
    [("seed",), ("shard_seed",), ("shuffle",), ("seed", "shard_seed", "shuffle")],
)
def test_without_its_seeds(tmp_path: Path, keys: tuple[str, ...]) -> None:
    (finding,) = found(
        tmp_path, "NP124", MULTI, *(f"~data.train_ds.{key}" for key in keys)
    )
    assert finding.severity is WARNING
    assert f"without {', '.join(keys)}" in finding.what


def test_a_stream_beside_a_set_that_is_none(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP124", MULTI, "+data.train_ds.two.shar_path=x")
    assert "data.train_ds.two" in finding.what
    # What is beside multi_config is no set's own input, or limit.
    assert found(
        tmp_path,
        "NP124",
        MULTI,
        "+data.train_ds.two.shar_path=x",
        "+data.train_ds.input_cfg=more.yaml",
    )
    streams = (
        "+data.train_ds.two.shar_path=x",
        "+data.train_ds.one.force_iterable_dataset=true",
    )
    assert found(tmp_path, "NP124", MULTI, *streams) == []


def test_none_otherwise(tmp_path: Path) -> None:
    assert found(tmp_path, "NP124", MULTI) == []
    assert (
        found(
            tmp_path,
            "NP124",
            MULTI,
            "data.train_ds.multi_config=false",
            "~data.train_ds.seed",
        )
        == []
    )
    # It is there.
    assert found(tmp_path, "NP124", MULTI, "data.train_ds.seed=null") == []
    assert (
        found(tmp_path, "NP124", MULTI, "+data.train_ds.two.input_cfg=other.yaml") == []
    )


@pytest.mark.parametrize(
    "outer",
    [
        "%s",
        "{type: group, input_cfg: [%s]}",
        "{type: sqa_as_conversation, input_cfg: [%s]}",
    ],
)
def test_one_input_cfg_of_both_kinds(tmp_path: Path, outer: str) -> None:
    both = "{type: txt, paths: x}, {type: lhotse, cuts_path: x}"
    inputs = f"+model.train_ds.input_cfg=[{outer % both}]"
    (finding,) = found(tmp_path, "NP124", LHOTSE, inputs)
    assert "model.train_ds.input_cfg" in finding.what
    for rule in ("NP104", "NP122"):
        assert found(tmp_path, rule, LHOTSE, inputs) == []
    for kind in ("map", "iterable"):
        assert (
            found(
                tmp_path,
                "NP124",
                LHOTSE,
                inputs,
                f"+model.train_ds.force_{kind}_dataset=true",
            )
            == []
        )
    for other in (
        "{type: txt, paths: x}, {type: parquet, manifest_filepath: x}",
        "{type: txt, paths: x}, {type: my_own}",
    ):
        assert (
            found(tmp_path, "NP124", LHOTSE, f"+model.train_ds.input_cfg=[{other}]")
            == []
        )


def test_what_is_forced_to_be_a_stream_is_to_be_repeated(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP124", MULTI, "+data.train_ds.two.shar_path=x")
    assert "one.force_iterable_dataset" in finding.instead
