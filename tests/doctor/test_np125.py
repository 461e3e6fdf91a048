"""NP125: a set of which nothing is left; what drop_last leaves was measured with NeMo's and
Lightning's samplers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NEST, WARNING, found

pytestmark = pytest.mark.one_nemo


@pytest.mark.parametrize("seconds", ["-1", "-1.0", "0", "-40"])
def test_a_limit_that_no_entry_meets(tmp_path: Path, seconds: str) -> None:
    for text in (NEST, LHOTSE):
        (finding,) = found(
            tmp_path,
            "NP125",
            text,
            f"model.train_ds.max_duration={seconds}",
            "trainer.devices=1",
        )
        assert finding.severity is WARNING
    (finding,) = found(tmp_path, "NP125", NEST, "+model.train_ds.min_duration=41")
    assert "41 s and at most 40.0 s" in finding.what


def test_padding_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP125", LHOTSE, "+model.train_ds.pad_min_duration=41")
    assert "model.train_ds" in finding.what
    for override in (
        "+model.train_ds.pad_min_duration=40",
        "+model.train_ds.pad_min_duration='???'",
    ):
        assert found(tmp_path, "NP125", LHOTSE, override) == []
    # Not read there.
    assert found(tmp_path, "NP125", NEST, "+model.train_ds.pad_min_duration=41") == []


def test_none_for_limits_that_leave_something(tmp_path: Path) -> None:
    assert found(tmp_path, "NP125", NEST) == []
    for override in (
        "+model.train_ds.min_duration=40",
        "model.train_ds.max_duration=null",
    ):
        assert found(tmp_path, "NP125", NEST, override) == []
    assert found(tmp_path, "NP125", NEST, "model.train_ds.max_duration='???'") == []
