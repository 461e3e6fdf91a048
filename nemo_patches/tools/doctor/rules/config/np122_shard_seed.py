"""Lhotse's shard_seed, on several ranks:
a seed that each rank draws by itself, or that makes all ranks read the same.

For non-streamed sets each rank shuffles on its own, then takes its share. With NeMo's default,
trng, the orders differ, so some entries are read twice and others never, and ranks may have
different numbers of batches. Each worker reads a whole stream by itself: with a whole number, or
without shuffling, all ranks train on the same batches. docs/doctor.md says which inputs are
streams, and what was measured for each.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/common/data/lhotse/cutset.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.datasets import OF_LHOTSE_ALONE, Dataset
from nemo_patches.tools.doctor.finding import Findings, RuleFinding, note, warning
from nemo_patches.tools.doctor.job import Job

BAD = """\
trainer: {devices: 4, use_distributed_sampler: false}
model:
  train_ds: {use_lhotse: true, manifest_filepath: a.json, batch_duration: 360}
"""
GOOD = BAD.replace("batch_duration: 360", "batch_duration: 360, shard_seed: 0")


def check(job: Job) -> Findings:
    """Not what is repeated for ever and no stream: there ranks take their shares of what never
    ends.
    """
    for dataset in job.datasets if job.several else ():
        # One in a file is NP005's.
        if not dataset.lhotse or dataset.get("input_cfg").named:
            continue
        unknown = dataset.inputs.unknown
        if unknown:
            what = f"{dataset.where}: its shard_seed is not judged, as {unknown}"
            yield note(what, dataset.get("shard_seed"))
        elif dataset.own_orders:
            yield _of_shares(job, dataset)
        elif dataset.tarred and dataset.training:
            yield from _of_a_stream(job, dataset)


def _of_shares(job: Job, dataset: Dataset) -> RuleFinding:
    """Measured on 2 ranks: 18 to 27% of the entries are read twice, and epochs of 112 batches meet
    113.
    """
    what = (
        f"{dataset.where}: each of {job.ranks_text} takes its share of an order of its"
        " own (shard_seed trng): some entries are read twice and others never"
    )
    if dataset.dynamic:
        what += ", and a rank may have one batch fewer, for which the others wait"
    instead = f"{' and '.join(seed.key for seed in dataset.own_orders)}: a whole number"
    manifest = dataset.get("manifest_filepath")
    if not manifest.known and not dataset.given(OF_LHOTSE_ALONE):
        # As in most of NeMo's recipes.
        instead += (
            "; if tar files come with the manifest that is still to be given, leave"
            " trng"
        )
    lhotse = dataset.get("use_lhotse")
    read = (*dataset.own_orders, dataset.get("shuffle"), *dataset.dynamic, lhotse)
    return warning(what, read, instead)


def _of_a_stream(job: Job, dataset: Dataset) -> Findings:
    """Only where every order is known to be the same on all ranks."""
    workers = dataset.get("num_workers", 0)
    seeds = list(dict.fromkeys(draw.seed for draw in dataset.inputs.draws))
    drawn = [seed for seed in seeds if not seed.whole]
    if drawn and workers.value != 0:
        return
    if any(seed.value != "randomized" for seed in drawn):
        return
    own = dataset.get("shard_seed").key
    others = [seed.key for seed in seeds if seed.key != own]
    also = f", also as {' and '.join(others)}" if others else ""
    yield warning(
        f"{dataset.where} is a stream, and each of {job.ranks_text} reads it in the"
        " same order: all train on the same batches",
        (*(seeds or [dataset.get("shuffle")]), workers),
        f"{dataset.get('shuffle').key}: true, with {own}: trng, or randomized and"
        f" num_workers: 1 or more{also}",
    )
