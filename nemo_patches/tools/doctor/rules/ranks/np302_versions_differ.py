"""Versions that differ between ranks.

Ranks with different code may run different collectives, or reduce different shapes, and then wait
for each other or mix up their numbers.
Link: docs/doctor.md
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import Findings, warning
from nemo_patches.tools.doctor.ranks import Ranks, differing


def check(ranks: Ranks) -> Findings:
    """One finding for each package."""
    for name, values in differing(ranks, lambda facts: facts.versions):
        yield warning(
            f"{name} differs: {values}", (), "the same environment on every host"
        )
