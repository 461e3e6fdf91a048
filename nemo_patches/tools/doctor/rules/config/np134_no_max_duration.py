"""Nothing limits the duration of what is trained on, in batches by duration:
one rank may run out of memory alone.

One very long entry makes a batch far above batch_duration. Its rank ends, or skips the batch, and
the others wait for it in their next collective.
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
    """Where Lhotse fills batches by duration; in buckets of fixed sizes there is no room for a
    longer entry.
    """
    for dataset in job.training_of_lhotse if job.several else ():
        size = dataset.get("batch_duration")
        longest = dataset.longest()
        fixed = dataset.get("bucket_batch_size").value is not None
        if size.value is not None and longest.seconds == math.inf and not fixed:
            what = (
                f"{dataset.where}: no max_duration: a very long entry makes a batch far"
                f" above batch_duration, which may end one of {job.ranks_text}"
            )
            yield note(what, (*longest.read, size), "a max_duration that fits")
