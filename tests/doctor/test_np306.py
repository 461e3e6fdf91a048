"""NP306: the sync and the store, as they were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_ranks import WARNING, found, ranks

pytestmark = pytest.mark.one_nemo


def test_ranks_without_a_sync() -> None:
    assert found("NP306", ranks()) == []
    (finding,) = found("NP306", ranks(measured={1: {"syncs": (), "problem": "timed out"}, 3: {"problem": "timed out"}}))
    assert finding.severity is WARNING
    assert finding.what == "no sync on ranks 1, 3: timed out"
    told = ranks()
    (finding,) = found("NP306", replace(told, measured={0: told.measured[0]}))
    assert finding.what == "ranks 1-3 did not come through the measurement"


def test_slow_syncs_and_a_slow_store() -> None:
    sync, store = found("NP306", ranks(measured={1: {"syncs": (0.1, 0.2, 0.3)}, 2: {"requests": (0.5, 0.5, 0.0)}}))
    assert sync.what == "rank 1: a sync takes up to 200 ms (median)"
    assert store.what == "rank 2: a request to the store takes up to 500 ms (median)"
