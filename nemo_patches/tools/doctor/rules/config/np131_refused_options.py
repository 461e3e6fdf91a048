"""Options of a data set that NeMo's Lhotse loader refuses:
unknown values, or options that exclude each other.

A seed is a whole number, trng or randomized; a set can be forced to be a map or an iterable, but
not both. The job stops when it creates its data loaders, or at its first batch.
Link:
https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/common/data/lhotse/dataloader.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.finding import Findings, stops
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import TABLE

BAD = """\
model:
  train_ds: {use_lhotse: true, manifest_filepath: a.json, batch_size: 8, shard_seed: random}
"""
GOOD = BAD.replace("shard_seed: random", "shard_seed: randomized")


def check(job: Job) -> Findings:
    """On any number of ranks."""
    said: set[str] = set()
    for dataset in job.datasets:
        for finding in _of(dataset) if dataset.lhotse else ():
            # Of a multi_config, what counts for all its sets.
            if finding.read[0].key not in said:
                said.add(finding.read[0].key)
                yield finding
    for section in job.multi_configs:
        fusions = TABLE["sampler_fusions"]
        fusion = section.get("sampler_fusion", "round_robin")
        weights = section.get("sampler_weights")
        if fusion.known and fusion.value not in fusions:
            what = f"{fusion.key} is {fusion.text}"
            yield stops(what, fusion, f"one of {', '.join(fusions)}")
        if fusion.value == "randomized_round_robin" and isinstance(weights.value, dict):
            sets = [each.keys[-1] for each in job.datasets if each.outer == section]
            without = [name for name in sets if name not in weights.value]
            if without:
                what = f"{weights.key} has no {' and no '.join(without)}"
                yield stops(what, weights, "a weight for each set")


def _of(dataset: Dataset) -> Findings:
    for key, taken in TABLE["words_of_options"].items():
        words = taken["words"]
        word = dataset.get(key, words[0])
        used = [dataset.get(other) for other in taken.get("used_with", ())]
        whole = taken.get("whole", False)
        fits = word.value in words or (whole and isinstance(word.value, int))
        if word.known and not fits and all(each.value is not None for each in used):
            choice = f"one of {', '.join(words)}"
            if whole:
                choice = f"a whole number, {' or '.join(words)}"
            what = f"{word.key} is {word.text}"
            yield stops(what, (word, *used), f"{key}: {choice}")
    to_map = dataset.get("force_map_dataset")
    to_iterable = dataset.get("force_iterable_dataset")
    if to_map.on and to_iterable.on:
        what = f"{to_map.key} and {to_iterable.key} exclude each other"
        yield stops(what, (to_map, to_iterable), "one of them")
    shuffle = dataset.get("shuffle")
    if shuffle.given and shuffle.value is None:
        yield stops(f"{shuffle.key} is null", shuffle, "shuffle: true or false")
