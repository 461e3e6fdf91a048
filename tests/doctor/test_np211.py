"""NP211: what NCCL and torch.distributed log."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from machines import NOTE, WARNING, found

pytestmark = pytest.mark.one_nemo


def test_torchs_level() -> None:
    assert found("NP211", TORCH_DISTRIBUTED_DEBUG="INFO") == []
    (finding,) = found("NP211", TORCH_DISTRIBUTED_DEBUG="detail")
    assert finding.severity is NOTE
    (finding,) = found("NP211", TORCH_DISTRIBUTED_DEBUG="VERBOSE")
    assert finding.severity is WARNING


def test_torch_does_stop_at_another_level() -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", "import torch.distributed"],
        env={**os.environ, "TORCH_DISTRIBUTED_DEBUG": "VERBOSE"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "must be OFF, INFO, or DETAIL" in done.stderr


def test_nccls_level() -> None:
    assert found("NP211") == []
    (finding,) = found("NP211", gpus=1)
    assert finding.severity is NOTE
    assert "NCCL_DEBUG=WARN" in finding.what
    assert found("NP211", gpus=1, NCCL_DEBUG="WARN") == []
    (finding,) = found("NP211", NCCL_DEBUG="TRACE")
    assert finding.severity is NOTE
