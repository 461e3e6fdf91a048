"""NP114: sync_batchnorm."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, WARNING, found

from nemo_patches.tools.doctor.finding import Change

pytestmark = pytest.mark.one_nemo

ON = "+trainer.sync_batchnorm=true"


def test_on_the_cpu(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP114", NEST, ON, "trainer.accelerator=cpu")
    assert finding.severity is WARNING
    assert finding.change == Change(("trainer", "sync_batchnorm"), False)


def test_convolutional_encoders_have_batch_normalisation_unless_they_say_otherwise(
    tmp_path: Path,
) -> None:
    convolutional = (
        ON,
        "trainer.accelerator=cpu",
        "model.encoder={_target_: nemo.collections.asr.modules.ConvASREncoder}",
    )
    assert len(found(tmp_path, "NP114", NEST, *convolutional)) == 1
    assert (
        found(
            tmp_path,
            "NP114",
            NEST,
            *convolutional,
            "+model.encoder.normalization_mode=layer",
        )
        == []
    )


def test_none_otherwise(tmp_path: Path) -> None:
    assert found(tmp_path, "NP114", NEST, ON) == []
    assert found(tmp_path, "NP114", NEST, "trainer.accelerator=cpu") == []
    assert (
        found(
            tmp_path, "NP114", NEST, ON, "trainer.accelerator=cpu", "trainer.devices=1"
        )
        == []
    )


@pytest.mark.parametrize(
    "encoder",
    [
        "model.encoder={_target_: nemo.collections.asr.modules.TransformerEncoder}",
        "model.encoder.conv_norm_type=layer_norm",
        "model.encoder.conv_norm_type=???",
        "~model.encoder",
    ],
)
def test_none_without_batch_normalisation(tmp_path: Path, encoder: str) -> None:
    assert found(tmp_path, "NP114", NEST, ON, "trainer.accelerator=cpu", encoder) == []
