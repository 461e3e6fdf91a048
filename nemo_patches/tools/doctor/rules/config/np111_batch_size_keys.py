"""Keys for the size of a batch that NeMo refuses:
none at all, no size, or keys that contradict each other.

Lhotse and NeMo's own data loaders have different keys for it, and some combinations stop the job at
its start. Without any key, NeMo 3.0 stops; with NeMo up to 2.7, Lhotse makes one batch of the whole
set.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/docs/source/asr/datasets.rst
"""

from __future__ import annotations

from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.finding import WARNING, Findings, stops, warning
from nemo_patches.tools.doctor.job import Job

WORST = WARNING
BAD = """\
model:
  train_ds: {use_lhotse: true, manifest_filepath: a.json, bucket_batch_size: [16, 8]}
"""
GOOD = BAD.replace("[16, 8]", "[16, 8], bucket_duration_bins: [10, 20]")

_KNOWN = ("batch_size", "bucket_batch_size", "bucketing_batch_size")
_SIZES_OF_LHOTSE = ("batch_size", "batch_duration", "bucket_batch_size", "batch_tokens")
_COUNTS = ("batch_size", "batch_tokens")  # whole numbers


def check(job: Job) -> Findings:
    """For each set by itself."""
    for dataset in job.datasets:
        yield from _no_size(dataset)
        if dataset.lhotse:
            yield from _of_lhotse(dataset)
            yield from _bins(dataset)
            continue
        yield from _of_buckets(dataset)
        size = dataset.get("batch_size")
        if (
            dataset.nemo
            and not size.given
            and job.asr_encoder
            and not _has_own_keys(dataset)
        ):
            what = (
                f"{dataset.where}: no batch_size: the job stops when it makes this"
                " set's data loader"
            )
            yield warning(what, size, "batch_size")


def _has_own_keys(dataset: Dataset) -> bool:
    """Whether another key says it: of a collection that does not go by these (micro_batch_size,
    dataloader_params).
    """
    waiting = [dataset.config.get(dataset.keys).value]
    while waiting:
        section = waiting.pop()
        for key, value in section.items() if isinstance(section, dict) else ():
            if "batch_size" in key and key not in _KNOWN:
                return True
            if isinstance(value, dict):
                if "batch_size" in value:
                    return True
                waiting.append(value)
    return False


def _no_size(dataset: Dataset) -> Findings:
    for key in ("batch_size", "batch_duration", "batch_tokens"):
        size = dataset.get(key)
        read = dataset.lhotse or (dataset.nemo and key == "batch_size")
        if not read or not size.known or size.value is None:
            continue
        if (size.number is not None and size.number <= 0) or (
            key in _COUNTS and isinstance(size.value, float)
        ):
            what = f"{size.key} is {size.value}, which is no size of a batch"
            yield stops(
                what, size, "1 or more" if size.whole else "a whole number, 1 or more"
            )


def _bins(dataset: Dataset) -> Findings:
    """Lhotse asserts their order where it buckets; NeMo 3.0 does so wherever there are bins."""
    bins = dataset.get("bucket_duration_bins")
    if not isinstance(bins.value, list):
        return
    if not bins.value:
        what = f"{bins.key} is empty"
        yield stops(what, bins, "bucket_duration_bins: null, to have them estimated")
        return
    try:
        ascending = sorted(bins.value) == bins.value
    except TypeError:  # numbers and pairs, or what is not known
        return
    if not ascending:
        what = f"{bins.key} are not in ascending order"
        yield stops(what, bins, f"bucket_duration_bins: {sorted(bins.value)}")


def _of_buckets(dataset: Dataset) -> Findings:
    """Of NeMo's own data loader, which wants each bucket's size in one key only."""
    size = dataset.get("batch_size")
    adaptive = dataset.get("bucketing_batch_size")
    if (
        not dataset.tarred
        or not dataset.has_buckets
        or not size.known
        or not adaptive.known
    ):
        return
    if adaptive.value is not None and size.value != 1:
        what = f"{dataset.where}: bucketing_batch_size with a batch_size that is not 1"
        yield stops(what, (adaptive, size), "batch_size: 1")


def _of_lhotse(dataset: Dataset) -> Findings:
    sizes = [dataset.get(key) for key in _SIZES_OF_LHOTSE]
    multimodal = dataset.get("use_multimodal_sampling", False)
    counting = [
        sizes[0],
        *([] if multimodal.on else [sizes[1]]),
        sizes[2],  # without its bins, it has a finding of its own
        *([sizes[3]] if not multimodal.off else []),
    ]
    if all(value.value is None for value in counting) and not _has_own_keys(dataset):
        given = tuple(value for value in sizes if value.given)
        others = [value.key for value in given if value.value is not None]
        why = f", as {' and '.join(others)} does not count here" if others else ""
        yield warning(
            f"{dataset.where}: no key gives the size of a batch{why}: NeMo 3.0 stops"
            " the job at its start, NeMo up to 2.7 makes one batch of the whole set",
            (*(given or (sizes[0],)), *([multimodal] if multimodal.given else [])),
            "batch_size; or " + ("batch_tokens" if multimodal.on else "batch_duration"),
        )
    yield from _fixed_sizes(dataset)


def _fixed_sizes(dataset: Dataset) -> Findings:
    """Of buckets."""
    fixed = dataset.get("bucket_batch_size")
    bins = dataset.get("bucket_duration_bins")
    if fixed.value is not None and bins.value is None:
        what = f"{dataset.where}: bucket_batch_size without bucket_duration_bins"
        yield stops(what, (fixed, bins), "bucket_duration_bins, as many as batch sizes")
    elif (
        isinstance(fixed.value, list)
        and isinstance(bins.value, list)
        and len(fixed.value) != len(bins.value)
    ):
        what = (
            f"{dataset.where}: {len(fixed.value)} batch sizes for {len(bins.value)}"
            " buckets"
        )
        yield warning(
            what,
            (fixed, bins),
            "as many of bucket_batch_size as of bucket_duration_bins",
        )
