"""A metric in the name of a checkpoint's folder: NeMo does not read those checkpoints correctly on a resume.

In dirpath a metric is never filled in. On a resume NeMo reads a checkpoint's score after the first place where its
path has the monitor's name: if that is a folder, the job stops. In filename, a metric before a slash makes one folder
for each value. On a resume NeMo takes such a folder for a distributed checkpoint, so it no longer knows the best one.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/utils/callbacks/nemo_model_checkpoint.py
"""

from __future__ import annotations

import re

from nemo_patches.tools.doctor.finding import WARNING, Findings, warning
from nemo_patches.tools.doctor.job import Job

WORST = WARNING
BAD = """\
trainer: {devices: 4}
exp_manager:
  checkpoint_callback_params: {monitor: val_loss, filename: "{val_loss:.2f}/{epoch}"}
"""
GOOD = BAD.replace("}/{", "}-{")
_METRIC = re.compile(r"(?<!\$)\{\w[^{}]*\}")  # not an interpolation's


def check(job: Job) -> Findings:
    """On one rank, too."""
    params = ("exp_manager", "checkpoint_callback_params")
    folder, name = (job.get((*params, key)) for key in ("dirpath", "filename"))
    resumes = job.get("exp_manager.resume_if_exists", False).value is True
    monitor = job.get((*params, "monitor"), "val_loss")
    if isinstance(folder.value, str) and folder.known and (metric := _METRIC.search(folder.value)):
        what = f"{metric[0]} in dirpath is not filled in: the folder is called so"
        yield warning(what, folder, "filename, for what has a metric in its name")
    elif resumes and isinstance(folder.value, str) and folder.known and str(monitor.value) in folder.value:
        what = f"dirpath has {monitor.value} in it, behind which NeMo reads each checkpoint's score: a resume stops"
        yield warning(what, (folder, monitor), "another name for the folder")
    if isinstance(name.value, str) and name.known and (metric := _METRIC.search(name.value.rpartition("/")[0])):
        what = (
            f"{metric[0]} makes a folder for each value, and NeMo takes these for distributed checkpoints on a resume"
        )
        yield warning(what, name, "filename without a slash")
