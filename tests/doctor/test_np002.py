"""NP002: interpolations that lead nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, WARNING, found

pytestmark = pytest.mark.one_nemo


def test_a_missing_key_is_named_once_with_its_line(tmp_path: Path) -> None:
    text = NEST + "a: ${model.nope}\nb: [1, '${model.nope}']\n"
    (finding,) = found(tmp_path, "NP002", text)
    assert finding.severity is WARNING
    assert "model.nope" in finding.what
    assert finding.line == text[: text.index("a: ${")].count("\n") + 1


def test_a_circle(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP002", NEST + "a: ${b}\nb: x${a}\n")
    assert "1 more" in finding.what
    assert [value.key for value in finding.read] == ["a", "b"]


def test_none_where_they_lead_to_a_value_or_to_one_that_is_still_to_be_given(
    tmp_path: Path,
) -> None:
    text = (
        NEST
        + "a: ${model.train_ds.manifest_filepath}\nb: ${a}/x\nc: ${oc.env:HOME}\nd:"
        " ${model.encoder}\n"
    )
    assert found(tmp_path, "NP002", text) == []


def test_none_in_a_part_of_a_config(tmp_path: Path) -> None:
    assert found(tmp_path, "NP002", "dataset:\n  sample_rate: ${sample_rate}\n") == []


def test_each_missing_key_is_a_finding_of_its_own(tmp_path: Path) -> None:
    first, second = found(tmp_path, "NP002", NEST + "a: ${x}\nb: ${y}\n")
    assert [each.what[:2] for each in (first, second)] == ["a:", "b:"]
