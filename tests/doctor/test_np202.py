"""NP202: whether NeMo would be patched."""

from __future__ import annotations

import pytest
from machines import NOTE, WARNING, environment, found

pytestmark = pytest.mark.one_nemo


def test_what_is_in_force_is_a_note() -> None:
    (finding,) = found("NP202")
    assert finding.severity is NOTE
    (finding,) = found("NP202", status=environment(chained="/vendor/sitecustomize.py"))
    assert "sitecustomize.py" in finding.what
    (finding,) = found("NP202", status=environment(auto_apply="off here"))
    assert finding.severity is NOTE
    assert "nemo_patches.apply" in finding.what
    assert found("NP202", status=None) == []


def test_every_reason_why_not_is_a_finding() -> None:
    reasons = ("ours is on PYTHONPATH, but theirs comes first", "wrapt is not installed", "NeMo 9 is not supported; x")
    findings = found("NP202", status=environment(reasons=reasons))
    assert [finding.severity for finding in findings] == [WARNING, WARNING]
    assert "theirs comes first" in findings[0].what


def test_a_misspelt_variable_is_a_finding_beside_what_is_in_force() -> None:
    sentence = "NEMO_PATCHES_TIMOUT is not a setting"
    misspelt, note = found("NP202", status=environment(misspelt=(sentence,)))
    assert (misspelt.severity, misspelt.what, note.severity) == (WARNING, sentence, NOTE)
