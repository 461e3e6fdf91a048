"""NP307: the ranks' devices."""

from __future__ import annotations

import pytest
from job_ranks import ERROR, WARNING, found, ranks

pytestmark = pytest.mark.one_nemo


def test_one_gpu_for_two_ranks() -> None:
    assert found("NP307", ranks()) == []
    (finding,) = found("NP307", ranks({1: {"device": "cuda:0 H200", "device_id": "node0-0"}}))
    assert finding.severity is ERROR
    assert "ranks 0-1 have the same GPU" in finding.what
    cpu = {"device": "CPU", "device_id": ""}
    assert found("NP307", ranks(dict.fromkeys(range(4), cpu))) == []


def test_different_devices() -> None:
    (finding,) = found("NP307", ranks({3: {"device": "no GPU of its own: 1 on this host", "device_id": ""}}))
    assert finding.severity is WARNING
    assert finding.what.startswith("the device differs: ")
