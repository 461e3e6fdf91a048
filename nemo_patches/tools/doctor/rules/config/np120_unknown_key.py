"""A key that Lightning 2's trainer refuses, or a misspelt one of an encoder or exp_manager.

Each stops the job at its start, as do keys of Lightning 1 (gpus, replace_sampler_ddp). In a data
set's section NeMo ignores unknown keys, and the doctor does not look at them.
Link: docs/doctor.md
"""

from __future__ import annotations

from collections.abc import Collection

from nemo_patches.tools.doctor import known_keys
from nemo_patches.tools.doctor.encoders import TAKEN, class_of
from nemo_patches.tools.doctor.finding import Findings, stops, warning
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import closest
from nemo_patches.tools.doctor.trees import Keys

BAD = """\
trainer: {gpus: 4}
model:
  encoder: {_target_: nemo.collections.asr.modules.ConformerEncoder, n_layer: 17}
"""
GOOD = BAD.replace("gpus", "devices").replace("n_layer", "n_layers")

# Of difflib: one or two letters in a key of usual length.
_AS_CLOSE = 0.88


def check(job: Job) -> Findings:
    """In the sections whose keys are known."""
    for keys, section in job.config.mappings():
        encoder = class_of(section.get("_target_"))
        if keys == ("trainer",) and job.has_trainer:
            yield from _of_trainer(job, section)
        elif keys == ("exp_manager",):
            yield from _close(job, keys, known_keys.EXP_MANAGER)
        elif encoder.removesuffix("Adapter") in known_keys.ENCODERS:
            yield from _close(job, keys, TAKEN[encoder])


def _of_trainer(job: Job, section: Collection[str]) -> Findings:
    for key in section:
        if key in known_keys.TRAINER:
            continue
        value = job.trainer(key)
        close = closest(key, known_keys.TRAINER - set(section), _AS_CLOSE)
        known = "is not known"
        instead = "no such key"
        if key in known_keys.TRAINER_1:
            known = "is not known any more"
            instead = known_keys.TRAINER_1[key]
        elif close:
            known = f"is not known, and looks like {close}"
            instead = f"{close}: {value.value}"
        yield warning(
            f"{value.key} {known}: Lightning's trainer stops the job at its start",
            value,
            instead,
        )


def _close(job: Job, keys: Keys, known: frozenset[str]) -> Findings:
    section = job.get(keys).value
    for key in section:
        close = "" if key in known else closest(key, known - set(section), _AS_CLOSE)
        if close and not key.startswith(f"{close}_") and not key.endswith(f"_{close}"):
            value = job.get((*keys, key))
            yield stops(
                f"{value.key} is not known, and looks like {close}",
                value,
                f"{close}: {value.value}",
            )
