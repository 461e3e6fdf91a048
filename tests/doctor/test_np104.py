"""NP104: Lhotse training on an endless stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, WARNING, found

pytestmark = pytest.mark.one_nemo

STREAM = "+model.train_ds.tarred_audio_filepaths=audio.tar"


def test_a_stream_without_a_whole_number_of_batches(tmp_path: Path) -> None:
    for overrides in ((), ("+trainer.limit_train_batches=1.0",)):
        (finding,) = found(tmp_path, "NP104", LHOTSE, STREAM, *overrides)
        assert finding.severity is WARNING


def test_a_stream_named_in_input_cfg(tmp_path: Path) -> None:
    tarred = "{type: nemo_tarred, manifest_filepath: x, tarred_audio_filepaths: x}"
    given = f"+model.train_ds.input_cfg=[{{type: group, input_cfg: [{tarred}]}}]"
    assert len(found(tmp_path, "NP104", LHOTSE, given)) == 1
    for plain in ("nemo", "nemo_tarred"):  # NeMo goes by the tar files, not by the name
        without = given.replace(tarred, f"{{type: {plain}, manifest_filepath: x}}")
        assert found(tmp_path, "NP104", LHOTSE, without) == []


@pytest.mark.parametrize("value", ["100", "'???'", "100.0", "0.0", "true"])
def test_none_with_a_number_or_one_that_is_to_be_given(
    tmp_path: Path, value: str
) -> None:
    assert (
        found(
            tmp_path, "NP104", LHOTSE, STREAM, f"+trainer.limit_train_batches={value}"
        )
        == []
    )


def test_validation_by_batches_needs_no_end_of_an_epoch_but_a_stream_has_no_length(
    tmp_path: Path,
) -> None:
    mixed = "model.train_ds.manifest_filepath=[[a.json],[b.json]]"
    by_batches = "+trainer.val_check_interval=500"
    assert (
        len(found(tmp_path, "NP104", LHOTSE, mixed, "+trainer.val_check_interval=1.0"))
        == 1
    )
    assert found(tmp_path, "NP104", LHOTSE, mixed, by_batches) == []
    assert (
        found(tmp_path, "NP104", LHOTSE, mixed, "+trainer.val_check_interval=500.0")
        == []
    )
    (finding,) = found(tmp_path, "NP104", LHOTSE, STREAM, by_batches)
    assert "the job stops" in finding.what
    canary = "+model.transf_decoder={_target_: x}"
    assert found(tmp_path, "NP104", LHOTSE, STREAM, by_batches, canary) == []
    assert (
        len(
            found(
                tmp_path,
                "NP104",
                LHOTSE,
                STREAM,
                by_batches,
                canary,
                "+model.train_ds.is_tarred=true",
            )
        )
        == 1
    )
    speechlm2 = (
        "data: {train_ds: {shar_path: x}}\ntrainer: {devices: 2, val_check_interval:"
        " 500}\n"
    )
    assert found(tmp_path, "NP104", speechlm2) == []


@pytest.mark.parametrize(
    "override",
    [
        "+trainer.fast_dev_run=true",
        "+trainer.fast_dev_run=2",
        "+trainer.overfit_batches=5",
    ],
)
def test_none_where_lightning_sets_the_limit_itself(
    tmp_path: Path, override: str
) -> None:
    assert found(tmp_path, "NP104", LHOTSE, STREAM, override) == []
    assert (
        len(found(tmp_path, "NP104", LHOTSE, STREAM, "+trainer.fast_dev_run=false"))
        == 1
    )


def test_none_for_what_is_no_stream(tmp_path: Path) -> None:
    assert found(tmp_path, "NP104", LHOTSE) == []


def test_none_for_other_sets_and_loaders(tmp_path: Path) -> None:
    assert (
        found(tmp_path, "NP104", LHOTSE, STREAM.replace("train_ds", "validation_ds"))
        == []
    )
    assert (
        found(
            tmp_path,
            "NP104",
            LHOTSE,
            STREAM,
            "model.train_ds.use_lhotse=false",
            "+model.train_ds.is_tarred=true",
        )
        == []
    )
    assert found(tmp_path, "NP104", LHOTSE, STREAM, "~trainer") == []


@pytest.mark.parametrize(
    "stream",
    [
        (STREAM, "+model.train_ds.force_finite=true"),
        ("+model.train_ds.force_iterable_dataset=true",),
    ],
)
def test_a_stream_that_ends_has_no_length_either(
    tmp_path: Path, stream: tuple[str, ...]
) -> None:
    """tests/test_doctor_refused.py has the same of NeMo."""
    (finding,) = found(tmp_path, "NP104", LHOTSE, *stream)
    assert finding.what.endswith("the job stops at its start")
    asks_nobody = "+model.sortformer_modules={}"
    assert found(tmp_path, "NP104", LHOTSE, *stream, asks_nobody) == []


@pytest.mark.parametrize(
    ("override", "endless"),
    [
        ("model.train_ds.manifest_filepath=[[a.json],[b.json]]", True),
        (
            (
                "+model.train_ds.input_cfg=[{type: nemo, manifest_filepath: a},{type:"
                " nemo, manifest_filepath: b}]"
            ),
            True,
        ),
        (
            "+model.train_ds.input_cfg=[{type: lhotse_as_conversation, shar_path: a}]",
            True,
        ),
        ("+model.train_ds.input_cfg=[{type: nemo, manifest_filepath: [a, b]}]", True),
        ("+model.train_ds.input_cfg=[{type: lhotse, cuts_path: a}]", False),
        ("+model.train_ds.input_cfg=other.yaml", False),  # not to be told
    ],
)
def test_what_is_mixed_of_several_inputs_is_repeated_too(
    tmp_path: Path, override: str, endless: bool
) -> None:
    assert bool(found(tmp_path, "NP104", LHOTSE, override)) is endless


def test_types_that_are_repeated_without_tar_files_and_what_ends_them(
    tmp_path: Path,
) -> None:
    def said(entry: str, *overrides: str) -> int:
        return len(
            found(
                tmp_path,
                "NP104",
                LHOTSE,
                "+model.transf_decoder={_target_: x}",  # which asks for no length
                f"+model.train_ds.input_cfg=[{entry}]",
                *overrides,
            )
        )

    finite, forced = (
        "+model.train_ds.force_finite=true",
        "+model.train_ds.force_map_dataset=true",
    )
    assert said("{type: txt, paths: x}") == said("{type: txt, paths: x}", forced) == 1
    assert (
        said("{type: txt, paths: x}", finite)
        == said("{type: txt, paths: x, force_finite: true}")
        == 0
    )
    # The entry's own switch comes first.
    assert said("{type: txt, paths: x, force_finite: false}", finite) == 1
    assert said("{type: txt, paths: x}", "+model.train_ds.metadata_only=true") == 1
    assert (
        said("{type: lhotse, shar_path: x}", "+model.train_ds.metadata_only=true") == 0
    )
    assert said("{type: my_own, paths: x}") == 0
    beside = "+model.train_ds.cuts_path=x", "+model.train_ds.tarred_audio_filepaths=x"
    assert found(tmp_path, "NP104", LHOTSE, *beside) == []  # NeMo reads the cuts


@pytest.mark.parametrize(
    "model",
    [
        "transf_decoder={}",
        "initialize_prompt_feature=true",
        "model_defaults={initialize_prompt_feature: true}",
        "model_defaults={prompt_dictionary: {en-US: 0}}",
    ],
)
def test_models_that_go_by_is_tarred_ask_any_set_of_lhotse(
    tmp_path: Path, model: str
) -> None:
    given = (f"+model.{model}", "+model.train_ds.is_tarred=true")
    (finding,) = found(tmp_path, "NP104", LHOTSE, *given, "trainer.devices=1")
    assert "has is_tarred" in finding.what
    assert (
        found(tmp_path, "NP104", LHOTSE, *given, "+trainer.limit_train_batches=100")
        == []
    )
    assert found(tmp_path, "NP104", LHOTSE, given[0]) == []
    # Other models go by the loader.
    assert found(tmp_path, "NP104", LHOTSE, given[1]) == []
