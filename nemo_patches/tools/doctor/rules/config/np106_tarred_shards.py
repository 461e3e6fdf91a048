"""Fewer tar files than ranks: no rank gets any, and the job stops at its start.

NeMo gives each rank the same number of tar files. The ranks without files then fail when they open
none.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/asr/data/audio_to_text.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

from nemo_patches.tools import counted
from nemo_patches.tools.doctor.finding import Findings, stops
from nemo_patches.tools.doctor.job import Job

BAD = """\
trainer: {devices: 8}
model:
  train_ds: {is_tarred: true, tarred_audio_filepaths: 'audio_{0..3}.tar', manifest_filepath: a.json}
"""
GOOD = BAD.replace("0..3", "0..15")

_OPEN = r"(?:\{|\(|\[|<|_OP_)"
_CLOSE = r"(?:\}|\)|\]|>|_CL_)"
_RANGE = re.compile(rf"{_OPEN}(\d+)\.\.(\d+){_CLOSE}")
_CHOICE = re.compile(rf"{_OPEN}([^{{}}()\[\]<>]*,[^{{}}()\[\]<>]*?){_CLOSE}")
_BETWEEN_NAMES = re.compile(r",(?![^{(\[<]*[})\]>])")


def check(job: Job) -> Findings:
    """Each list of tar files by itself, as each is shared out by itself; only where they are shared
    out.
    """
    if not job.several or not job.ranks:
        return
    for dataset in job.datasets:
        files = dataset.get("tarred_audio_filepaths")
        for count in _counts(files.value) if dataset.shares_tar_files else ():
            if 0 < count < job.ranks:
                yield stops(
                    f"{dataset.where}: {counted(count, 'tar file')} for"
                    f" {job.ranks_text}, and no rank gets any",
                    (files, job.devices, job.nodes),
                    "at least as many tar files as ranks",
                )


def _counts(files: Any) -> Iterator[int]:
    """How many tar files each bucket has, its ranges and lists expanded; nothing where that is not
    known.
    """
    if isinstance(files, str):
        files = _BETWEEN_NAMES.split(files)
    if not isinstance(files, list):
        return
    # A bucket is a list of one text.
    names = [
        name[0] if isinstance(name, list) and len(name) == 1 else name for name in files
    ]
    if all(isinstance(name, str) for name in names):
        counts = [_count(name) for name in names]
        yield from [sum(counts)] if names == files else counts


def _count(name: str) -> int:
    counts = [abs(int(high) - int(low)) + 1 for low, high in _RANGE.findall(name)]
    lists: list[str] = _CHOICE.findall(_RANGE.sub("", name))
    return prod(counts + [choice.count(",") + 1 for choice in lists])
