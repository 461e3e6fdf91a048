"""Versions that differ between ranks.

Ranks with different code may run different collectives, or reduce different shapes, and then wait for each other or
mix up their numbers.
Link: docs/doctor.md
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.ranks import Ranks, differing

WORST = Severity.WARNING


def check(ranks: Ranks) -> Iterator[Finding]:
    """One finding for each package."""
    for name, values in differing(ranks, lambda facts: facts.versions):
        yield Finding(Severity.WARNING, f"{name} differs: {values}", (), "the same environment on every host")
