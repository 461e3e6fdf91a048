"""NP305: clocks that differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_ranks import WARNING, found, ranks

pytestmark = pytest.mark.one_nemo


def test_a_hosts_clock_is_told_once() -> None:
    late = {"clocks": (7.0, 8.0, 9.0)}
    (finding,) = found("NP305", ranks(measured={2: late, 3: late}))
    assert finding.severity is WARNING
    assert "node1 (rank 2) is 3.0 s" in finding.what
    (finding,) = found("NP305", ranks(measured={2: {"clocks": (12.0, 13.0, 99.0)}}))
    assert "2.0 s ahead of" in finding.what


def test_what_was_not_measured_is_no_offset() -> None:
    assert found("NP305", ranks(measured={2: {"clocks": (10.9, 11.9, 12.9)}})) == []
    assert found("NP305", ranks(measured={2: {"clocks": ()}})) == []
    assert found("NP305", ranks(measured={0: {"clocks": ()}, 2: {"clocks": (1.0,)}})) == []
    assert found("NP305", replace(ranks(), measured={})) == []
