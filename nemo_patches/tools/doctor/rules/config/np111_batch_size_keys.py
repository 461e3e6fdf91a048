"""Keys for the size of a batch that NeMo refuses:
none at all, no size, or keys that contradict each other.

Lhotse and NeMo's own data loaders have different keys for it, and some combinations stop the job at
its start. Without any key, NeMo 3.0 stops; with NeMo up to 2.7, Lhotse makes one batch of the whole
set.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/docs/source/asr/datasets.rst
"""

from __future__ import annotations

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.finding import Findings, stops, warning
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import TABLE
from nemo_patches.tools.doctor.trees import walk

BAD = """\
model:
  train_ds: {use_lhotse: true, manifest_filepath: a.json, bucket_batch_size: [16, 8]}
"""
GOOD = BAD.replace("[16, 8]", "[16, 8], bucket_duration_bins: [10, 20]")


def check(job: Job) -> Findings:
    """For each set by itself."""
    for dataset in job.datasets:
        if dataset.lhotse or dataset.nemo:
            sizes = TABLE["sizes_of_batches"]["lhotse" if dataset.lhotse else "nemo"]
            for size in map(dataset.get, sizes):
                yield from _no_size(size)
        yield from _missing(job, dataset)
        if dataset.lhotse:
            yield from _buckets(dataset)


def _no_size(size: Value) -> Findings:
    whole = size.keys[-1] != "batch_duration"
    too_small = size.number is not None and size.number <= 0
    if too_small or (whole and isinstance(size.value, float)):
        what = f"{size.key} is {size.value}, which is no size of a batch"
        yield stops(what, size, "a whole number, 1 or more")


def _missing(job: Job, dataset: Dataset) -> Findings:
    multimodal = dataset.get("use_multimodal_sampling", False)
    keys = ["batch_size"]
    if dataset.lhotse:
        keys += ["bucket_batch_size"]  # without its bins, it has a finding of its own
        keys += [] if multimodal.on else ["batch_duration"]
        keys += [] if multimodal.off else ["batch_tokens"]
    elif not dataset.nemo or not job.asr_encoder:
        return
    if not dataset.given(keys) and not _has_own_keys(dataset):
        yield warning(
            f"{dataset.where}: no key gives the size of a batch"
            f" ({', '.join(keys)}): NeMo 3.0 stops the job at its start, Lhotse under"
            " NeMo up to 2.7 makes one batch of the whole set",
            (dataset.get("batch_size"), multimodal),
            " or ".join(keys),
        )


def _has_own_keys(dataset: Dataset) -> bool:
    """Whether another key says it: of a collection that does not go by these (micro_batch_size,
    dataloader_params).
    """
    return any(
        "batch_size" in keys[-1]
        and (len(keys) > 1 or keys[-1] not in TABLE["named_batch_size"])
        for keys, _ in walk(dataset.config.get(dataset.keys).value)
        if keys
    )


def _buckets(dataset: Dataset) -> Findings:
    """Lhotse asserts their order where it buckets; NeMo 3.0 does so wherever there are bins."""
    sizes = dataset.get("bucket_batch_size")
    bins = dataset.get("bucket_duration_bins")
    if sizes.value is not None and bins.value is None:
        what = f"{dataset.where}: bucket_batch_size without bucket_duration_bins"
        yield stops(what, (sizes, bins), "bucket_duration_bins, as many as batch sizes")
    if not isinstance(bins.value, list):
        return
    if isinstance(sizes.value, list) and len(sizes.value) != len(bins.value):
        counts = f"{len(sizes.value)} batch sizes for {len(bins.value)} buckets"
        what = f"{dataset.where}: {counts}"
        yield stops(what, (sizes, bins), "as many batch sizes as buckets")
    if not bins.value:
        what = f"{bins.key} is empty"
        yield stops(what, bins, "bucket_duration_bins: null, to have them estimated")
    numbers = [each for each in bins.value if isinstance(each, (int, float))]
    if numbers != sorted(numbers):
        what = f"{bins.key} are not in ascending order"
        yield stops(what, bins, f"bucket_duration_bins: {sorted(numbers)}")
