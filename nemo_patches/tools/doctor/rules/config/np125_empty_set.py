"""A set of which nothing is left:
by its limits on duration, or because drop_last drops a rank's only batch.

Training on nothing stops at its start, or waits for a first batch for ever. A validation set
without a batch is skipped with a warning, so the metrics for checkpoints and early stopping do not
exist.
Link: https://lightning.ai/docs/pytorch/stable/common/trainer.html#trainer-flags
"""

from __future__ import annotations

from nemo_patches.tools import counted
from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.finding import WARNING, Findings, warning
from nemo_patches.tools.doctor.job import Job

WORST = WARNING
BAD = """\
model:
  train_ds: {manifest_filepath: a.json, max_duration: -1}
"""
GOOD = BAD.replace("max_duration: -1", "max_duration: null")


def check(job: Job) -> Findings:
    """On any number of ranks; entries are counted where the manifest is a file on this machine."""
    for dataset in job.datasets:
        yield from _no_duration_fits(dataset)
        if job.has_trainer:
            yield from _no_batch(job, dataset)


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


def _no_batch(job: Job, dataset: Dataset) -> Findings:
    size = dataset.get("batch_size")
    drop = dataset.get("drop_last", False)
    if not drop.on or not size.number or not job.ranks or dataset.tarred is not False:
        return
    if not dataset.reader or dataset.dynamic:
        return
    # Lhotse deals whole batches out to the ranks; Lightning's sampler deals out entries, and
    # repeats some to fill up.
    whole = int(size.number)
    enough = whole
    if dataset.lhotse:
        enough = whole * job.ranks
    elif not job.trainer("use_distributed_sampler", True).off:
        enough = (whole - 1) * job.ranks + 1
    count = dataset.entries(enough)
    if count is not None and count < enough:
        entries = "1 entry" if count == 1 else f"{count} entries"
        what = (
            f"{dataset.where}: {entries} for {counted(job.ranks, 'rank')} in batches of"
            f" {whole}"
        )
        read = (drop, size, dataset.get("manifest_filepath"), job.devices)
        yield warning(
            f"{what}, and drop_last: no rank has a batch",
            read,
            f"{dataset.where}.drop_last: false",
        )
