"""A rule of the doctor itself failed on this config.

The rule could not check this config. Please report it, with the config.
Link: docs/doctor.md
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.job import Job

WORST = Severity.WARNING


def check(job: Job) -> Iterator[Finding]:
    """Nothing to look for: the run itself reports a rule that raises."""
    return iter(())
