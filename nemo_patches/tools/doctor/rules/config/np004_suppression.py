"""A suppression that has no reason, names no rule, or suppresses nothing any more.

`# nemo-patches: ignore[NP107] shards are equal` at the end of a line, or alone above it, holds for the findings on that
line. What nobody can explain, or nobody needs, would hide the next finding there.
Link: docs/doctor.md
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.job import Job

WORST = Severity.WARNING


def check(job: Job) -> Iterator[Finding]:
    """Nothing to look for: suppressions.py, which knows what the other rules found, reports it."""
    return iter(())
