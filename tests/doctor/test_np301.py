"""NP301: a rank that does not answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_ranks import ERROR, found, ranks

pytestmark = pytest.mark.one_nemo


def test_missing_ranks_are_named() -> None:
    assert found("NP301", ranks()) == []
    told = ranks()
    told = replace(told, facts={0: told.facts[0], 2: told.facts[2]})
    (finding,) = found("NP301", told)
    assert finding.severity is ERROR
    assert "ranks 1, 3 of 4" in finding.what
