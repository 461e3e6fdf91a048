"""NP101: the effective sync_max_audio_length of every encoder."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, NOTE, WARNING, found

pytestmark = pytest.mark.one_nemo

NESTED = """\
model:
  pre_encoder:
    _target_: nemo.collections.asr.modules.ConformerEncoder
    sync_max_audio_length: false
  perception:
    encoder:
      _target_: nemo.collections.asr.modules.conformer_encoder.ConformerEncoder
      sync_max_audio_length: true
  teacher:
    deep:
      - _target_: nemo.collections.asr.modules.SqueezeformerEncoder
  encoder:
    _target_: nemo.collections.asr.modules.ConvASREncoder
  transformer:
    _target_: nemo.collections.asr.modules.TransformerEncoder
  namesake:
    _target_: nemo.collections.asr.modules.transformer.transformer_encoders.TransformerEncoder
trainer:
  devices: 2
"""


def test_not_set_is_the_default_on(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP101", NEST)
    assert finding.severity is NOTE
    assert "NOT SET" in finding.what
    assert "4 ranks" in finding.what
    assert "30 min" in finding.what
    assert any("NOT SET" in str(value) for value in finding.read)
    assert (
        finding.line
        == NEST[: NEST.index("_target_: nemo.collections.asr.modules.Conf")].count("\n")
        + 1
    )


def test_every_encoder_however_deep(tmp_path: Path) -> None:
    said = [
        finding.what.split(";")[0].split(",")[0]
        for finding in found(tmp_path, "NP101", NESTED)
    ]
    assert sorted(said) == [
        "model.encoder (ConvASREncoder): no switch",
        "model.perception.encoder (ConformerEncoder): on",
        "model.pre_encoder (ConformerEncoder): off",
        "model.teacher.deep.0 (SqueezeformerEncoder): no switch",
        "model.transformer (TransformerEncoder): on",
    ]


def test_the_process_groups_timeout_where_the_config_has_it(tmp_path: Path) -> None:
    timeout = "timeout:{_target_:datetime.timedelta,hours:2}"
    strategy = f"trainer.strategy={{_target_:lightning.pytorch.strategies.DDPStrategy,{timeout}}}"
    (finding,) = found(tmp_path, "NP101", NEST, strategy)
    assert "(120 min)" in finding.what


@pytest.mark.parametrize("value", ["'false'", "null", "0"])
def test_what_is_no_switch(tmp_path: Path, value: str) -> None:
    first, _ = found(
        tmp_path, "NP101", NEST, f"+model.encoder.sync_max_audio_length={value}"
    )
    assert first.severity is WARNING
    assert f"Python takes it as {'true' if 'false' in value else 'false'}" in first.what


def test_a_class_that_does_not_take_it(tmp_path: Path) -> None:
    target = "model.encoder._target_=nemo.collections.asr.modules.ConvASREncoder"
    first, _ = found(
        tmp_path, "NP101", NEST, target, "+model.encoder.sync_max_audio_length=false"
    )
    assert first.severity is WARNING


def test_encoders_from_checkpoints_and_of_other_classes_are_named(
    tmp_path: Path,
) -> None:
    text = (
        "init_from_pretrained_model: nvidia/some\nmodel: {pretrained_asr:"
        " some}\ntrainer: {devices: 2}\n"
    )
    findings = found(tmp_path, "NP101", text)
    said = " ".join(finding.what for finding in findings)
    assert "init_from_pretrained_model" in said
    assert "model.pretrained_asr" in said
    # Most jobs begin so, and theirs is the same hang
    assert all("nemo-patches run -- COMMAND" in each.instead for each in findings)
    text = "model: {encoder: {_target_: mine.Encoder}}\ntrainer: {devices: 2}\n"
    (finding,) = found(tmp_path, "NP101", text)
    assert "model.encoder._target_" in finding.what


@pytest.mark.parametrize(
    "override", ["trainer.devices=1", "trainer.devices=[3]", "~trainer"]
)
def test_nothing_where_there_is_one_rank_or_no_trainer(
    tmp_path: Path, override: str
) -> None:
    assert found(tmp_path, "NP101", NEST, override) == []


def test_a_flag_that_is_given_is_not_said_to_be_not_set(tmp_path: Path) -> None:
    (finding,) = found(
        tmp_path, "NP101", NEST, "+model.encoder.sync_max_audio_length=true"
    )
    assert "NOT SET" not in finding.what
    squeezeformer = (
        "model.encoder._target_=nemo.collections.asr.modules.SqueezeformerEncoder"
    )
    (finding,) = found(tmp_path, "NP101", NEST, squeezeformer)
    (finding,) = found(
        tmp_path, "NP101", NEST, "+model.encoder.sync_max_audio_length=???"
    )
    assert finding.severity is NOTE


def test_none_for_checkpoints_and_models_that_are_not_there(tmp_path: Path) -> None:
    assert (
        found(
            tmp_path,
            "NP101",
            "init_from_nemo_model: null\nmodel: {a: 1}\ntrainer: {devices: 2}\n",
        )
        == []
    )
