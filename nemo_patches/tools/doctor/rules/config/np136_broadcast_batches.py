"""Tensor or context parallelism, for which one rank of each group reads the batches of all.

In NeMo 3.0 the other ranks have no data loader: for each batch they wait in broadcast_object_list,
without a limit of its own. If one hangs there, look at the data loader of the first rank of its
group.
Link:
https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/common/data/lhotse/broadcasting.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import NOTE, Findings, note
from nemo_patches.tools.doctor.job import Job

WORST = NOTE
BAD = """\
trainer:
  devices: 8
  use_distributed_sampler: false
  strategy:
    _target_: lightning.pytorch.strategies.ModelParallelStrategy
    tensor_parallel_size: 8
    data_parallel_size: 1
data:
  train_ds: {cuts_path: a.jsonl.gz, batch_size: 8, shard_seed: 0}
"""
GOOD = BAD.replace("tensor_parallel_size: 8", "tensor_parallel_size: 1").replace(
    "size: 1\ndata", "size: 8\ndata"
)

_SIZES = ("tensor_parallel_size", "tp_size", "cp_size", "context_parallel_size")


def check(job: Job) -> Findings:
    """Of speechlm2's data module, which has its sets in `data`."""
    sizes = (job.get(("trainer", "strategy", key), 1) for key in _SIZES)
    shared = [size for size in sizes if (size.number or 0) > 1]
    sets = [dataset for dataset in job.datasets if dataset.keys[0] == "data"]
    if job.several and shared and sets:
        what = (
            f"one of {shared[0].number:g} ranks reads the batches, and the others wait"
            " for each in broadcast_object_list (broadcasting.py)"
        )
        yield note(what, tuple(shared), "a look at that rank's data loader")
