"""Nothing limits the duration of what is trained on, in batches by duration: one rank may run out of memory alone.

One very long entry is a batch of its own, larger than any other. Its rank ends, or skips the batch, and the others
wait for it in their next collective.
Link: https://github.com/NVIDIA-NeMo/Speech/pull/15696
"""

from __future__ import annotations

import math

from nemo_patches.tools.doctor.finding import NOTE, Findings, note
from nemo_patches.tools.doctor.job import Job

WORST = NOTE
BAD = """\
trainer: {devices: 4, limit_train_batches: 1000, max_steps: 10000}
model:
  train_ds: {use_lhotse: true, shar_path: shards, batch_duration: 360}
"""
GOOD = BAD.replace("batch_duration: 360", "batch_duration: 360, max_duration: 40")


def check(job: Job) -> Findings:
    """Where Lhotse fills batches by duration."""
    for dataset in job.datasets if job.several else ():
        longest = dataset.longest()
        if dataset.training and dataset.lhotse and dataset.dynamic and longest.seconds == math.inf:
            what = f"{dataset.where}: no max_duration: a very long entry is a batch of its own, and may end one of "
            yield note(f"{what}{job.ranks_text}", (*longest.read, *dataset.dynamic), "a max_duration that fits")
