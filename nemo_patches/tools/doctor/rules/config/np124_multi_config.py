"""A multi_config that NeMo's Lhotse loader refuses: without its seeds, or with streams beside sets that are none.

The section that holds the sets must have seed, shard_seed and shuffle, which count for all of them; and one data loader
cannot read tar files and plain files at once. The job stops at its start.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/common/data/lhotse/dataloader.py
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.datasets import ROLES
from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.job import Job

WORST = Severity.WARNING
BAD = """\
data:
  train_ds:
    multi_config: true
    asr: {manifest_filepath: a.json, batch_size: 8}
"""
GOOD = """\
data:
  train_ds:
    multi_config: true
    seed: 42
    shard_seed: randomized
    shuffle: true
    asr: {manifest_filepath: a.json, batch_size: 8}
"""

_NEEDED = ("seed", "shard_seed", "shuffle")


def check(job: Job) -> Iterator[Finding]:
    """On any number of ranks."""
    for keys, section in job.config.mappings():
        if not keys or keys[-1] not in ROLES or section.get("multi_config") is not True:
            continue
        switch, where = job.config.get((*keys, "multi_config")), ".".join(keys)
        missing = [key for key in _NEEDED if key not in section]
        if missing:
            what = f"{where}: multi_config without {', '.join(missing)}: the job stops at its start"
            yield Finding(Severity.WARNING, what, (switch,), f"{' and '.join(missing)}, beside multi_config")
        streams = {dataset.where: dataset.tarred for dataset in job.datasets if dataset.outer == keys}
        if True in streams.values() and False in streams.values():
            stream, plain = (next(name for name, is_one in streams.items() if is_one is kind) for kind in (True, False))
            what = f"multi_config cannot mix {stream}, a stream, and {plain}, which is none: the job stops at its start"
            yield Finding(Severity.WARNING, what, (switch,), f"{plain}.force_iterable_dataset: true")
