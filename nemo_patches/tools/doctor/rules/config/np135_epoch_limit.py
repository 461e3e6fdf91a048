"""limit_train_batches above the batches that each rank has: validation never runs.

Lhotse shares a set out, so each rank has the batches of all ranks divided by their number.
Lightning cannot know that, as Lhotse's set has no length, and validates only after
limit_train_batches, which an epoch then never reaches.
Link: https://github.com/NVIDIA-NeMo/Speech/issues/14390
"""

from __future__ import annotations

from math import ceil

from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.finding import Findings, note, warning
from nemo_patches.tools.doctor.job import Job

BAD = """\
trainer: {devices: 4, use_distributed_sampler: false, limit_train_batches: 7179}
model:
  train_ds: {use_lhotse: true, cuts_path: a.jsonl.gz, batch_size: 8, shard_seed: 0}
  validation_ds: {use_lhotse: true, cuts_path: b.jsonl.gz, batch_size: 8, shard_seed: 0}
"""
GOOD = BAD.replace(", limit_train_batches: 7179", "")


def check(job: Job) -> Findings:
    """A note where the entries cannot be counted on this machine; not of what is repeated for
    ever.
    """
    limit = job.limit("training")
    interval = job.trainer("val_check_interval", 1.0)
    share = interval.batches
    validates = any(dataset.role == "validation" for dataset in job.datasets)
    if not job.several or not validates or not isinstance(limit.batches, int):
        return
    # Not overfit_batches or fast_dev_run
    own = limit.key == "trainer.limit_train_batches"
    if not own or job.limit("validation").batches == 0:
        return
    if not share or not job.trainer("check_val_every_n_epoch", 1).value:
        return
    batches = share if isinstance(share, int) else int(limit.batches * share)
    for dataset in job.training_of_lhotse if batches else ():
        if dataset.tarred is not False or dataset.endless is not False:
            continue
        has = _batches(job, dataset, batches)
        make = note if has is None else warning
        never = f"as a rank's share of {dataset.where} has {has}"
        if has is None:
            never = f"if the share of {dataset.where} that a rank has is smaller"
        elif has >= batches:
            continue
        yield make(
            f"validation comes after {batches} batches of each of {job.ranks_text}"
            f" (limit_train_batches): never, {never}",
            (limit, interval, job.devices, dataset.get("batch_size")),
            "trainer.limit_train_batches: no more than entries / batch_size / ranks, or"
            " not set",
        )


def _batches(job: Job, dataset: Dataset, at_most: int) -> int | None:
    """A rank's own number of batches, counted up to a number; None where that cannot be counted
    here.
    """
    size = dataset.get("batch_size").number
    if not size or dataset.dynamic or not job.ranks:
        return None
    entries = dataset.entries(int(at_most * size * job.ranks))
    return None if entries is None else ceil(ceil(entries / size) / job.ranks)
