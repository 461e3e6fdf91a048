"""NP118: the preemption callback."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, NOTE, found

pytestmark = pytest.mark.one_nemo


def test_it_is_on_unless_switched_off(tmp_path: Path) -> None:
    (finding,) = found(
        tmp_path, "NP118", NEST, "~exp_manager.create_preemption_callback"
    )
    assert finding.severity is NOTE
    text = NEST.replace("create_preemption_callback: false", "exp_dir: null")
    (finding,) = found(tmp_path, "NP118", text)
    assert (
        finding.line == text[: text.index("exp_manager:")].count("\n") + 1
    )  # of the section that does not have it
    assert "NOT SET" in str(finding.read[0])


@pytest.mark.parametrize(
    "override",
    [
        "exp_manager.create_preemption_callback=false",
        "++exp_manager={create_preemption_callback: true, create_checkpoint_callback: false}",
        "~exp_manager",
    ],
)
def test_none_otherwise(tmp_path: Path, override: str) -> None:
    assert found(tmp_path, "NP118", NEST, override) == []
    assert (
        found(
            tmp_path,
            "NP118",
            NEST,
            "~exp_manager.create_preemption_callback",
            "trainer.accelerator=cpu",
        )
        == []
    )
    assert (
        found(
            tmp_path,
            "NP118",
            NEST,
            "~exp_manager.create_preemption_callback",
            "trainer.devices=1",
        )
        == []
    )
