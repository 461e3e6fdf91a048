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
    assert "on ranks 1, 3" in finding.what
    told = ranks()
    (finding,) = found("NP306", replace(told, measured={0: told.measured[0]}))
    assert "ranks 1-3 did not" in finding.what


def test_slow_syncs_and_a_slow_store() -> None:
    sync, store = found("NP306", ranks(measured={1: {"syncs": (0.1, 0.2, 0.3)}, 2: {"requests": (0.5, 0.5, 0.0)}}))
    assert sync.what.startswith("rank 1: ")
    assert "200 ms" in sync.what
    assert store.what.startswith("rank 2: ")
    assert "500 ms" in store.what
