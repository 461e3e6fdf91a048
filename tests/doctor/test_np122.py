"""NP122: Lhotse's shard_seed; what is said of ranks and orders was measured with NeMo's own
loaders.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NEST, NOTE, WARNING, found

pytestmark = pytest.mark.one_nemo

TRNG = "~model.train_ds.shard_seed"
TARRED = "+model.train_ds.tarred_audio_filepaths=audio.tar"


def test_each_rank_takes_its_share_of_an_order_of_its_own(tmp_path: Path) -> None:
    for trng in (TRNG, "model.train_ds.shard_seed=trng"):
        (finding,) = found(tmp_path, "NP122", LHOTSE, trng)
        assert finding.severity is WARNING
        assert "model.train_ds.shard_seed" in finding.instead
        assert finding.line
    (finding,) = found(
        tmp_path, "NP122", LHOTSE, TRNG, "model.train_ds.batch_duration=null"
    )
    assert "one batch fewer" not in finding.what  # measured: 72 and 72


@pytest.mark.parametrize(
    "tarred", [(), ("+model.train_ds.tarred_audio_filepaths=null",)]
)
def test_a_recipe_whose_data_are_still_to_be_given_may_get_tar_files(
    tmp_path: Path, tarred: tuple[str, ...]
) -> None:
    """A whole number would then have all ranks train on the same batches."""
    (finding,) = found(tmp_path, "NP122", LHOTSE, TRNG, *tarred)
    assert finding.instead.endswith("leave trng")
    (finding,) = found(
        tmp_path,
        "NP122",
        LHOTSE,
        TRNG,
        *tarred,
        "model.train_ds.manifest_filepath=a.json",
    )
    assert "leave trng" not in finding.instead
    assert found(tmp_path, "NP122", LHOTSE, TRNG, "+" + TARRED) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.train_ds.shard_seed=0",),
        (
            "model.train_ds.shard_seed=randomized",
        ),  # outside of workers, the same on all ranks
        ("model.train_ds.shard_seed='???'",),
        ("model.train_ds.shard_seed=trng", "+model.train_ds.shuffle=false"),
        ("model.train_ds.shard_seed=trng", "trainer.devices=1"),
        ("model.train_ds.shard_seed=trng", "model.train_ds.use_lhotse=false"),
        (
            "model.train_ds.shard_seed=trng",
            "+model.transf_decoder={_target_: x}",
        ),  # shuffles only when told
        (
            "model.train_ds.shard_seed=trng",
            "model.train_ds.manifest_filepath=[[a],[b]]",
        ),  # endless: drawn at random
    ],
)
def test_none_where_all_ranks_have_one_order(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    assert found(tmp_path, "NP122", LHOTSE, *overrides) == []
    assert found(tmp_path, "NP122", NEST) == []


def test_evaluation_is_not_shuffled_but_what_is_mixed_has_an_order_of_its_own(
    tmp_path: Path,
) -> None:
    mixed = "[{type: nemo, manifest_filepath: a}, {type: nemo, manifest_filepath: b}]"
    finite = (
        f"+model.validation_ds.input_cfg={mixed}",
        "+model.validation_ds.force_finite=true",
    )
    # Measured: 1308 read, 1156 of 1300.
    (finding,) = found(tmp_path, "NP122", LHOTSE, *finite)
    assert "model.validation_ds" in finding.what
    assert (
        len(found(tmp_path, "NP122", LHOTSE, "+model.validation_ds.shuffle=true")) == 1
    )
    speechlm2 = (
        "data: {validation_ds: {batch_size: 4, datasets: {one: {input_cfg:"
        f" {mixed}}}}}}}}}\n"
    )
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
        (
            ("model.train_ds.shard_seed=randomized", "model.train_ds.num_workers=0"),
            True,
        ),
        (("model.train_ds.shard_seed=0", "trainer.devices=1"), False),
    ],
)
def test_every_rank_reads_a_stream_in_the_same_order(
    tmp_path: Path, overrides: tuple[str, ...], same: bool
) -> None:
    said = found(tmp_path, "NP122", LHOTSE, TARRED, *overrides)
    assert [finding.severity for finding in said] == [WARNING] * same
    assert all("the same batches" in finding.what for finding in said)


def test_shar_is_shuffled_in_any_case(tmp_path: Path) -> None:
    shar = (
        "+model.train_ds.shar_path=x",
        "+model.train_ds.shuffle=false",
        "model.train_ds.shard_seed=trng",
    )
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


ALWAYS_STREAMS = [
    "{type: txt, paths: x}",
    "{type: txt_jsonl, paths: x}",
    "{type: txt_pair, source_paths: x, target_paths: x}",
    "{type: nemo_sft_jsonl, paths: x}",
    "{type: multimodal_conversation, manifest_filepath: x}",
    "{type: share_gpt, manifest_filepath: x}",
    "{type: share_gpt_webdataset, data_dir: x}",
    "{type: parquet, manifest_filepath: x}",
    "{type: lhotse_as_conversation, shar_path: x}",
    "{type: lhotse_as_conversation, input_cfg: [{type: txt, paths: x}]}",
    (
        "{type: group, input_cfg: [{type: group, input_cfg: [{type: parquet,"
        " manifest_filepath: [x, y]}]}]}"
    ),
]


def of(entries: str, seed: object, text: str = LHOTSE) -> tuple[str, ...]:
    return (
        text,
        f"+model.train_ds.input_cfg=[{entries}]",
        f"model.train_ds.shard_seed={seed}",
    )


@pytest.mark.parametrize("entry", ALWAYS_STREAMS)
def test_nemos_types_that_are_streams_without_tar_files(
    tmp_path: Path, entry: str
) -> None:
    (finding,) = found(tmp_path, "NP122", *of(entry, 42))
    assert "all train on the same batches" in finding.what
    assert (
        "shard_seed: trng" in finding.instead and "whole number" not in finding.instead
    )
    for right in ("trng", "randomized"):
        assert found(tmp_path, "NP122", *of(entry, right)) == []
    assert (
        found(tmp_path, "NP122", *of(entry, "trng"), "+model.train_ds.shuffle=false")
        != []
        or "shar" in entry
    )
    shared = (
        "+model.train_ds.force_map_dataset=true",
        "+model.train_ds.force_finite=true",
    )
    assert found(tmp_path, "NP122", *of(entry, 42), *shared) == []
    (finding,) = found(tmp_path, "NP122", *of(entry, "trng"), *shared)
    assert "others never" in finding.what


@pytest.mark.parametrize(
    "entries",
    [
        "{type: my_own, manifest_filepath: x}",
        "{type: my_own, manifest_filepath: x, tarred_audio_filepaths: x}",
        "{type: my_own}, {type: txt, paths: x}",
        "{type: group, input_cfg: x.yaml}",
        "{type: group, input_cfg: [{type: group, input_cfg: '???'}]}",
        "{manifest_filepath: x}",
        "{type: '???', manifest_filepath: x}",
        "'???'",
        "7",
        "{type: nemo, manifest_filepath: x, tarred_audio_filepaths: '???'}",
        "{type: lhotse, cuts_path: x, shar_path: '???'}",
        "{type: multi_speaker_simulator, manifest_filepath: x}",
        "{type: multi_speaker_simulator, manifest_filepath: x, is_tarred: true}",
    ],
)
@pytest.mark.parametrize("seed", [42, "trng", "randomized"])
def test_what_is_not_known_is_not_judged(
    tmp_path: Path, entries: str, seed: object
) -> None:
    (finding,) = found(tmp_path, "NP122", *of(entries, seed))
    assert finding.severity is NOTE
    assert "model.train_ds.input_cfg" in finding.what
    assert finding.instead == ""


@pytest.mark.parametrize("seed", [42, "trng"])
def test_a_file_of_inputs_and_switches_that_are_not_known_are_not_judged(
    tmp_path: Path, seed: object
) -> None:
    for override in (
        "+model.train_ds.input_cfg='???'",
        "+model.train_ds.input_cfg=[]",
        "+model.train_ds.force_map_dataset='???'",
        "+model.train_ds.force_iterable_dataset='???'",
        "+model.train_ds={force_map_dataset: true, force_iterable_dataset: true}",
        "+model.train_ds.tarred_audio_filepaths='???'",
    ):
        (finding,) = found(
            tmp_path, "NP122", LHOTSE, f"model.train_ds.shard_seed={seed}", override
        )
        assert finding.severity is NOTE and finding.instead == ""
    assert (
        found(
            tmp_path,
            "NP122",
            LHOTSE,
            f"model.train_ds.shard_seed={seed}",
            "+model.train_ds.input_cfg=x.yaml",
        )
        == []
    )
    # Says it.
    assert found(tmp_path, "NP005", LHOTSE, "+model.train_ds.input_cfg=x.yaml")


def test_a_path_with_an_interpolation_in_it_is_given_whatever_that_is(
    tmp_path: Path,
) -> None:
    text = LHOTSE.replace(
        "shard_seed: 0",
        "shard_seed: 0\n    tarred_audio_filepaths: ${oc.env:DATA}/audio.tar",
    )
    assert "all train on the same batches" in found(tmp_path, "NP122", text)[0].what
    (finding,) = found(tmp_path, "NP122", text.replace("/audio.tar", ""))
    assert finding.severity is NOTE


def test_the_seed_of_an_entry_is_the_one_that_counts_for_it(tmp_path: Path) -> None:
    shar = "{type: lhotse_shar, shar_path: x, shard_seed: %s}"
    once = "+model.train_ds.force_map_dataset=true", "+model.train_ds.force_finite=true"
    (finding,) = found(tmp_path, "NP122", *of(shar % "trng", 42), *once)
    assert finding.instead.startswith("model.train_ds.input_cfg.0.")
    assert found(tmp_path, "NP122", *of(shar % "trng", 42)) == []
    # The sampler's order is each rank's own.
    assert found(tmp_path, "NP122", *of(shar % 42, "trng")) == []
    (finding,) = found(
        tmp_path, "NP122", *of(shar % 42, "trng"), "+model.train_ds.shuffle=false"
    )
    assert finding.instead.endswith("input_cfg.0.shard_seed")


def test_shar_is_shuffled_in_evaluation_too(tmp_path: Path) -> None:
    text = (
        "data: {validation_ds: {datasets: {one: {shar_path: x}}}}\ntrainer: {devices:"
        " 2}\n"
    )
    (finding,) = found(tmp_path, "NP122", text)
    assert "data.validation_ds.shard_seed" in finding.instead
    assert found(tmp_path, "NP122", text, "+data.validation_ds.shard_seed=0") == []
