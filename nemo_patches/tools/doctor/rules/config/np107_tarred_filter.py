"""A limit on duration for training on tar files that are distributed to the ranks.

The limit drops different samples from each tar file, so a rank may run out of batches before the
others, which then wait for it. NeMo's own code has this warning.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/asr/data/audio_to_text.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import Findings, warning
from nemo_patches.tools.doctor.job import Job

BAD = """\
trainer: {devices: 8}
model:
  train_ds: {is_tarred: true, manifest_filepath: a.json, max_duration: 20}
"""
GOOD = BAD.replace("devices: 8", "devices: 8, limit_train_batches: 1000")


def check(job: Job) -> Findings:
    """Not where limit_train_batches says how many batches every rank has."""
    limit = job.limit("training")
    if not job.several or not limit.open:
        return
    for dataset in job.datasets:
        limits = [dataset.get(key) for key in ("max_duration", "min_duration")]
        given = [value for value in limits if value.number]
        # What the entries left are made into batches by.
        buckets = dataset.given(("bucketing_batch_size", "bucketing_strategy"))
        if dataset.training and dataset.shares_tar_files and given:
            names = " and ".join(value.key for value in given)
            yield warning(
                f"{dataset.where}: tar files are shared out to {job.ranks_text}, and"
                f" {names} may leave a rank with fewer batches than the others",
                (*given, *buckets, dataset.get("is_tarred"), limit),
                "the same limits when the tar files are made; or"
                " trainer.limit_train_batches: no more than the batches of the rank"
                " with the fewest",
            )
