"""NP122: Lhotse's shard_seed; what is said of ranks and orders was measured with NeMo's own loaders."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NEST, WARNING, found

pytestmark = pytest.mark.one_nemo

TRNG = "~model.train_ds.shard_seed"
TARRED = "+model.train_ds.tarred_audio_filepaths=audio.tar"


def test_each_rank_takes_its_share_of_an_order_of_its_own(tmp_path: Path) -> None:
    for trng in (TRNG, "model.train_ds.shard_seed=trng"):
        (finding,) = found(tmp_path, "NP122", LHOTSE, trng)
        assert finding.severity is WARNING
        assert "entries are read twice and others never, and a rank may have a batch less" in finding.what
        assert finding.instead.startswith("model.train_ds.shard_seed: a whole number")
        assert finding.line
    (finding,) = found(tmp_path, "NP122", LHOTSE, TRNG, "model.train_ds.batch_duration=null")
    assert "a batch less" not in finding.what  # measured: 72 and 72


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.train_ds.shard_seed=0",),
        ("model.train_ds.shard_seed=randomized",),  # outside of workers, the same on all ranks
        ("model.train_ds.shard_seed='???'",),
        ("model.train_ds.shard_seed=trng", "+model.train_ds.shuffle=false"),
        ("model.train_ds.shard_seed=trng", "trainer.devices=1"),
        ("model.train_ds.shard_seed=trng", "model.train_ds.use_lhotse=false"),
        ("model.train_ds.shard_seed=trng", "+model.transf_decoder={_target_: x}"),  # shuffles only when told
        ("model.train_ds.shard_seed=trng", "model.train_ds.manifest_filepath=[[a],[b]]"),  # endless: drawn at random
    ],
)
def test_none_where_all_ranks_have_one_order(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert found(tmp_path, "NP122", LHOTSE, *overrides) == []
    assert found(tmp_path, "NP122", NEST) == []


def test_evaluation_is_not_shuffled_but_what_is_mixed_has_an_order_of_its_own(tmp_path: Path) -> None:
    mixed = "[{type: nemo, manifest_filepath: a}, {type: nemo, manifest_filepath: b}]"
    finite = f"+model.validation_ds.input_cfg={mixed}", "+model.validation_ds.force_finite=true"
    (finding,) = found(tmp_path, "NP122", LHOTSE, *finite)  # measured: 1308 read, 1156 of 1300
    assert "model.validation_ds: each of 4 ranks" in finding.what
    assert len(found(tmp_path, "NP122", LHOTSE, "+model.validation_ds.shuffle=true")) == 1
    speechlm2 = f"data: {{validation_ds: {{batch_size: 4, datasets: {{one: {{input_cfg: {mixed}}}}}}}}}\n"
    assert len(found(tmp_path, "NP122", speechlm2 + "trainer: {devices: 2}\n")) == 1
    seeded = speechlm2.replace("datasets", "shard_seed: 0, datasets")
    assert found(tmp_path, "NP122", seeded + "trainer: {devices: 2}\n") == []


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (("model.train_ds.shard_seed=0",), True),
        (("model.train_ds.shard_seed=trng",), False),
        (("model.train_ds.shard_seed=trng", "+model.train_ds.shuffle=false"), True),
        (("model.train_ds.shard_seed=randomized",), False),
        (("model.train_ds.shard_seed=randomized", "model.train_ds.num_workers=0"), True),
        (("model.train_ds.shard_seed=0", "trainer.devices=1"), False),
    ],
)
def test_every_rank_reads_a_stream_in_the_same_order(tmp_path: Path, overrides: tuple[str, ...], same: bool) -> None:
    said = found(tmp_path, "NP122", LHOTSE, TARRED, *overrides)
    assert [finding.severity for finding in said] == [WARNING] * same
    if same:
        assert "reads it in the same order: all train on the same batches" in said[0].what


def test_shar_is_shuffled_in_any_case(tmp_path: Path) -> None:
    shar = "+model.train_ds.shar_path=x", "+model.train_ds.shuffle=false", "model.train_ds.shard_seed=trng"
    assert found(tmp_path, "NP122", LHOTSE, *shar) == []


def test_a_multi_configs_own_seed_counts_for_all_its_sets(tmp_path: Path) -> None:
    text = """\
data:
  train_ds:
    multi_config: true
    seed: 0
    shard_seed: trng
    shuffle: true
    one: {manifest_filepath: a, batch_size: 4, shard_seed: 0}
trainer: {devices: 2}
"""
    (finding,) = found(tmp_path, "NP122", text)
    assert finding.instead.startswith("data.train_ds.shard_seed: ")
    assert found(tmp_path, "NP122", text, "data.train_ds.shard_seed=1") == []
