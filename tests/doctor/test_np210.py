"""NP210: what watches NCCL's watchdog."""

from __future__ import annotations

import pytest
from machines import NOTE, WARNING, found

pytestmark = pytest.mark.one_nemo


def test_switched_off_no_number_or_very_long() -> None:
    assert found("NP210") == []
    assert (
        found(
            "NP210",
            TORCH_NCCL_ENABLE_MONITORING="1",
            TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="1800",
        )
        == []
    )
    (finding,) = found("NP210", TORCH_NCCL_ENABLE_MONITORING="0")
    assert finding.severity is WARNING
    (finding,) = found("NP210", TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="10m")
    assert finding.severity is WARNING
    assert "is no number of seconds" in finding.what
    (finding,) = found("NP210", TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="36000")
    assert finding.severity is NOTE
    assert finding.what.endswith("after 10 h")
