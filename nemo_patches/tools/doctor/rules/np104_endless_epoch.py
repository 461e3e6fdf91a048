"""Lhotse training on a stream without limit_train_batches as a whole number.

Lhotse repeats a stream for ever and it has no length: NeMo's ASR models stop at their start, others never end an epoch,
and what happens at the end of an epoch (validation, checkpoints) never does.
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
        if dataset.training and dataset.lhotse and dataset.tarred and dataset.get("force_finite").value is not True:
            yield Finding(
                Severity.WARNING,
                f"{dataset.where} is an endless stream, and limit_train_batches is no whole number: there is no epoch",
                (limit, job.trainer("max_steps", -1), dataset.get("use_lhotse")),
                "trainer.limit_train_batches: the batches of one epoch, the same for all ranks; and max_steps",
            )
