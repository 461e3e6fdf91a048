"""A trainer that Lightning refuses: the job stops at its start.

A strategy, accelerator, precision, limit or clipping that does not exist, or settings that exclude
each other. Lightning 2 says so only once the job has its machines, and in some cases only when the
data are there.
Link: https://lightning.ai/docs/pytorch/stable/common/trainer.html#trainer-flags
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.finding import Findings, stops
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import TABLE, closest

BAD = """\
trainer: {devices: 4, strategy: null, limit_train_batches: 100, val_check_interval: 1000}
"""
GOOD = BAD.replace(
    "strategy: null, limit_train_batches: 100",
    "strategy: ddp, limit_train_batches: 1000",
)

_TIME = re.compile(r"\d+:\d+:\d+:\d+")


def check(job: Job) -> Findings:
    """On any number of ranks; only what the config has."""
    if not job.has_trainer:
        return
    for key, takes in TABLE["trainer_takes"].items():
        value = job.trainer(key)
        if value.given and value.known and not _is_taken(value, takes):
            names = [each for each in takes.get("names", ()) if isinstance(each, str)]
            close = closest(str(value.value).lower(), names, likeness=0.6)
            instead = f"{value.key}: {close}" if close else takes["instead"]
            yield stops(f"{value.key} is {value.text}", value, instead)
    yield from _devices(job)
    yield from _validation_never_comes(job)
    yield from _share_of_no_length(job)


def _is_taken(value: Value, takes: Mapping[str, Any]) -> bool:
    """takes: the entry of the table."""
    given = value.value
    if given is None:
        return bool(takes.get("none"))
    if isinstance(given, dict):
        return bool(takes.get("time")) or "_target_" in given
    if "names" in takes:
        name = given.lower() if takes.get("any_case") and value.named else given
        return name in takes["names"]
    if takes.get("time") and _TIME.fullmatch(str(given).strip()):
        return True
    if takes.get("share"):
        return value.batches is not None
    if isinstance(given, bool):
        return True
    whole = value.whole or not takes.get("whole")
    return whole and value.number is not None and value.number >= takes["least"]


def _devices(job: Job) -> Findings:
    on_cpu = job.accelerator.value == "cpu"
    if on_cpu and str(job.strategy.value).startswith("fsdp"):
        what = f"{job.strategy.text} needs GPUs"
        yield stops(what, (job.strategy, job.accelerator), "strategy: ddp")
    devices = job.devices
    none: tuple[Any, ...] = (0, "0", [], None, -1, "-1") if on_cpu else (0, "0", [])
    if devices.value in none and not isinstance(devices.value, bool):
        what = f"{devices.key} is {devices.text}"
        yield stops(what, (devices, job.accelerator), "how many devices to use")


def _validation_never_comes(job: Job) -> Findings:
    limit = job.limit("training")
    interval = job.trainer("val_check_interval", 1.0)
    epochs = job.trainer("check_val_every_n_epoch", 1)
    if epochs.value is None:
        if interval.value is not None and isinstance(interval.batches, float):
            yield stops(
                f"val_check_interval is {interval.text}, and without"
                " check_val_every_n_epoch it counts batches",
                (interval, epochs),
                "val_check_interval: a whole number",
            )
    elif epochs.known and job.trainer("fast_dev_run", False).off:
        after = interval.batches
        most = limit.batches
        if isinstance(after, int) and isinstance(most, int) and after > most > 0:
            yield stops(
                f"val_check_interval is {after}, and an epoch has {most} batches",
                (interval, limit, epochs),
                "val_check_interval: no more than that; or check_val_every_n_epoch:"
                " null, to count on over epochs",
            )


def _share_of_no_length(job: Job) -> Findings:
    """Lhotse's sampler has no length, stream or not, and Lightning takes a share of that only if it
    is all.
    """
    if not job.trainer("fast_dev_run", False).off:
        return
    counted = isinstance(job.limit("training").batches, int)
    for dataset in job.datasets:
        for share in map(job.trainer, TABLE["shares"].get(dataset.role, ())):
            part = share.batches
            fine = counted if share.keys[-1] == "val_check_interval" else not part
            if dataset.lhotse and not fine and isinstance(part, float) and part < 1:
                yield stops(
                    f"Lhotse reads {dataset.where}, which has no length to take a share"
                    f" of: {share.key} is {share.text}",
                    (share, dataset.get("use_lhotse")),
                    "a whole number, or 1.0",
                )
