"""A scheduler of the learning rate, without max_steps:
NeMo counts its steps by the length of the training set.

Lhotse's sets have no length, stream or not, whatever limit_train_batches is: the job stops with
"has no len()". A scheduler that is null stops it, too.
Link: https://github.com/NVIDIA-NeMo/Speech/issues/9462
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import Findings, stops
from nemo_patches.tools.doctor.job import Job

BAD = """\
trainer: {devices: 4, use_distributed_sampler: false, max_epochs: 10}
model:
  train_ds: {use_lhotse: true, manifest_filepath: a.json, batch_size: 8, shard_seed: 0}
  optim: {sched: {name: CosineAnnealing}}
"""
GOOD = BAD.replace("max_epochs: 10", "max_steps: 1000")


def check(job: Job) -> Findings:
    """On any number of ranks; fast_dev_run is a max_steps, too."""
    schedule = job.get("model.optim.sched")
    if not job.has_trainer:
        return
    if job.asr_encoder and schedule.given and schedule.value is None:
        yield stops("model.optim.sched is null", schedule, "~model.optim.sched")
    steps = job.trainer("max_steps", -1)
    fast = job.trainer("fast_dev_run", False).value
    own = job.get("model.optim.sched.max_steps").value
    unlimited = own is None and steps.number is not None and steps.number < 0
    if fast or not unlimited or not isinstance(schedule.value, dict):
        return
    if schedule.value.keys().isdisjoint(("name", "_target_")):
        return
    for dataset in job.training_of_lhotse:
        # An audio codec, which has its set in dataloader_params, counts by itself
        if dataset.keys[0] == "model" and dataset.keys[-1] != "dataloader_params":
            yield stops(
                "the scheduler's max_steps is not set, and Lhotse reads"
                f" {dataset.where}, which has no length to count it by",
                (steps, schedule, dataset.get("use_lhotse")),
                "trainer.max_steps",
            )
