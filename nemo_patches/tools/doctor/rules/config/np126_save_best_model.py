"""always_save_nemo with save_best_model:
each rank checks for the best model by itself, and may wait there alone.

At each checkpoint, a rank that finds the best model's file enters a barrier, and a rank that does
not find it goes on. Ranks differ if the metric is each rank's own, such as val_loss of
self-supervised models, because it is part of the file's name; or if rank 0 has written the file
before another rank looks. With nemo_patches all ranks follow rank 0's answer.
Link: https://github.com/NVIDIA-NeMo/Speech/issues/13739
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import Findings, warning
from nemo_patches.tools.doctor.job import Job

BAD = """\
trainer: {devices: 4}
exp_manager:
  checkpoint_callback_params: {monitor: val_loss, always_save_nemo: true, save_best_model: true}
"""
GOOD = BAD.replace("always_save_nemo: true", "always_save_nemo: false")


def check(job: Job) -> Findings:
    """Also without its own metric: then only which rank is first decides."""
    params = "exp_manager.checkpoint_callback_params"
    always = job.get(f"{params}.always_save_nemo")
    best = job.get(f"{params}.save_best_model")
    makes_one = not job.get("exp_manager.create_checkpoint_callback", True).off
    if job.several and job.trains and makes_one and always.on and best.on:
        yield warning(
            f"{job.ranks_text} each look for the best model at every checkpoint, and"
            " who finds it waits for the others",
            (always, best),
            "always_save_nemo: false (the .nemo file is made at the end), or"
            " nemo_patches with checkpoints=agreed",
        )
