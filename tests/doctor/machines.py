"""Machines for the doctor's tests, described by hand, and what one rule finds on them."""

from __future__ import annotations

from typing import Any

from nemo_patches.tools import status
from nemo_patches.tools.doctor import examination
from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.machine import Machine

NOTE, WARNING, ERROR = Severity.NOTE, Severity.WARNING, Severity.ERROR

VERSIONS = {"nemo_toolkit": "3.0.0", "torch": "2.13.0+cu130", "lightning": "2.4.0"}


def environment(nemo: str = "3.0.0", **changes: Any) -> status.EnvironmentStatus:
    """What `nemo-patches status` found."""
    facts: dict[str, Any] = {
        "versions": {"nemo": nemo, "torch": "2.13.0"},
        "settings": (),
        "targets": (),
        "auto_apply": "on",
        "chained": "",
        "reasons": (),
    }
    return status.EnvironmentStatus(**{**facts, **changes})


def machine(**facts: Any) -> Machine:
    """A machine on which all is well, with changes; variables of its environment are keywords, too."""
    variables = {name: facts.pop(name) for name in list(facts) if name.isupper()}
    well: dict[str, Any] = {"versions": VERSIONS, "status": environment(), "open_files": (1 << 20, 1 << 20)}
    return Machine(**{**well, "environment": variables, **facts})


def found(rule: str, **facts: Any) -> list[Finding]:
    """What one rule finds; the others must not fail, either."""
    done = examination.checked(machine(**facts), examination.chosen(), "machine")
    assert not [finding for checked, finding in done if checked.identifier == "NP001"]
    return [finding for checked, finding in done if checked.identifier == rule]
