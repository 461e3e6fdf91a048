"""NP114: sync_batchnorm."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, NOTE, WARNING, found

from nemo_patches.tools.doctor.finding import Change

pytestmark = pytest.mark.one_nemo

ON = "+trainer.sync_batchnorm=true"


def test_on_the_cpu(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP114", NEST, ON, "trainer.accelerator=cpu")
    assert finding.severity is WARNING
    assert finding.change == Change(("trainer", "sync_batchnorm"), False)


def test_without_batch_normalisation(tmp_path: Path) -> None:
    (finding,) = found(
        tmp_path, "NP114", NEST, ON, "model.encoder.conv_norm_type=layer_norm", "trainer.accelerator=cpu"
    )
    assert finding.severity is NOTE
    assert "nothing to do" in finding.what


def test_convolutional_encoders_have_batch_normalisation_unless_they_say_otherwise(tmp_path: Path) -> None:
    convolutional = "model.encoder={_target_: nemo.collections.asr.modules.ConvASREncoder}"
    assert found(tmp_path, "NP114", NEST, ON, convolutional) == []
    assert len(found(tmp_path, "NP114", NEST, ON, convolutional, "+model.encoder.normalization_mode=layer")) == 1


def test_none_otherwise(tmp_path: Path) -> None:
    assert found(tmp_path, "NP114", NEST, ON) == []
    assert found(tmp_path, "NP114", NEST, "trainer.accelerator=cpu") == []
    assert found(tmp_path, "NP114", NEST, ON, "trainer.accelerator=cpu", "trainer.devices=1") == []


def test_a_transformer_has_none(tmp_path: Path) -> None:
    transformer = "model.encoder={_target_: nemo.collections.asr.modules.TransformerEncoder}"
    (finding,) = found(tmp_path, "NP114", NEST, ON, transformer)
    assert "nothing to do" in finding.what
    assert found(tmp_path, "NP114", NEST, ON, "~model.encoder") == []
    assert found(tmp_path, "NP114", NEST, ON, "model.encoder.conv_norm_type=???") == []
