"""Lhotse training on a stream, or on several inputs mixed, without limit_train_batches as a whole number.

Lhotse repeats those for ever: there is no end of an epoch, and what happens then (validation, checkpoints) never does.
A stream has no length, either, and there NeMo's ASR models stop at their start.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/docs/source/asr/datasets.rst
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.job import Job

WORST = Severity.WARNING


def check(job: Job) -> Iterator[Finding]:
    """On any number of ranks."""
    limit = job.trainer("limit_train_batches", 1.0)
    if not job.has_trainer or not limit.known or isinstance(limit.value, int):
        return
    for dataset in job.datasets:
        if dataset.training and dataset.endless:
            yield Finding(
                Severity.WARNING,
                f"Lhotse repeats {dataset.where} for ever, and limit_train_batches is no whole number: no epoch ends",
                (limit, job.trainer("max_steps", -1), dataset.get("use_lhotse")),
                "trainer.limit_train_batches: the batches of one epoch, the same for all ranks; and max_steps",
            )
