"""Lhotse's own sampler under Lightning's: use_distributed_sampler is not false.

Lhotse distributes the batches to the ranks itself. Lightning would put its own sampler around
Lhotse's, which needs a length that Lhotse's does not have, and the job stops at its start.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/docs/source/asr/datasets.rst
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import Change, Findings, warning
from nemo_patches.tools.doctor.job import Job

BAD = """\
trainer: {devices: 4}
model:
  train_ds: {use_lhotse: true, manifest_filepath: a.json, batch_size: 8}
"""
GOOD = """\
trainer: {devices: 4, use_distributed_sampler: false}
model:
  train_ds: {use_lhotse: true, manifest_filepath: a.json, batch_size: 8, shard_seed: 0}
"""


def check(job: Job) -> Findings:
    """For sets that are no stream: those Lightning leaves alone."""
    switch = job.trainer("use_distributed_sampler", True)
    sampled = [each for each in job.datasets if each.lhotse and each.tarred is False]
    if not job.several or not switch.on or not sampled:
        return
    names = ", ".join(dataset.where for dataset in sampled)
    # Without Lightning's, every rank would read all of a set that is not Lhotse's; and a job that
    # stopped at its start would run with entries that are read twice, where each rank has an order
    # of its own.
    safe = all(dataset.lhotse and not dataset.own_orders for dataset in job.datasets)
    yield warning(
        f"Lhotse samples {names}, and use_distributed_sampler is on: on several ranks"
        " the job stops at its start",
        (switch, *(dataset.get("use_lhotse") for dataset in sampled)),
        "trainer.use_distributed_sampler: false, and a whole number as shard_seed"
        " (NP122)",
        change=Change(("trainer", "use_distributed_sampler"), False) if safe else None,
    )
