"""Inputs that NeMo's Lhotse loader refuses:
streams mixed with non-streamed sets, or a multi_config without its seeds.

One data loader cannot read both tar files and plain files, neither from one input_cfg nor from
several sets. And the section with the sets of a multi_config must have seed, shard_seed and
shuffle, which apply to all of them. The job stops at its start.
Link:
https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/common/data/lhotse/dataloader.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.datasets import ROLES
from nemo_patches.tools.doctor.finding import Findings, stops
from nemo_patches.tools.doctor.job import Job

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


def check(job: Job) -> Findings:
    """On any number of ranks."""
    for dataset in job.datasets:
        if dataset.lhotse and dataset.inputs.refused:
            inputs = dataset.get("input_cfg")
            what = f"{inputs.key} mixes streams with inputs that are none"
            yield stops(
                what, inputs, "inputs of one kind; docs/doctor.md has which are streams"
            )
    for keys, section in job.config.mappings():
        if not keys or keys[-1] not in ROLES or section.get("multi_config") is not True:
            continue
        switch = job.get((*keys, "multi_config"))
        where = ".".join(keys)
        missing = [key for key in _NEEDED if key not in section]
        if missing:
            what = f"{where}: multi_config without {', '.join(missing)}"
            yield stops(what, switch, f"{' and '.join(missing)}, beside multi_config")
        streams = {
            dataset.where: dataset.tarred
            for dataset in job.datasets
            if dataset.outer == keys
        }
        if True in streams.values() and False in streams.values():
            stream, plain = (
                next(name for name, is_one in streams.items() if is_one is kind)
                for kind in (True, False)
            )
            what = (
                f"multi_config cannot mix {stream}, a stream, and {plain}, which is"
                " none"
            )
            # A stream that is not repeated is read once, and then never again beside one that is.
            repeated = (
                f"{plain}.force_iterable_dataset: true, with its manifest_filepath as a"
                " list, which is repeated"
            )
            yield stops(
                what, switch, f"tar files or Shar for {plain}, too; or {repeated}"
            )
