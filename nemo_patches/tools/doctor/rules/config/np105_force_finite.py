"""force_finite for training on a stream, on several ranks.

Every rank then reads its own order of the stream to its end, and those ends come after different numbers of batches:
the other ranks wait in their next collective for one that has no batch left.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/common/data/lhotse/dataloader.py
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.job import Job

WORST = Severity.ERROR
BAD = """\
trainer: {devices: 4}
model:
  train_ds: {use_lhotse: true, shar_path: shards, batch_size: 8, force_finite: true}
"""
GOOD = """\
trainer: {devices: 4, limit_train_batches: 1000}
model:
  train_ds: {use_lhotse: true, shar_path: shards, batch_size: 8}
"""


def check(job: Job) -> Iterator[Finding]:
    """What is no stream Lhotse shares out, evenly where the seed is one (NP122); a limit ends all ranks alike."""
    limit = job.limit("training")
    if not job.several or not limit.open:
        return
    for dataset in job.datasets:
        switch = dataset.get("force_finite", False)
        if dataset.training and dataset.lhotse and switch.value is True and dataset.tarred is not False:
            severity = Severity.ERROR if dataset.tarred else Severity.WARNING
            stream = "a stream" if dataset.tarred else "a stream, if its input is one,"
            yield Finding(
                severity,
                f"{dataset.where} is {stream} that ends on each of {job.ranks_text} after its own number of batches",
                (switch, limit.read, job.devices),
                "force_finite: false, with trainer.limit_train_batches as a whole number",
            )
