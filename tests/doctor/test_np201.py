"""NP201: the installed versions."""

from __future__ import annotations

import pytest
from machines import NOTE, VERSIONS, WARNING, environment, found

from nemo_patches.tools.status import TargetReport

pytestmark = pytest.mark.one_nemo

NEEDS = {"torch": ">=2.6.0", "lightning": "<=2.4.0,>2.2.1"}


def test_versions_that_nemo_and_we_support_are_nothing() -> None:
    assert found("NP201", needs=NEEDS) == []


def test_a_nemo_outside_the_range() -> None:
    (finding,) = found("NP201", status=environment("9.9.0"))
    assert finding.severity is WARNING
    assert "9.9.0" in finding.what
    assert found("NP201", status=environment("9.9.0"), NEMO_PATCHES_UNSUPPORTED="1") == []
    built_in = TargetReport("ConformerEncoder.update_max_seq_length", "x.py", True, "")
    assert found("NP201", status=environment("1.23.0", targets=(built_in,))) == []


def test_what_nemos_own_metadata_does_not_allow() -> None:
    old, new = found("NP201", needs=NEEDS, versions={**VERSIONS, "torch": "2.4.1", "lightning": "2.5.0"})
    assert "torch >=2.6.0" in old.what
    assert "lightning <=2.4.0,>2.2.1" in new.what
    assert [str(value) for value in old.read] == ["torch: 2.4.1 (this machine)"]
    assert found("NP201", needs=NEEDS, versions={**VERSIONS, "torch": "2.10.0a0+git"}) == []
    assert found("NP201", needs=NEEDS, versions={"torch": "2.7.0"}) == []


def test_a_machine_without_nemo_is_told_so() -> None:
    (finding,) = found("NP201", status=None, versions={"torch": "2.13.0"})
    assert finding.severity is NOTE
