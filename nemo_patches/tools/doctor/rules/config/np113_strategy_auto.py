"""strategy: auto, or none, for several devices.

Lightning then uses plain ddp: buffers are broadcast, and a model with parameters that a step does not use stops with
an error. What NP101 and NP102 say about ddp applies.
Link: https://lightning.ai/docs/pytorch/stable/extensions/strategy.html
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import NOTE, Change, Findings, note
from nemo_patches.tools.doctor.job import Job

WORST = NOTE
BAD = """\
trainer: {devices: 4}
"""
GOOD = BAD.replace("devices: 4", "devices: 4, strategy: ddp")


def check(job: Job) -> Findings:
    """The change is only offered where the config says that there are several."""
    if job.several and job.strategy.value == "auto":
        yield note(
            f"strategy auto on {job.ranks_text} is ddp",
            (job.strategy, job.devices, job.nodes),
            "strategy: ddp, so that the config says it",
            Change(("trainer", "strategy"), "ddp") if job.ranks else None,
        )
