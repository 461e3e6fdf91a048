"""The number of tar files is not a multiple of the number of ranks.

NeMo gives each rank the same number of tar files, and never reads those that are left over. With fewer files than
ranks, no rank gets any.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/asr/data/audio_to_text.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from nemo_patches.tools.doctor.finding import WARNING, Findings, warning
from nemo_patches.tools.doctor.job import Job

WORST = WARNING
BAD = """\
trainer: {devices: 8}
model:
  train_ds: {is_tarred: true, tarred_audio_filepaths: 'audio_{0..99}.tar', manifest_filepath: a.json}
"""
GOOD = BAD.replace("0..99", "0..95")

_OPEN, _CLOSE = r"(?:\{|\(|\[|<|_OP_)", r"(?:\}|\)|\]|>|_CL_)"
_RANGE = re.compile(rf"{_OPEN}(\d+)\.\.(\d+){_CLOSE}")
_CHOICE = re.compile(rf"{_OPEN}([^{{}}()\[\]<>]*,[^{{}}()\[\]<>]*?){_CLOSE}")


def check(job: Job) -> Findings:
    """Each list of tar files by itself, as each is shared out by itself; only where they are shared out."""
    if not job.several or not job.ranks:
        return
    for dataset in job.datasets:
        if not dataset.nemo or not dataset.tarred or dataset.get("tarred_shard_strategy", "scatter").value != "scatter":
            continue
        files = dataset.get("tarred_audio_filepaths")
        for count in _counts(files.value):
            left = count % job.ranks
            if left:
                per_rank = count // job.ranks
                nobody = "no rank gets any" if not per_rank else f"each gets {per_rank}, and {left} are never read"
                yield warning(
                    f"{dataset.where}: {count} tar files for {job.ranks_text}: {nobody}",
                    (files, job.devices, job.nodes, dataset.get("tarred_shard_strategy", "scatter")),
                    "a number of ranks that divides the number of tar files",
                )


def _counts(files: Any) -> Iterator[int]:
    """How many tar files each bucket has, its ranges and lists expanded; nothing where that is not known."""
    if isinstance(files, str):
        yield sum(map(_count, re.split(r",(?![^{(\[<]*[})\]>])", files)))
    elif isinstance(files, list):
        names = [name[0] if isinstance(name, list) and len(name) == 1 else name for name in files]
        if all(isinstance(name, str) for name in names):
            if any(isinstance(name, list) for name in files):
                yield from map(_count, names)
            else:
                yield sum(map(_count, names))


def _count(name: str) -> int:
    count = 1
    for low, high in _RANGE.findall(name):
        count *= abs(int(high) - int(low)) + 1
    for choice in _CHOICE.findall(_RANGE.sub("", name)):
        count *= choice.count(",") + 1
    return count
