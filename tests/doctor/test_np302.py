"""NP302: versions that differ."""

from __future__ import annotations

import pytest
from job_ranks import WARNING, found, ranks

pytestmark = pytest.mark.one_nemo


def test_who_has_which_is_told() -> None:
    assert found("NP302", ranks()) == []
    nemo, torch = found(
        "NP302",
        ranks(
            {
                2: {"versions": {"nemo": "2.7.3", "torch": "2.13.0"}},
                3: {"versions": {"nemo": "3.0.0"}},
            }
        ),
    )
    assert nemo.severity is WARNING
    assert "2.7.3 on rank 2 (node1), 3.0.0 on" in nemo.what
    assert "not set on rank 3 (node1), 2.13.0 on" in torch.what


def test_what_a_rank_tells_cannot_steer_the_terminal() -> None:
    (finding,) = found(
        "NP302",
        ranks({1: {"versions": {"nemo": "3.0.0", "torch": "\x1b[2J" + "x" * 5000}}}),
    )
    assert "\x1b" not in finding.what
    assert len(finding.what) < 1000
