"""A trainer that Lightning refuses: the job stops at its start.

A strategy, accelerator, precision, limit or clipping that does not exist, or settings that exclude each other.
Lightning 2 says so only once the job has its machines, and in some cases only when the data are there.
Link: https://lightning.ai/docs/pytorch/stable/common/trainer.html#trainer-flags
"""

from __future__ import annotations

import re
from difflib import get_close_matches

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.finding import WARNING, Finding, Findings, warning
from nemo_patches.tools.doctor.job import Job, as_limit
from nemo_patches.tools.doctor.known_keys import ACCELERATORS, CLIPPING, PRECISIONS, PROFILERS, STRATEGIES

WORST = WARNING
BAD = """\
trainer: {devices: 4, strategy: null, limit_train_batches: 100, val_check_interval: 1000}
"""
GOOD = BAD.replace("strategy: null, limit_train_batches: 100", "strategy: ddp, limit_train_batches: 1000")

_TIME = re.compile(r"\d+:\d+:\d+:\d+")
_SHARES = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "val_check_interval", "overfit_batches")
_OF_ROLE = {"training": ("limit_train_batches", "val_check_interval"), "validation": ("limit_val_batches",)}


def check(job: Job) -> Findings:
    """On any number of ranks; only what the config has."""
    if not job.has_trainer:
        return
    yield from _names(job)
    yield from _numbers(job)
    yield from _others(job)
    yield from _validation_never_comes(job)
    yield from _share_of_no_length(job)


def _names(job: Job) -> Findings:
    strategy, accelerator, precision = (job.trainer(key) for key in ("strategy", "accelerator", "precision"))
    name = strategy.value.lower() if isinstance(strategy.value, str) else strategy.value
    if isinstance(name, dict):
        if "_target_" not in name:
            yield _refused("strategy is a mapping without _target_", strategy, "strategy: ddp, or a _target_ in it")
    elif strategy.given and strategy.known and name not in ("auto", *STRATEGIES):
        yield _refused(f"there is no strategy {strategy.text}", strategy, _one_of(strategy, ("auto", *STRATEGIES)))
    elif job.accelerator.value == "cpu" and str(name).startswith("fsdp"):
        yield _refused(f"{strategy.text} needs GPUs", (strategy, job.accelerator), "strategy: ddp")
    if accelerator.given and accelerator.known and accelerator.value not in ACCELERATORS:
        what = f"there is no accelerator {accelerator.text}"
        yield _refused(what, accelerator, _one_of(accelerator, ACCELERATORS))
    if precision.known and precision.value not in (None, *PRECISIONS) and "flash" not in str(precision.value):
        yield _refused(f"there is no precision {precision.text}", precision, _one_of(precision, PRECISIONS))


def _numbers(job: Job) -> Findings:
    for limit in map(job.trainer, _SHARES):
        if limit.known and as_limit(limit) is None:
            instead = "a share from 0.0 to 1.0, or a whole number of batches"
            is_time = isinstance(limit.value, dict) or ":" in limit.text
            lightning = "Lightning before 2.6" if is_time and "val_check" in limit.key else "Lightning"
            yield _refused(f"{limit.key} is {limit.text}", limit, instead, lightning)
    for count in map(job.trainer, ("max_steps", "max_epochs")):
        null = count.value is None and count.key.endswith("epochs")
        if count.given and count.known and not null and (count.number is None or count.number < -1):
            yield _refused(f"{count.key} is {count.text}", count, "a whole number, or -1 for no limit")
    nodes, devices = job.trainer("num_nodes", 1), job.devices
    if nodes.known and (not isinstance(nodes.value, int) or nodes.value < 1):
        yield _refused(f"{nodes.key} is {nodes.text}", nodes, "a whole number, 1 or more")
    on_cpu = job.accelerator.value == "cpu" and devices.value in (None, -1, "-1")
    if not isinstance(devices.value, bool) and (devices.value in (0, "0", []) or on_cpu):
        yield _refused(f"{devices.key} is {devices.text}", (devices, job.accelerator), "how many devices to use")


