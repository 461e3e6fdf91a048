"""NP113: strategy auto."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, NOTE, found

from nemo_patches.tools.doctor.finding import Change

pytestmark = pytest.mark.one_nemo


@pytest.mark.parametrize("override", ["trainer.strategy=auto", "~trainer.strategy"])
def test_auto_or_none_on_several_ranks(tmp_path: Path, override: str) -> None:
    (finding,) = found(tmp_path, "NP113", NEST, override)
    assert finding.severity is NOTE
    assert finding.change == Change(("trainer", "strategy"), "ddp")


def test_no_safe_change_where_there_may_be_one_device(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP113", NEST, "trainer.strategy=auto", "trainer.devices=-1")
    assert finding.change is None


def test_none_otherwise(tmp_path: Path) -> None:
    assert found(tmp_path, "NP113", NEST) == []
    assert found(tmp_path, "NP113", NEST, "trainer.strategy=auto", "trainer.devices=1") == []
    assert found(tmp_path, "NP113", NEST, "~trainer.devices", "trainer.strategy=auto", "trainer.accelerator=cpu") == []
