"""bucketing_strategy: fully_randomized, with tar files in several buckets.

Each rank then draws its buckets by itself: in the same step one rank has short inputs and another long ones, so all
wait for the slowest in every step.
Link: https://github.com/NVIDIA-NeMo/Speech/pull/4348
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import NOTE, WARNING, Finding, Findings
from nemo_patches.tools.doctor.job import Job

WORST = WARNING
BAD = """\
trainer: {devices: 4}
model:
  train_ds:
    is_tarred: true
    tarred_audio_filepaths: [['short_{0..3}.tar'], ['long_{0..3}.tar']]
    bucketing_strategy: fully_randomized
"""
GOOD = BAD.replace("bucketing_strategy: fully_randomized", "bucketing_strategy: synced_randomized")


def check(job: Job) -> Findings:
    """The strategy is only used where there are several buckets; batch sizes differ, too, with bucketing_batch_size."""
    if not job.several:
        return
    for dataset in job.datasets:
        files, strategy = dataset.get("tarred_audio_filepaths"), dataset.get("bucketing_strategy", "synced_randomized")
        buckets = isinstance(files.value, list) and len(files.value) > 1 and isinstance(files.value[0], list)
        if not dataset.nemo or not dataset.tarred or not buckets or strategy.value != "fully_randomized":
            continue
        sizes = dataset.get("bucketing_batch_size")
        other = ", and other batch sizes" if sizes.value is not None else ""
        what = f"{dataset.where}: in one step ranks have inputs of different buckets{other}, and wait for the slowest"
        instead = "bucketing_strategy: synced_randomized"
        yield Finding(WARNING if other else NOTE, what, (strategy, sizes, files), instead)
