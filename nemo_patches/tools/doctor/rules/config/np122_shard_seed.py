"""Lhotse's shard_seed, on several ranks: one that each rank draws by itself, or one that makes all ranks read the same.

What is no stream each rank orders by itself, and takes its share of that order: with NeMo's default, trng, the orders
differ, so entries are read twice and others never, and ranks may have different numbers of batches. A stream every
worker reads by itself: with a whole number, or without shuffling, all ranks train on the same batches.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/common/data/lhotse/cutset.py
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.job import Job

WORST = Severity.WARNING
BAD = """\
trainer: {devices: 4, use_distributed_sampler: false}
model:
  train_ds: {use_lhotse: true, manifest_filepath: a.json, batch_duration: 360}
"""
GOOD = """\
trainer: {devices: 4, use_distributed_sampler: false}
model:
  train_ds: {use_lhotse: true, manifest_filepath: a.json, batch_duration: 360, shard_seed: 0}
"""

_DEFAULT = "trng"


def check(job: Job) -> Iterator[Finding]:
    """Not what is repeated for ever and mixed: there ranks draw at random, with and without a seed."""
    if not job.several:
        return
    for dataset in job.datasets:
        if not dataset.lhotse or not dataset.get("shard_seed", _DEFAULT).known:
            continue
        if dataset.tarred is False and not dataset.endless:
            yield from _of_shares(job, dataset)
        elif dataset.tarred and dataset.training:
            yield from _of_a_stream(job, dataset)


def _of_shares(job: Job, dataset: Dataset) -> Iterator[Finding]:
    """Measured on 2 ranks: 18 to 27% of the entries are read twice, and epochs of 112 batches meet 113."""
    seed, shuffle = dataset.get("shard_seed", _DEFAULT), dataset.get("shuffle", _shuffled(job, dataset))
    if seed.value != _DEFAULT or not (shuffle.value is True or dataset.mixed):
        return
    dynamic = [value for value in map(dataset.get, ("batch_duration", "bucket_batch_size")) if value.value is not None]
    uneven = ", and a rank may have a batch less, for which the others wait" if dynamic else ""
    yield Finding(
        Severity.WARNING,
        f"{dataset.where}: each of {job.ranks_text} takes its share of an order of its own (shard_seed trng): some "
        f"entries are read twice and others never{uneven}",
        (seed, shuffle, *dynamic, dataset.get("use_lhotse")),
        f"{_holder(dataset)}.shard_seed: a whole number, or randomized",
    )


def _of_a_stream(job: Job, dataset: Dataset) -> Iterator[Finding]:
    seed, shuffle = dataset.get("shard_seed", _DEFAULT), dataset.get("shuffle", _shuffled(job, dataset))
    workers = dataset.get("num_workers", 0)
    whole = isinstance(seed.value, int) and not isinstance(seed.value, bool)
    without_workers = seed.value == "randomized" and workers.value == 0
    in_order = shuffle.value is False and not dataset.mixed and dataset.get("tarred_audio_filepaths").value is not None
    if whole or without_workers or in_order:
        yield Finding(
            Severity.WARNING,
            f"{dataset.where} is a stream, and each of {job.ranks_text} reads it in the same order: all train on the "
            "same batches",
            (*((shuffle,) if in_order else (seed,)), *((workers,) if without_workers else ())),
            f"{_holder(dataset)}.shuffle: true, with shard_seed: trng, or randomized and num_workers: 1 or more",
        )


def _shuffled(job: Job, dataset: Dataset) -> bool:
    """NeMo's default: its models for CTC, RNNT and SSL shuffle a training set that does not say."""
    return dataset.training and dataset.keys[0] == "model" and not job.config.get(("model", "transf_decoder")).given


def _holder(dataset: Dataset) -> str:
    return dataset.get("shard_seed").key.rpartition(".")[0]
