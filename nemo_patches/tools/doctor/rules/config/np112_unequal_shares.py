"""Sets that Lightning does not distribute to the ranks, and evaluation that drops its last batch.

With use_distributed_sampler: false, only Lhotse and tar files are distributed: every rank reads all of any other set.
And drop_last in evaluation leaves entries out of the metrics.
Link: https://lightning.ai/docs/pytorch/stable/common/trainer.html#use-distributed-sampler
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import NOTE, WARNING, Finding, Findings, note
from nemo_patches.tools.doctor.job import Job

WORST = WARNING
BAD = """\
trainer: {devices: 4, use_distributed_sampler: false}
model:
  train_ds: {manifest_filepath: a.json, batch_size: 8}
"""
GOOD = BAD.replace(", use_distributed_sampler: false", "")


def check(job: Job) -> Findings:
    """Lightning's sampler gives every rank the same number of entries, so drop_last does not matter in training."""
    if not job.several:
        return
    switch = job.trainer("use_distributed_sampler", True)
    for dataset in job.datasets:
        if switch.off and dataset.nemo and dataset.tarred is False:
            yield Finding(
                WARNING if dataset.training else NOTE,
                f"{dataset.where}: each of {job.ranks_text} reads all of it, as use_distributed_sampler is false",
                (switch, dataset.get("use_lhotse", False), dataset.get("is_tarred", False)),
                "use_lhotse: true for this set, with a whole number as shard_seed"
                if any(not other.nemo and other.tarred is not True for other in job.datasets)  # NP103
                else "trainer.use_distributed_sampler: true",
            )
        drop = dataset.get("drop_last", False)
        if not dataset.training and drop.on:
            yield note(
                f"{dataset.where}: drop_last leaves up to a batch of entries on each rank out of the metrics; a set "
                "that is smaller than a batch on each rank has no batch at all",
                (drop, dataset.get("batch_size")),
                "drop_last: false",
            )
