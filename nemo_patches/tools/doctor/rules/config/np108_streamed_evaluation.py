"""Validation or test on a stream (tar files, or Shar), or on several inputs that Lhotse mixes.

Lhotse repeats these for ever, so without a limit in batches validation never ends; with
force_finite, every worker of every rank reads all of them. NeMo's own tar files end on each rank
after its own number of batches. In validation, the encoder's length sync may be the only collective
of a batch: a single extra batch on one rank hangs the job.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/asr/data/audio_to_text.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import ERROR, Findings, error, warning
from nemo_patches.tools.doctor.job import Job

WORST = ERROR
BAD = """\
trainer: {devices: 4, use_distributed_sampler: false}
model:
  validation_ds: {use_lhotse: true, shar_path: shards, batch_size: 8}
"""
GOOD = """\
trainer: {devices: 4, use_distributed_sampler: false}
model:
  validation_ds: {use_lhotse: true, shar_path: shards, batch_size: 8, force_finite: true,
    force_map_dataset: true, shard_seed: 0}
"""


def check(job: Job) -> Findings:
    """Not where the trainer's limit for that role is a whole number."""
    if not job.has_trainer:
        return
    for dataset in job.datasets:
        key = (
            "limit_val_batches"
            if dataset.role == "validation"
            else "limit_test_batches"
        )
        limit = job.limit(dataset.role)
        if dataset.training or not limit.open:
            continue
        read = (
            limit.read,
            dataset.get("is_tarred", False),
            dataset.get("force_finite", False),
        )
        forced = dataset.get("force_iterable_dataset", False)
        once = (
            f"{forced.key}: false"
            if forced.on
            else f"{dataset.where}.force_map_dataset: true"
        ) + f", and a whole number as {dataset.shard_seed.key}: each entry is read once"
        limited = f"trainer.{key}: a whole number"
        if dataset.endless:
            what = (
                f"Lhotse repeats {dataset.where} for ever, and {key} is no whole"
                f" number: {dataset.role} never ends"
            )
            make = error if dataset.role == "validation" else warning
            instead = (
                f"{dataset.key('force_finite')}: true, also of its entries, {once}; or"
                f" {limited}"
            )
            yield make(what, read, instead)
        elif job.several and dataset.nemo and dataset.tarred:
            what = (
                f"{dataset.where} is a stream that ends on each of {job.ranks_text}"
                " after its own number of batches"
            )
            instead = f"{limited}; or a set without tar files, from one input"
            yield warning(what, read, instead)
        elif dataset.lhotse and dataset.tarred and dataset.endless is False:
            workers = dataset.get("num_workers", 0)
            if job.several or (workers.number or 0) > 1:
                readers = f"each of {job.ranks_text}" + (
                    ", and each worker," if (workers.number or 0) > 1 else ""
                )
                what = (
                    f"{dataset.where} is a stream: {readers} reads all of it, in its"
                    " own number of batches"
                )
                yield warning(what, (*read, forced, workers), once)
