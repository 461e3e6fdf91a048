"""Inputs that NeMo's Lhotse loader refuses:
streams mixed with non-streamed sets, or a multi_config without its seeds.

One data loader cannot read both tar files and plain files, neither from one input_cfg nor from
several sets. And the section with the sets of a multi_config must have seed, shard_seed and
shuffle, which apply to all of them. The job stops at its start.
Link:
https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/common/data/lhotse/dataloader.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import Findings, stops
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import TABLE

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


def check(job: Job) -> Findings:
    """On any number of ranks."""
    for dataset in job.datasets:
        if dataset.lhotse and dataset.inputs.refused:
            inputs = dataset.get("input_cfg")
            what = f"{inputs.key} mixes streams with inputs that are none"
            yield stops(
                what, inputs, "inputs of one kind; docs/doctor.md has which are streams"
            )
    for section in job.multi_configs:
        switch = section.get("multi_config")
        missing = [
            key for key in TABLE["sets"]["needed_for_all"] if not section.get(key).given
        ]
        if missing:
            what = f"{section.where}: multi_config without {', '.join(missing)}"
            yield stops(what, switch, f"{' and '.join(missing)}, beside multi_config")
        sets = [dataset for dataset in job.datasets if dataset.outer == section]
        stream = next((each.where for each in sets if each.tarred), "")
        plain = next((each.where for each in sets if each.tarred is False), "")
        if stream and plain:
            # A stream that is not repeated is read once, and then never again beside one that is.
            yield stops(
                f"multi_config cannot mix {stream}, a stream, and {plain}, which is"
                " none",
                switch,
                f"tar files or Shar for {plain}, too; or"
                f" {plain}.force_iterable_dataset: true, with its manifest_filepath as a"
                " list, which is repeated",
            )
