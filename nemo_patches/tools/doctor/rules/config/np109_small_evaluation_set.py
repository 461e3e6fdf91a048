"""A validation or test set with fewer entries than ranks.

The samplers then repeat entries until every rank has one. Nothing hangs, but the metrics count these entries more
than once.
Link: https://lightning.ai/docs/pytorch/stable/common/evaluation_intermediate.html
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import WARNING, Findings, warning
from nemo_patches.tools.doctor.job import Job

WORST = WARNING
BAD = """\
trainer: {devices: 4}
model:
  validation_ds: {manifest_filepath: three_lines.json, batch_size: 8, max_duration: 20}
"""
GOOD = BAD.replace("manifest_filepath: three_lines.json", "manifest_filepath: four_lines.json")


def check(job: Job) -> Findings:
    """Where the manifest is a file on this machine, of which no more lines are read than there are ranks."""
    if not job.several or not job.ranks:
        return
    for dataset in job.datasets:
        manifest = dataset.get("manifest_filepath")
        count = None if dataset.training else dataset.entries(job.ranks)
        if count is not None and count < job.ranks:
            what = f"{dataset.where}: {count} entries for {job.ranks_text}: some are counted more than once"
            instead = "a larger set, or fewer ranks for evaluation"
            yield warning(what, (manifest, job.devices, job.nodes), instead)
