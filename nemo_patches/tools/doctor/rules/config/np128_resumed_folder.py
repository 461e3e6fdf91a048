"""The monitor's name in the path of the checkpoints' folder: a resume stops.

NeMo reads a checkpoint's score after the first place where its path has the monitor's name. If that
is a folder, the score is no number, and the job stops. In dirpath a metric is never filled in, so
{val_loss} is such a name, too.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/utils/callbacks/nemo_model_checkpoint.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import Findings, warning
from nemo_patches.tools.doctor.job import Job

BAD = """\
trainer: {devices: 4}
exp_manager:
  resume_if_exists: true
  checkpoint_callback_params: {monitor: val_loss, dirpath: "out/{val_loss}"}
"""
GOOD = BAD.replace("out/{val_loss}", "out")


def check(job: Job) -> Findings:
    """On one rank, too."""
    params = "exp_manager.checkpoint_callback_params"
    folder = job.get(f"{params}.dirpath")
    monitor = job.get(f"{params}.monitor", "val_loss")
    resumes = job.get("exp_manager.resume_if_exists")
    if resumes.on and folder.named and str(monitor.value) in folder.value:
        what = (
            f"dirpath has {monitor.value} in it, behind which NeMo reads each"
            " checkpoint's score: a resume stops"
        )
        yield warning(what, (folder, monitor, resumes), "another name for the folder")
