"""Machines for the doctor's tests, described by hand, and what one rule finds on them."""

from __future__ import annotations

from typing import Any

from nemo_patches.tools.doctor import examination
from nemo_patches.tools.doctor.finding import RuleFinding, Severity
from nemo_patches.tools.doctor.machine import Machine

NOTE, WARNING, ERROR = Severity.NOTE, Severity.WARNING, Severity.ERROR


def machine(torch: str = "2.13.0+cu130", gpus: int = 0, **environment: str) -> Machine:
    """A machine on which all is well, with changes."""
    return Machine(torch=torch, gpus=gpus, environment=environment)


def found(rule: str, **facts: Any) -> list[RuleFinding]:
    """What one rule finds; the others must not fail, either."""
    done = examination.checked(machine(**facts), examination.chosen(), "machine")
    assert not [finding for checked, finding in done if checked.identifier == "NP001"]
    return [finding for checked, finding in done if checked.identifier == rule]
