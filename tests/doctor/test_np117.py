"""NP117: skip_nan_grad."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, NOTE, found

pytestmark = pytest.mark.one_nemo


def test_another_collective_in_every_step(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP117", NEST, "+model.skip_nan_grad=true")
    assert finding.severity is NOTE


@pytest.mark.parametrize("value", ["false", "null", "???"])
def test_none_otherwise(tmp_path: Path, value: str) -> None:
    assert found(tmp_path, "NP117", NEST, f"+model.skip_nan_grad={value}") == []
    assert (
        found(tmp_path, "NP117", NEST, "+model.skip_nan_grad=true", "trainer.devices=1")
        == []
    )
