"""The config is composed of others by Hydra's `defaults` list, which the doctor does not follow.

What the other files say was not read, so a key counts as not set here that one of them may set.
Link: https://hydra.cc/docs/advanced/defaults_list/
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.job import Job

WORST = Severity.NOTE


def check(job: Job) -> Iterator[Finding]:
    """Any entry but `_self_`, which is this file."""
    value = job.config.get(("defaults",))
    if isinstance(value.value, list) and any(entry != "_self_" for entry in value.value):
        yield Finding(
            Severity.NOTE,
            "defaults: the files in this list were not read",
            (value,),
            "the composed config: `python train.py --cfg job > composed.yaml`, and the doctor on that",
        )
