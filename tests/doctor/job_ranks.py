"""What a job's ranks publish, described by hand for the doctor's tests, and what one rule finds in
it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from nemo_patches.tools.doctor import examination
from nemo_patches.tools.doctor.finding import RuleFinding, Severity
from nemo_patches.tools.doctor.ranks import Facts, Ranks

NOTE, WARNING, ERROR = Severity.NOTE, Severity.WARNING, Severity.ERROR

Changes = dict[int, dict[str, Any]]


def ranks(facts: Changes | None = None, size: int = 4) -> Ranks:
    """Four ranks on two hosts with which all is well, but for the changes by rank."""

    def of(rank: int) -> Facts:
        well: dict[str, Any] = {
            "rank": rank,
            "host": f"node{rank // 2}",
            "pid": 100 + rank,
            "versions": {"nemo": "3.0.0", "torch": "2.13.0"},
            "settings": {"timeout": "10"},
            "environment": {"NCCL_ALGO": "Ring"},
        }
        return Facts(**{**well, **(facts or {}).get(rank, {})})

    return Ranks(size, timedelta(seconds=10), {rank: of(rank) for rank in range(size)})


def found(rule: str, told: Ranks) -> list[RuleFinding]:
    """What one rule finds; the others must not fail, either."""
    done = examination.checked(told, examination.chosen(), "ranks")
    assert not [finding for checked, finding in done if checked.identifier == "NP001"]
    return [finding for checked, finding in done if checked.identifier == rule]
