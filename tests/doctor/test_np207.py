"""NP207: the memory limit."""

from __future__ import annotations

import pytest
from machines import NOTE, WARNING, found

from nemo_patches.tools.doctor.machine import Memory

pytestmark = pytest.mark.one_nemo


def test_a_limit_is_a_note_and_one_that_is_nearly_reached_a_finding() -> None:
    assert found("NP207", memory=None) == []
    (finding,) = found("NP207", memory=Memory(64 << 30, 1 << 30))
    assert finding.severity is NOTE
    assert "a limit of 64 GiB on memory" in finding.what
    assert "killed" not in finding.what
    (finding,) = found("NP207", memory=Memory(64 << 30, 1 << 30, 3))
    assert finding.severity is NOTE
    assert "3 processes" in finding.what
    (finding,) = found("NP207", memory=Memory(64 << 30, 60 << 30))
    assert finding.severity is WARNING
