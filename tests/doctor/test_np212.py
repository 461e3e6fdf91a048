"""NP212: NCCL's RAS."""

from __future__ import annotations

import pytest
from machines import NOTE, found

pytestmark = pytest.mark.one_nemo


def test_switched_off_or_not_there() -> None:
    (finding,) = found("NP212", NCCL_RAS_ENABLE="0")
    assert finding.severity is NOTE
    assert "ncclras cannot be asked" in finding.what
    (finding,) = found("NP212", nccl="2.21.5")
    assert "NCCL 2.21.5 has no RAS" in finding.what


def test_none_otherwise() -> None:
    assert found("NP212") == []
    for version in ("2.24", "2.27.3", "a build of our own", ""):
        assert found("NP212", nccl=version, NCCL_RAS_ENABLE="1") == []
