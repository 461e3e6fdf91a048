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
    for dataset in job.datasets if job.has_trainer else ():
        limit = job.limit(dataset.role)
        if dataset.training or not limit.open:
            continue
        finite = dataset.get("force_finite", False)
        forced = dataset.get("force_iterable_dataset", False)
        read = (limit, dataset.get("is_tarred", False), finite)
        name = "val" if dataset.role == "validation" else "test"
        key = f"limit_{name}_batches"
        limited = f"trainer.{key}: a whole number"
        once = f"{dataset.where}.force_map_dataset: true"
        if forced.on:
            once = f"{forced.key}: false"
        once += f", and a whole number as {dataset.get('shard_seed').key}: each entry is read once"
        if dataset.endless:
            make = error if dataset.role == "validation" else warning
            yield make(
                f"Lhotse repeats {dataset.where} for ever, and {key} is no whole"
                f" number: {dataset.role} never ends",
                read,
                f"{finite.key}: true, also of its entries, {once}; or {limited}",
            )
        elif job.several and dataset.nemo and dataset.tarred:
            yield warning(
                f"{dataset.where} is a stream that ends on each of {job.ranks_text}"
                " after its own number of batches",
                read,
                f"{limited}; or a set without tar files, from one input",
            )
        elif dataset.lhotse and dataset.tarred and dataset.endless is False:
            workers = dataset.get("num_workers", 0)
            each_worker = (workers.number or 0) > 1
            if job.several or each_worker:
                readers = f"each of {job.ranks_text}"
                readers += ", and each worker," if each_worker else ""
                yield warning(
                    f"{dataset.where} is a stream: {readers} reads all of it, in its"
                    " own number of batches",
                    (*read, forced, workers),
                    once,
                )
