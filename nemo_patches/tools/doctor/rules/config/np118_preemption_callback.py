"""NeMo's preemption callback, which is on unless it is switched off.

On GPUs it broadcasts from rank 0 at the end of every training batch and waits for the result,
without a timeout: a late rank stalls the others there, too. No length fallback helps there.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/utils/callbacks/preemption.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import NOTE, Findings, note
from nemo_patches.tools.doctor.job import Job

WORST = NOTE
BAD = """\
trainer: {devices: 4}
exp_manager: {exp_dir: out}
"""
GOOD = BAD.replace("exp_dir: out", "exp_dir: out, create_preemption_callback: false")


def check(job: Job) -> Findings:
    """exp_manager makes it together with the checkpoint callback, and on GPUs only."""
    manager = job.config.tree.get("exp_manager")
    if (
        not job.several
        or not isinstance(manager, dict)
        or job.accelerator.value == "cpu"
    ):
        return
    switch = job.get("exp_manager.create_preemption_callback", True)
    checkpoints = job.get("exp_manager.create_checkpoint_callback", True)
    if switch.on and checkpoints.on:
        yield note(
            f"the preemption callback makes {job.ranks_text} wait for each other at the"
            " end of every training batch",
            (switch, checkpoints),
            "exp_manager.create_preemption_callback: false, where no scheduler preempts"
            " the job",
        )
