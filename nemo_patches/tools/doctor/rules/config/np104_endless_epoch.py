"""Lhotse training on a stream, or on a mix of inputs, without a whole limit_train_batches.

Lhotse repeats these for ever: an epoch has no end, so what happens at its end (validation,
checkpoints) never happens, unless val_check_interval is a number of batches. A stream has no
length, either, also one that ends, and NeMo's ASR models then stop at their start; those with a
prompt or a transformer decoder wherever is_tarred is on.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/docs/source/asr/datasets.rst
"""

from __future__ import annotations

from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.finding import Findings, warning
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import TABLE

BAD = """\
trainer: {devices: 4}
model:
  train_ds: {use_lhotse: true, shar_path: shards, batch_size: 8}
"""
GOOD = BAD.replace("devices: 4", "devices: 4, limit_train_batches: 1000")


def check(job: Job) -> Findings:
    """On any number of ranks."""
    limit = job.limit("training")
    interval = job.trainer("val_check_interval", 1.0)
    if not job.has_trainer or not limit.open:
        return
    for dataset in job.training_of_lhotse:
        if _asks_for_its_length(job, dataset):
            asking = "all of NeMo's ASR models but multitask ones ask"
            if job.asr_encoder:
                asking = "this model asks"
            kind = "has is_tarred, and is read by Lhotse"
            if dataset.tarred:
                kind = "is a stream"
            what = (
                f"{dataset.where} {kind} without a length, which {asking} for: the job"
                " stops at its start"
            )
        elif dataset.endless and isinstance(interval.batches, float):
            what = (
                f"Lhotse repeats {dataset.where} for ever, and limit_train_batches is"
                " no whole number: no epoch ends"
            )
        else:
            continue
        steps = job.trainer("max_steps", -1)
        lhotse = dataset.get("use_lhotse")
        yield warning(
            what,
            (limit, interval, steps, lhotse, *job.checkpoints),
            "trainer.limit_train_batches: the batches of one epoch, the same for all"
            " ranks; and max_steps",
        )


def _asks_for_its_length(job: Job, dataset: Dataset) -> bool:
    """NeMo's CTC, RNNT and SSL models ask a stream, where the limit is a share; those with a
    transformer decoder or a prompt whatever has is_tarred.

    Also a model from a checkpoint, whose own config has the encoder: only that of a multitask model
    does not ask.
    """
    if dataset.keys[0] != "model" or job.get("model.sortformer_modules").given:
        return False
    by_flag = any(
        job.get(f"model.{key}").value not in (None, False)
        for key in TABLE["asking_by_is_tarred"]
    )
    flag = dataset.get("is_tarred").on
    if flag and by_flag:
        return True
    if not dataset.tarred:
        return False
    if job.asr_encoder:
        return flag or not by_flag
    # Canary: NVIDIA's own multitask models
    canary = any("canary" in str(each.value).lower() for each in job.checkpoints)
    return bool(job.checkpoints) and (flag or not canary)
