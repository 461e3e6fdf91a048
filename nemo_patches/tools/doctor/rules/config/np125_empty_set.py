"""A set of which its limits on duration leave nothing.

Training on nothing stops at its start, or waits for a first batch for ever. A validation set
without a batch is skipped with a warning, so the metrics for checkpoints and early stopping do not
exist.
Link: https://lightning.ai/docs/pytorch/stable/common/trainer.html#trainer-flags
"""

from __future__ import annotations

from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.finding import Findings, warning
from nemo_patches.tools.doctor.job import Job

BAD = """\
model:
  train_ds: {manifest_filepath: a.json, max_duration: -1}
"""
GOOD = BAD.replace("max_duration: -1", "max_duration: null")


def check(job: Job) -> Findings:
    """On any number of ranks."""
    for dataset in job.datasets:
        yield from _no_duration_fits(dataset)


def _no_duration_fits(dataset: Dataset) -> Findings:
    longest = dataset.get("max_duration")
    shortest = dataset.get("min_duration")
    if longest.number is None or dataset.get("session_len_sec").given:
        return
    if longest.number <= 0:
        what = (
            f"{longest.key} is {longest.value}, and no entry is that short; it is no"
            " word for no limit"
        )
        yield warning(
            f"{dataset.where}: {what}", longest, "max_duration: null, for no limit"
        )
    elif shortest.number is not None and shortest.number > longest.number:
        what = (
            f"{dataset.where}: no entry has at least {shortest.value} s and at most"
            f" {longest.value} s"
        )
        yield warning(what, (shortest, longest), "min_duration below max_duration")
    padded = dataset.get("pad_min_duration")
    if (
        dataset.lhotse
        and padded.number is not None
        and 0 < longest.number < padded.number
    ):
        what = (
            f"{dataset.where}: each entry is padded to {padded.value} s, and then none"
            f" has at most {longest.value} s"
        )
        yield warning(
            what, (padded, longest), "pad_min_duration no more than max_duration"
        )
