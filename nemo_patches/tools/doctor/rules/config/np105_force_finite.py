"""Training on a stream that ends, on several ranks:
force_finite, or force_iterable_dataset for a non-streamed set.

Every rank then reads the whole stream, in its own order, to its end. If batches have no fixed size,
the ranks reach the end after different numbers of batches: the others wait in their next collective
for a rank that has no batch left.
Link:
https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/common/data/lhotse/dataloader.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import ERROR, Findings, error, note, warning
from nemo_patches.tools.doctor.job import Job

WORST = ERROR
BAD = """\
trainer: {devices: 4}
model:
  train_ds: {use_lhotse: true, shar_path: shards, batch_duration: 360, force_finite: true}
"""
GOOD = """\
trainer: {devices: 4, limit_train_batches: 1000}
model:
  train_ds: {use_lhotse: true, shar_path: shards, batch_duration: 360}
"""


def check(job: Job) -> Findings:
    """Lhotse distributes non-streamed sets, evenly if the seed is fixed (NP122); a limit ends all
    ranks alike.
    """
    limit = job.limit("training")
    if not job.several or not limit.open:
        return
    for dataset in job.training_of_lhotse:
        finite = dataset.get("force_finite", False)
        ends = dataset.tarred and dataset.endless is False
        if dataset.tarred is False or dataset.endless or not (finite.on or ends):
            continue  # or whether it ends is not known
        sizes = [*dataset.dynamic, dataset.get("batch_tokens")]
        dynamic = [size for size in sizes if size.value is not None]
        make = error if dataset.tarred else warning
        what = f"ends on each of {job.ranks_text} after its own number of batches"
        if not dynamic:
            make = note
            what = f"ends, and each of {job.ranks_text} reads all of it in an epoch"
        stream = "a stream" if dataset.tarred else "a stream, if its input is one,"
        read = [finite, *dynamic, limit, job.devices]
        instead = (
            "force_finite: false, also of its entries, with trainer.limit_train_batches"
            " as a whole number"
        )
        forced = dataset.get("force_iterable_dataset")
        if forced.on:
            read.insert(1, forced)
            instead = (
                "force_iterable_dataset: false, with a whole number as shard_seed,"
                " which shares it out"
            )
        yield make(f"{dataset.where} is {stream} that {what}", tuple(read), instead)
