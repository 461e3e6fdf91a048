"""A resume that reads a stream from its beginning: with the same seeds, the data of the previous launch again.

Up to NeMo 3.0 no checkpoint stores the position in a stream. Each launch draws its order again: with shard_seed: trng
a different one; with a whole number, or with randomized and the same seed, the same one. A job that is resumed again
and again then trains on the first part of its data, and never on the rest.
Link: https://github.com/NVIDIA-NeMo/Speech/pull/9001
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import NOTE, Findings, note
from nemo_patches.tools.doctor.job import Job

WORST = NOTE
BAD = """\
trainer: {devices: 4, use_distributed_sampler: false, limit_train_batches: 1000, max_steps: 100000}
exp_manager: {resume_if_exists: true}
model:
  train_ds: {use_lhotse: true, shar_path: a, batch_duration: 360, num_workers: 8, shard_seed: randomized}
"""
GOOD = BAD.replace("shard_seed: randomized", "shard_seed: trng")


def check(job: Job) -> Findings:
    """On one rank, too. Only where every order is known to be the same in each launch."""
    resumes = job.get("exp_manager.resume_if_exists", False)
    if resumes.value is not True:
        return
    for dataset in job.datasets:
        if not (dataset.training and dataset.endless and dataset.tarred) or dataset.inputs.unknown:
            continue
        seed, orders = dataset.get("seed", 0), [draw.seed for draw in dataset.inputs.draws]
        is_randomized = any(order.value == "randomized" for order in orders)
        if not orders or not all(order.value == "randomized" or type(order.value) is int for order in orders):
            continue
        if is_randomized and type(seed.value) is not int:
            continue
        yield note(
            f"{dataset.where} is a stream whose order is the same in every launch: a resume reads it from the "
            "beginning, and trains on the same data again",
            (*dict.fromkeys(orders), *((seed,) if is_randomized else ()), resumes),
            f"{dataset.shard_seed.key}: trng, or another {seed.key} for each launch",
        )
