"""NP303: settings that differ."""

from __future__ import annotations

import pytest
from job_ranks import WARNING, found, ranks

pytestmark = pytest.mark.one_nemo


def test_our_settings_and_the_variables() -> None:
    assert found("NP303", ranks()) == []
    ours, ncll = found(
        "NP303",
        ranks(
            {3: {"settings": {"timeout": "5"}, "environment": {"NCCL_ALGO": "Tree"}}}
        ),
    )
    assert ours.severity is ncll.severity is WARNING
    assert "5 on rank 3 (node1), 10 on ranks 0-2" in ours.what
    assert "Tree on rank 3 (node1), Ring on" in ncll.what
    (unset,) = found("NP303", ranks({0: {"environment": {}}}))
    assert "not set on rank 0 (node0), Ring on" in unset.what