def _others(job: Job) -> Findings:
    clip, algorithm = job.trainer("gradient_clip_val"), job.trainer("gradient_clip_algorithm")
    if clip.known and not isinstance(clip.value, (int, float, type(None))):
        yield _refused(f"{clip.key} is {clip.text}", clip, "gradient_clip_val: a number")
    if algorithm.known and algorithm.value is not None and str(algorithm.value).lower() not in CLIPPING:
        yield _refused(f"there is no {algorithm.key} {algorithm.text}", algorithm, _one_of(algorithm, CLIPPING))
    profiler, fast, time = (job.trainer(key) for key in ("profiler", "fast_dev_run", "max_time"))
    if isinstance(profiler.value, str) and profiler.value not in PROFILERS:
        yield _refused(f"there is no profiler {profiler.text}", profiler, _one_of(profiler, PROFILERS))
    if fast.number is not None and fast.number < 0:
        yield _refused(f"{fast.key} is {fast.text}", fast, "fast_dev_run: true, or how many batches")
    no_time = isinstance(time.value, str) and not _TIME.fullmatch(time.value.strip())
    if time.known and (no_time or isinstance(time.value, (int, float))):
        yield _refused(f"{time.key} is {time.text}", time, "max_time: DD:HH:MM:SS, as in 00:12:00:00")
    reload_ = job.trainer("reload_dataloaders_every_n_epochs", 0)
    if reload_.known and (not isinstance(reload_.value, int) or reload_.value < 0):
        yield _refused(f"{reload_.key} is {reload_.text}", reload_, "a whole number, 0 for never")


def _validation_never_comes(job: Job) -> Findings:
    limit, interval = job.limit("training"), job.trainer("val_check_interval", 1.0)
    epochs, fast = job.trainer("check_val_every_n_epoch", 1), job.trainer("fast_dev_run", False)
    if not interval.known or not epochs.known:
        return
    batches = as_limit(interval)
    if epochs.value is None:
        if isinstance(batches, float) and interval.value is not None:
            what = f"val_check_interval is {interval.text}, and without check_val_every_n_epoch it counts batches"
            yield _refused(what, (interval, epochs), "val_check_interval: a whole number")
    elif not isinstance(epochs.value, int):
        yield _refused(f"{epochs.key} is {epochs.text}", epochs, "a whole number, or null")
    elif (
        fast.value is False
        and isinstance(batches, int)
        and isinstance(limit.batches, int)
        and batches > limit.batches > 0
    ):
        what = f"val_check_interval is {batches}, and an epoch has {limit.batches} batches"
        instead = "val_check_interval: no more than that; or check_val_every_n_epoch: null, to count on over epochs"
        yield _refused(what, (interval, limit.read, epochs), instead)


def _share_of_no_length(job: Job) -> Findings:
    """Lhotse's sampler has no length, stream or not, and Lightning takes a share of that only if it is all."""
    fast = job.trainer("fast_dev_run", False)
    for dataset in job.datasets if fast.value is False else ():
        for share in map(job.trainer, _OF_ROLE.get(dataset.role, ())):
            if dataset.lhotse and share.known and isinstance(batches := as_limit(share), float) and batches < 1:
                if not batches and share.key != "trainer.val_check_interval":
                    continue  # none at all
                if share.key == "trainer.val_check_interval" and isinstance(job.limit("training").batches, int):
                    continue  # the limit is the epoch's length
                what = f"Lhotse reads {dataset.where}, which has no length to take a share of: {share.key}"
                yield _refused(f"{what} is {share.text}", (share, dataset.get("use_lhotse")), "a whole number, or 1.0")


def _refused(what: str, read: Value | tuple[Value, ...], instead: str, lightning: str = "Lightning") -> Finding:
    return warning(f"{what}: {lightning} stops the job at its start", read, instead)


def _one_of(value: Value, known: tuple[str | int, ...]) -> str:
    names = [name for name in known if isinstance(name, str)]
    close = get_close_matches(str(value.value).lower(), names, 1)
    return f"{value.key}: {close[0]}" if close else f"one of {', '.join(names[:8])}"
