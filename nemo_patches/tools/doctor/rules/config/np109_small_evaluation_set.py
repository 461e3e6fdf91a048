"""A validation or test set that has fewer entries than there are ranks.

The samplers then repeat entries until every rank has one, so nothing hangs, but the metrics count those entries more
than once.
Link: https://lightning.ai/docs/pytorch/stable/common/evaluation_intermediate.html
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.job import Job

WORST = Severity.WARNING

_LONGEST_LINE_BYTES = 1 << 20


def check(job: Job) -> Iterator[Finding]:
    """Where the manifest is a file on this machine, of which no more lines are read than there are ranks."""
    if not job.several or not job.ranks:
        return
    for dataset in job.datasets:
        manifest = dataset.get("manifest_filepath")
        if dataset.training or not isinstance(manifest.value, str) or not Path(manifest.value).is_file():
            continue
        count = _lines(Path(manifest.value), job.ranks)
        if count is not None and count < job.ranks:
            yield Finding(
                Severity.WARNING,
                f"{dataset.where}: {count} entries for {job.ranks_text}: some are counted more than once",
                (manifest, job.devices, job.nodes),
                "a larger set, or fewer ranks for evaluation",
            )


def _lines(path: Path, enough: int) -> int | None:
    """The lines with something in them, at most `enough`; None for a file that cannot be read as lines."""
    try:
        with path.open("rb") as file:
            lines = list(islice(iter(lambda: file.readline(_LONGEST_LINE_BYTES), b""), 2 * enough))
    except OSError:
        return None
    if any(len(line) == _LONGEST_LINE_BYTES for line in lines):
        return None
    return min(enough, sum(1 for line in lines if line.strip()))
