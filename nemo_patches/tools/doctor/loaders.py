"""What a config makes of the data loaders on one rank.

For `doctor --ranks CONFIG`, which compares all ranks'.
"""

from __future__ import annotations

from math import ceil, floor

from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import TABLE

_MOST_COUNTED = 1_000_000  # entries of a manifest


def settings(job: Job, ranks: int) -> dict[str, str]:
    """Each set's settings, its sampler and the batches that this rank would have of that many, by
    name.
    """
    texts: dict[str, str] = {}
    for dataset in job.datasets:
        for key in TABLE["sets"]["compared_between_ranks"]:
            value = dataset.get(key)
            text = "null" if value.value is None else str(value.value)
            if value.given:
                texts[f"{dataset.where}.{key}"] = text
        sampler = _sampler(job, dataset)
        texts[f"{dataset.where}, sampler"] = sampler
        batches = _batches(job, dataset, ranks, sampler)
        if batches is not None:
            texts[f"{dataset.where}, batches"] = str(batches)
    return texts


def _sampler(job: Job, dataset: Dataset) -> str:
    if not dataset.reader or dataset.tarred is None:
        return "not told by the config"
    if dataset.tarred:
        return "none, a stream"
    if dataset.lhotse:
        return "Lhotse's"
    shared = not job.trainer("use_distributed_sampler", True).off
    return "Lightning's" if shared else "none, each rank reads all of it"


def _batches(job: Job, dataset: Dataset, ranks: int, sampler: str) -> int | None:
    """Before any limit on duration; None where the manifest is not on this host, or batches have
    no fixed size.
    """
    size = dataset.get("batch_size").number
    if dataset.tarred is not False or dataset.dynamic or not size:
        return None
    entries = dataset.entries(_MOST_COUNTED)
    if entries is None or entries == _MOST_COUNTED:
        return None
    rounded = floor if dataset.get("drop_last", False).on else ceil
    if sampler == "Lhotse's":  # it deals out batches
        batches = rounded(rounded(entries / size) / ranks)
    else:
        own = ceil(entries / ranks) if sampler == "Lightning's" else entries
        batches = rounded(own / size)
    limit = job.limit(dataset.role).batches
    return min(batches, limit) if isinstance(limit, int) else batches
