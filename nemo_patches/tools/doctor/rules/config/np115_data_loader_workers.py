"""num_workers, persistent_workers and pin_memory: settings that are known to stall, and settings without effect.

A rank that is late with its data is late in the length sync. If the training thread reads the data, every slow file
is such a delay. Forking workers while another loader's pinning thread runs may, rarely, leave a worker stuck for
ever.
Link: https://github.com/pytorch/pytorch/issues/130610
"""

from __future__ import annotations

from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.finding import NOTE, Findings, note
from nemo_patches.tools.doctor.job import Job

WORST = NOTE
FOLDED = True
BAD = """\
trainer: {devices: 4}
model:
  train_ds: {manifest_filepath: a.json, batch_size: 8}
"""
GOOD = BAD.replace("batch_size: 8", "batch_size: 8, num_workers: 8")

# NeMo's own data loaders hand on num_workers and pin_memory alone; Lhotse's decide about these by themselves.
_NOT_READ = ("persistent_workers", "prefetch_factor")


def check(job: Job) -> Findings:
    """Only notes: each is an ordinary setting that may be the cause of a stall which is there already."""
    for dataset in job.datasets:
        if job.several and dataset.training:
            workers = dataset.get("num_workers", 0)
            if workers.value == 0:
                what = f"{dataset.where}: audio is read on the training thread of each of {job.ranks_text}: all "
                what += "wait for the slowest file"
                yield note(what, workers, "num_workers: 2 or more")
        ignored = [value for value in map(dataset.get, _NOT_READ) if value.given]
        if ignored and dataset.keys[0] in ("model", "data"):
            names = " and ".join(value.key for value in ignored)
            yield note(f"{names}: NeMo does not hand that on, so it has no effect", tuple(ignored))
    pinned = [dataset for dataset in job.datasets if dataset.get("pin_memory", False).value is True]
    if pinned and job.accelerator.value == "cpu":
        switches = tuple(dataset.get("pin_memory") for dataset in pinned)
        yield note("pin_memory has no effect on the CPU", switches)
    elif job.several:
        yield from _forks_beside_a_pinning_thread(pinned)


def _forks_beside_a_pinning_thread(pinned: list[Dataset]) -> Findings:
    def forks(dataset: Dataset) -> bool:
        return (dataset.get("num_workers", 0).number or 0) > 0

    training = [dataset for dataset in pinned if dataset.training and forks(dataset)]
    validation = [dataset for dataset in pinned if dataset.role == "validation" and forks(dataset)]
    if training and validation:
        read = [dataset.get(key) for dataset in (training[0], validation[0]) for key in ("pin_memory", "num_workers")]
        yield note(
            "each validation forks workers beside the training loader's pinning thread; if a rank hangs just there, "
            "in its data loader, this is known of PyTorch, and rare",
            tuple(read),
            "pin_memory: false, if that is where it hangs",
        )
