"""Tensor or context parallelism, for which one rank of each group reads the batches of all.

In NeMo 3.0 the other ranks have no data loader: for each batch they wait in broadcast_object_list,
without a limit of its own. If one hangs there, look at the data loader of the first rank of its
group. NeMo knows such groups by the names cp and tp, as its AutomodelParallelStrategy has them;
under Lightning's ModelParallelStrategy each rank reads by itself.
Link:
https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/common/data/lhotse/broadcasting.py
"""

from __future__ import annotations

from math import prod

from nemo_patches.tools.doctor.finding import NOTE, Findings, note
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import TABLE
from nemo_patches.tools.doctor.syntax import last_part

WORST = NOTE
BAD = """\
trainer:
  devices: 8
  use_distributed_sampler: false
  strategy:
    _target_: nemo.collections.speechlm2.parts.parallel.AutomodelParallelStrategy
    tp_size: 8
data:
  train_ds: {cuts_path: a.jsonl.gz, batch_size: 8, shard_seed: 0}
"""
GOOD = BAD.replace("tp_size: 8", "tp_size: 1")


def check(job: Job) -> Findings:
    """Of speechlm2's data module, which has its sets in `data`."""
    values = (job.get(("trainer", "strategy", key)) for key in TABLE["parallel_sizes"])
    sizes = [value for value in values if (value.number or 0) > 1]
    sets = [dataset for dataset in job.datasets if dataset.keys[0] == "data"]
    if not job.several or not sizes or not sets:
        return
    ranks = f"of {prod(value.number or 1 for value in sizes):g} ranks"
    what = (
        f"one {ranks} reads the batches, and the others wait for each in"
        " broadcast_object_list (broadcasting.py)"
    )
    instead = "a look at that rank's data loader"
    if last_part(str(job.strategy.value)) == "ModelParallelStrategy":
        what = (
            f"each {ranks} reads by itself the batches that they need in common"
            " (broadcasting.py goes by cp and tp)"
        )
        instead = "seeds that are the same on all of them"
    yield note(what, tuple(sizes), instead)
