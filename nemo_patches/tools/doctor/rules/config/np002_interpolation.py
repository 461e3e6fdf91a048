"""An interpolation refers to a key that the config does not have, or back to itself.

The job stops as soon as it reads that value. Until it is fixed, no rule knows what the value is.
Link: https://omegaconf.readthedocs.io/en/latest/usage.html#variable-interpolation
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.job import Job

WORST = Severity.WARNING
BAD = """\
trainer:
  max_steps: ${model.steps}
model: {}
"""
GOOD = """\
trainer:
  max_steps: ${model.steps}
model: {steps: 1000}
"""


def check(job: Job) -> Iterator[Finding]:
    """In a whole config only: a part of one, as Hydra composes them, may lead outside."""
    if "trainer" not in job.config.tree:
        return
    by_reason: dict[str, list[Value]] = {}
    for keys, reason in job.config.broken.items():
        by_reason.setdefault(reason, []).append(job.config.get(keys))
    for reason, values in by_reason.items():
        others = f" (and {len(values) - 1} more)" if len(values) > 1 else ""
        what = f"{values[0].key}{others}: {reason}"
        yield Finding(Severity.WARNING, what, tuple(values[:5]), "an existing key, or the value itself")
