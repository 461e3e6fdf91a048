"""pin_memory and workers for training and for validation: workers are forked beside a pinning
thread.

Each validation forks its workers while the training loader's pinning thread runs. That may, rarely,
leave a worker stuck for ever, and its rank with it.
Link: https://github.com/pytorch/pytorch/issues/130610
"""

from __future__ import annotations

from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.finding import NOTE, Findings, note
from nemo_patches.tools.doctor.job import Job

WORST = NOTE
BAD = """\
trainer: {devices: 4}
model:
  train_ds: {manifest_filepath: a.json, batch_size: 8, num_workers: 8, pin_memory: true}
  validation_ds: {manifest_filepath: b.json, batch_size: 8, num_workers: 8, pin_memory: true}
"""
GOOD = BAD.replace("num_workers: 8, pin_memory: true}\n  v", "num_workers: 8}\n  v")


def check(job: Job) -> Findings:
    """A note: it is an ordinary setting that may be the cause of a hang which is there already."""
    if not job.several or job.accelerator.value == "cpu":
        return
    forking = [
        dataset for dataset in job.datasets if _forks_beside_a_pinning_thread(dataset)
    ]
    training = next((dataset for dataset in forking if dataset.training), None)
    validation = next(
        (dataset for dataset in forking if dataset.role == "validation"), None
    )
    if training and validation:
        read = [
            dataset.get(key)
            for dataset in (training, validation)
            for key in ("pin_memory", "num_workers")
        ]
        yield note(
            "each validation forks workers beside the training loader's pinning thread;"
            " if a rank hangs just there, in its data loader, this is known of PyTorch,"
            " and rare",
            tuple(read),
            "pin_memory: false, if that is where it hangs",
        )


def _forks_beside_a_pinning_thread(dataset: Dataset) -> bool:
    workers = dataset.get("num_workers", 0).number or 0
    return dataset.get("pin_memory", False).on and workers > 0
