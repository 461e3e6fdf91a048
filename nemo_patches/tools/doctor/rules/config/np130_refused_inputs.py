"""An input_cfg that NeMo refuses:
not a list of inputs, an input without a type, or weights for some inputs only.

NeMo reads a list of mappings, each with a type. A list of files is not accepted (one file may be
named, or a group for each). If one input has a weight, all must have one. The job stops at its
start.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/common/data/lhotse/cutset.py
"""

from __future__ import annotations

from typing import Any

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.finding import Findings, stops
from nemo_patches.tools.doctor.inputs import READS
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import closest
from nemo_patches.tools.doctor.trees import Keys

BAD = """\
model:
  train_ds:
    use_lhotse: true
    batch_size: 8
    input_cfg:
    - {type: nemo, manifest_filepath: a.json, weight: 2}
    - {type: nemo, manifest_filepath: b.json}
"""
GOOD = BAD.replace("manifest_filepath: b.json", "manifest_filepath: b.json, weight: 1")


def check(job: Job) -> Findings:
    """Each list once, also those of groups."""
    lists = {
        inputs.key: inputs
        for inputs in (each.get("input_cfg") for each in job.datasets if each.lhotse)
    }
    for inputs in lists.values():
        yield from _of_list(job, inputs)


def _of_list(job: Job, inputs: Value) -> Findings:
    if isinstance(inputs.value, dict) or inputs.value == []:
        what = "a mapping" if inputs.value else "empty"
        yield stops(
            f"{inputs.key} is {what}", inputs, "a list of inputs, each with a type"
        )
    if not isinstance(inputs.value, list):
        return
    for index, entry in enumerate(inputs.value):
        yield from _of_entry(job, (*inputs.keys, str(index)), entry)
    weights = [entry.get("weight") for entry in inputs.value if isinstance(entry, dict)]
    without = [str(index) for index, weight in enumerate(weights) if weight is None]
    if without and len(without) < len(weights):
        what = (
            f"{inputs.key}: inputs {', '.join(without)} have no weight, and others"
            " have one"
        )
        yield stops(what, inputs, "a weight for each, or for none")


def _of_entry(job: Job, keys: Keys, entry: Any) -> Findings:
    here = job.get(keys)
    if isinstance(entry, str):
        what = f"{here.key} is {entry}, and a list of files is no list of inputs"
        yield stops(what, here, f"{{type: group, input_cfg: {entry}}}")
    if not isinstance(entry, dict):
        return
    name = job.get((*keys, "type"))
    close = closest(str(name.value), READS)
    if name.value is None:
        types = "type: nemo, nemo_tarred, lhotse or lhotse_shar"
        yield stops(f"{here.key} has no type", here, types)
    elif name.value not in READS and close:
        what = f"{name.key}: there is no type {name.value}, and it looks like {close}"
        yield stops(what, name, close)
    elif name.value == "group":
        inner = job.get((*keys, "input_cfg"))
        if inner.value is None:
            what = f"{here.key} is a group without an input_cfg"
            yield stops(what, here, "an input_cfg with its inputs")
        yield from _of_list(job, inner)
