"""fuse_loss_wer, and validation batches that ranks split into different numbers of parts.

RNNTJoint computes the word error rate once for each part of fused_batch_size, and in validation
each computation is a collective: a rank with a smaller batch runs fewer, and the others wait for
ever. No length fallback helps there.
Link: https://github.com/NVIDIA-NeMo/Speech/issues/16003
"""

from __future__ import annotations

from nemo_patches.tools.doctor.config import Section
from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.finding import ERROR, Findings, error, warning
from nemo_patches.tools.doctor.job import Job

WORST = ERROR
BAD = """\
trainer: {devices: 4, use_distributed_sampler: false}
model:
  validation_ds: {use_lhotse: true, manifest_filepath: a.json, batch_size: 16}
  joint: {fuse_loss_wer: true, fused_batch_size: 4}
"""
GOOD = BAD.replace("batch_size: 16", "batch_size: 4")


def check(job: Job) -> Findings:
    """Lightning's sampler gives all ranks batches of one size; Lhotse and tar files do not."""
    for keys, section in job.config.mappings() if job.several else ():
        if section.get("fuse_loss_wer") is True:
            joint = Section(job.config, keys)
            for dataset in job.datasets:
                if not dataset.training:
                    yield from _of(job, dataset, joint)


def _of(job: Job, dataset: Dataset, joint: Section) -> Findings:
    part = joint.get("fused_batch_size")
    if not part.number or not (dataset.lhotse or (dataset.nemo and dataset.tarred)):
        return
    size = dataset.get("batch_size")
    dynamic = dataset.dynamic if dataset.lhotse else []
    if size.number is not None and size.number <= part.number:
        # One part, whatever the others have; Lhotse takes batch_size as a limit, also with
        # batch_duration
        return
    if not size.known and not dynamic:
        return
    make = error if dataset.lhotse and dataset.role == "validation" else warning
    yield make(
        f"{dataset.where}: ranks may have batches of different sizes, in which a joint"
        f" of {part.value} at a time makes different numbers of collectives;"
        f" {dataset.role} then hangs on {job.ranks_text}",
        (joint.get("fuse_loss_wer"), part, size, *dynamic, dataset.get("use_lhotse")),
        f"{dataset.where}.batch_size no larger than fused_batch_size, or fuse_loss_wer:"
        " false",
    )
