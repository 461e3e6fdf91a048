"""An interpolation leads to a key that the config does not have, or back to itself.

The job stops as soon as it reads that value, and until it is mended no rule can tell what the value is.
Link: https://omegaconf.readthedocs.io/en/latest/usage.html#variable-interpolation
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.job import Job

WORST = Severity.WARNING


def check(job: Job) -> Iterator[Finding]:
    """In a whole config only: a part of one, as Hydra composes them, may lead outside."""
    if "trainer" not in job.config.tree:
        return
    for keys, reason in job.config.broken.items():
        value = job.config.get(keys)
        yield Finding(Severity.WARNING, f"{value.key}: {reason}", (value,), "an existing key, or the value itself")
