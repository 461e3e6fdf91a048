"""Keys for the size of a batch that contradict each other, or that this data loader does not read.

Lhotse and NeMo's own data loaders have different keys for it: one that is not read leaves another size than the config
seems to say, and some combinations stop the job at its start.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/docs/source/asr/datasets.rst
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.job import Job

WORST = Severity.WARNING
BAD = """\
model:
  train_ds: {use_lhotse: true, manifest_filepath: a.json, bucket_batch_size: [16, 8]}
"""
GOOD = """\
model:
  train_ds: {use_lhotse: true, manifest_filepath: a.json, bucket_batch_size: [16, 8], bucket_duration_bins: [10, 20]}
"""

_OF_LHOTSE = ("batch_duration", "quadratic_duration", "bucket_batch_size", "bucket_duration_bins", "batch_tokens")
_SIZES_OF_LHOTSE = ("batch_size", "batch_duration", "bucket_batch_size", "batch_tokens")


def check(job: Job) -> Iterator[Finding]:
    """For each set by itself."""
    for dataset in job.datasets:
        if dataset.lhotse:
            yield from _of_lhotse(dataset)
        else:
            yield from _of_nemo(dataset)


def _of_nemo(dataset: Dataset) -> Iterator[Finding]:
    ignored = [value for value in map(dataset.get, _OF_LHOTSE) if value.given and value.value is not None]
    size = dataset.get("batch_size")
    if ignored:
        names = " and ".join(value.key for value in ignored)
        yield Finding(
            Severity.NOTE,  # kept for when it is on, or of a model that has no other data loader
            f"{names}: only Lhotse reads that, and use_lhotse is not true: unless this model has no other data loader, "
            "batch_size alone counts",
            (*ignored, dataset.get("use_lhotse", False), size),
            "use_lhotse: true, or batch_size alone",
        )
    adaptive, files = dataset.get("bucketing_batch_size"), dataset.get("tarred_audio_filepaths").value
    buckets = isinstance(files, list) and len(files) > 1 and isinstance(files[0], list)
    if dataset.tarred and buckets and adaptive.value is not None and adaptive.known and size.known and size.value != 1:
        yield Finding(
            Severity.WARNING,
            f"{dataset.where}: bucketing_batch_size with a batch_size that is not 1: the job stops at its start",
            (adaptive, size),
            "batch_size: 1",
        )


def _of_lhotse(dataset: Dataset) -> Iterator[Finding]:
    sizes = [dataset.get(key) for key in _SIZES_OF_LHOTSE]
    if any(value.given for value in sizes) and all(value.value is None for value in sizes):
        yield Finding(
            Severity.WARNING,
            f"{dataset.where}: every key for the size of a batch is null: the job stops at its start",
            tuple(value for value in sizes if value.given),
            "batch_size, or batch_duration",
        )
    fixed, bins = dataset.get("bucket_batch_size"), dataset.get("bucket_duration_bins")
    if fixed.value is not None and bins.value is None:
        yield Finding(
            Severity.WARNING,
            f"{dataset.where}: bucket_batch_size without bucket_duration_bins: the job stops at its start",
            (fixed, bins),
            "bucket_duration_bins, as many as batch sizes",
        )
    elif isinstance(fixed.value, list) and isinstance(bins.value, list) and len(fixed.value) != len(bins.value):
        yield Finding(
            Severity.WARNING,
            f"{dataset.where}: {len(fixed.value)} batch sizes for {len(bins.value)} buckets",
            (fixed, bins),
            "as many of bucket_batch_size as of bucket_duration_bins",
        )
    elif fixed.value is not None and any(value.value is not None for value in sizes[:2]):
        yield Finding(
            Severity.NOTE,
            f"{dataset.where}: bucket_batch_size counts, and batch_size and batch_duration do not",
            (fixed, *sizes[:2]),
        )
    old = dataset.get("bucketing_batch_size")
    if old.given and old.value is not None:
        yield Finding(
            Severity.WARNING,
            f"{old.key}: Lhotse does not read that",
            (old, *(value for value in sizes if value.given)),
            "bucket_batch_size, with bucket_duration_bins",
        )
