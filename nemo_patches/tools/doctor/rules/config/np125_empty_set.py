"""A set of which its limits on duration leave nothing.

Training on nothing stops at its start, or waits for a first batch for ever. A validation set
without a batch is skipped with a warning, so the metrics for checkpoints and early stopping do not
exist.
Link: https://lightning.ai/docs/pytorch/stable/common/trainer.html#trainer-flags
"""

from __future__ import annotations

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
        longest = dataset.get("max_duration")
        shortest = dataset.get("min_duration")
        padded = dataset.get("pad_min_duration")
        most = longest.number
        if most is None or dataset.get("session_len_sec").given:
            continue
        if most <= 0:
            yield warning(
                f"{dataset.where}: {longest.key} is {longest.value}, and no entry is"
                " that short; it is no word for no limit",
                longest,
                "max_duration: null, for no limit",
            )
        elif (shortest.number or 0) > most:
            yield warning(
                f"{dataset.where}: no entry has at least {shortest.value} s and at most"
                f" {longest.value} s",
                (shortest, longest),
                "min_duration below max_duration",
            )
        if dataset.lhotse and 0 < most < (padded.number or 0):
            yield warning(
                f"{dataset.where}: each entry is padded to {padded.value} s, and then"
                f" none has at most {longest.value} s",
                (padded, longest),
                "pad_min_duration no more than max_duration",
            )
