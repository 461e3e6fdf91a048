"""max_time: with Lightning's timer, all ranks wait for rank 0 after every training batch.

It broadcasts from rank 0 whether the time is over, without a timeout. A rank that is late, or has
one batch fewer, stalls the others there, too. No length fallback helps there.
Link: https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.callbacks.Timer.html
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import NOTE, Findings, note
from nemo_patches.tools.doctor.job import Job

WORST = NOTE
BAD = """\
trainer: {devices: 4, max_time: "00:03:50:00"}
"""
GOOD = BAD.replace(', max_time: "00:03:50:00"', "")


def check(job: Job) -> Findings:
    """exp_manager's own limit makes a timer of the same kind."""
    for value in (job.trainer("max_time"), job.get("exp_manager.max_time_per_run")):
        if job.several and value.value is not None:
            yield note(
                f"{value.key} makes {job.ranks_text} wait for each other after every"
                " training batch, for a broadcast",
                value,
                "max_steps or max_epochs, where the scheduler's own limit on time is"
                " enough",
            )
