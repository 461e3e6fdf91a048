"""An interpolation refers to a key that the config does not have, or back to itself.

The job stops as soon as it reads that value. Until it is fixed, no rule knows what the value is.
Link: https://omegaconf.readthedocs.io/en/latest/usage.html#variable-interpolation
"""

from __future__ import annotations

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.finding import Findings, warning
from nemo_patches.tools.doctor.job import Job

BAD = """\
trainer:
  max_steps: ${model.steps}
model: {}
"""
GOOD = BAD.replace("{}", "{steps: 1000}")


def check(job: Job) -> Findings:
    """In a whole config only: a part of one, as Hydra composes them, may lead outside."""
    if "trainer" not in job.config.tree:
        return
    by_reason: dict[str, list[Value]] = {}
    for keys, reason in job.config.broken.items():
        by_reason.setdefault(reason, []).append(job.get(keys))
    for reason, values in by_reason.items():
        others = f" (and {len(values) - 1} more)" if len(values) > 1 else ""
        what = f"{values[0].key}{others}: {reason}"
        yield warning(what, tuple(values[:5]), "an existing key, or the value itself")
