"""Validation or test on a stream (tar files, or Shar), or on several inputs that Lhotse mixes.

Lhotse repeats those for ever, so without a limit in batches validation never ends. NeMo's own tar files end on each
rank after its own number of batches, and in validation the encoder's length sync may be the only collective of a
batch: one batch more on one rank, and the job is lost.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/asr/data/audio_to_text.py
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.job import Job

WORST = Severity.ERROR


def check(job: Job) -> Iterator[Finding]:
    """Not where the trainer's limit for that role is a whole number."""
    if not job.has_trainer:
        return
    for dataset in job.datasets:
        key = "limit_val_batches" if dataset.role == "validation" else "limit_test_batches"
        limit = job.trainer(key, 1.0)
        if dataset.training or not limit.known or isinstance(limit.value, int):
            continue
        read = (limit, dataset.get("is_tarred", False), dataset.get("force_finite", False))
        instead = f"trainer.{key}: a whole number; or a set without tar files, from one input"
        if dataset.endless:
            what = f"Lhotse repeats {dataset.where} for ever, and {key} is no whole number: {dataset.role} never ends"
            yield Finding(Severity.ERROR if dataset.role == "validation" else Severity.WARNING, what, read, instead)
        elif job.several and dataset.nemo and dataset.tarred:
            what = f"{dataset.where} is a stream that ends on each of {job.ranks_text} after its own number of batches"
            yield Finding(Severity.WARNING, what, read, instead)
