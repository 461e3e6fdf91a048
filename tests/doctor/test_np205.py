"""NP205: /dev/shm."""

from __future__ import annotations

import pytest
from machines import WARNING, found

pytestmark = pytest.mark.one_nemo


def test_little_room_is_a_finding() -> None:
    (finding,) = found("NP205", shared_memory=64 << 20)
    assert finding.severity is WARNING
    assert finding.what.startswith("64 MiB are free in /dev/shm")
    assert found("NP205", shared_memory=1 << 30) == []
    assert found("NP205", shared_memory=None) == []
