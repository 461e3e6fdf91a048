"""A trainer that Lightning refuses: the job stops at its start.

A strategy, accelerator, precision, limit or clipping that does not exist, or settings that exclude
each other. Lightning 2 says so only once the job has its machines, and in some cases only when the
data are there.
Link: https://lightning.ai/docs/pytorch/stable/common/trainer.html#trainer-flags
"""

from __future__ import annotations

import re

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.finding import WARNING, Finding, Findings, warning
from nemo_patches.tools.doctor.job import Job, as_limit
from nemo_patches.tools.doctor.known_keys import (
    ACCELERATORS,
    CLIPPING,
    PRECISIONS,
    PROFILERS,
    STRATEGIES,
    TABLE,
    closest,
)

WORST = WARNING
BAD = """\
trainer: {devices: 4, strategy: null, limit_train_batches: 100, val_check_interval: 1000}
"""
GOOD = BAD.replace(
    "strategy: null, limit_train_batches: 100",
    "strategy: ddp, limit_train_batches: 1000",
)

_TIME = re.compile(r"\d+:\d+:\d+:\d+")
_SHARES = (
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "val_check_interval",
    "overfit_batches",
)
_OF_ROLE = {
    "training": ("limit_train_batches", "val_check_interval"),
    "validation": ("limit_val_batches",),
}


def check(job: Job) -> Findings:
    """On any number of ranks; only what the config has."""
    if not job.has_trainer:
        return
    yield from _names(job)
    yield from _numbers(job)
    yield from _validation_never_comes(job)
    yield from _share_of_no_length(job)


def _names(job: Job) -> Findings:
    strategy = job.trainer("strategy")
    name = strategy.value.lower() if isinstance(strategy.value, str) else strategy.value
    if not isinstance(name, dict):
        if strategy.given:
            yield from _no_such("strategy", strategy, ("auto", *STRATEGIES), name=name)
        if job.accelerator.value == "cpu" and str(name).startswith("fsdp"):
            yield _refused(
                f"{strategy.text} needs GPUs",
                (strategy, job.accelerator),
                "strategy: ddp",
            )
    elif "_target_" not in name:
        yield _refused(
            "strategy is a mapping without _target_",
            strategy,
            "strategy: ddp, or a _target_ in it",
        )
    if job.accelerator.given:
        yield from _no_such("accelerator", job.accelerator, ACCELERATORS)
    precision = job.trainer("precision")
    if precision.value is not None and "flash" not in str(precision.value):
        yield from _no_such("precision", precision, PRECISIONS)
    algorithm = job.trainer("gradient_clip_algorithm")
    if algorithm.value is not None:
        yield from _no_such(
            algorithm.key, algorithm, CLIPPING, name=str(algorithm.value).lower()
        )
    profiler = job.trainer("profiler")
    if isinstance(profiler.value, str):
        yield from _no_such("profiler", profiler, PROFILERS)


def _no_such(
    what: str, value: Value, known: tuple[str | int, ...], *, name: object = None
) -> Findings:
    """name: the value in lower case, where Lightning does not look at that."""
    if value.known and (name or value.value) not in known:
        words = [each for each in known if isinstance(each, str)]
        close = closest(str(value.value).lower(), words, likeness=0.6)
        instead = f"{value.key}: {close}" if close else f"one of {', '.join(words[:8])}"
        yield _refused(f"there is no {what} {value.text}", value, instead)


def _numbers(job: Job) -> Findings:
    for limit in map(job.trainer, _SHARES):
        if limit.known and as_limit(limit) is None:
            is_time = isinstance(limit.value, dict) or ":" in limit.text
            lightning = (
                "Lightning before 2.6"
                if is_time and "val_check" in limit.key
                else "Lightning"
            )
            instead = "a share from 0.0 to 1.0, or a whole number of batches"
            yield _refused(
                f"{limit.key} is {limit.text}", limit, instead, lightning=lightning
            )
    for key, taken in TABLE["numbers_of_trainer"].items():
        value = job.trainer(key)
        number = (
            value.value
            if isinstance(value.value, int) and taken["whole"]
            else value.number
        )
        enough = number is not None and number >= taken["least"]
        whole = isinstance(value.value, int) or not taken["whole"]
        none = value.value is None and taken["none"]
        if value.given and not none and not (enough and whole):
            yield from _is(value, taken["instead"])
    on_cpu = job.accelerator.value == "cpu" and job.devices.value in (None, -1, "-1")
    if not isinstance(job.devices.value, bool) and (
        job.devices.value in (0, "0", []) or on_cpu
    ):
        yield from _is(job.devices, "how many devices to use", job.accelerator)
    clip = job.trainer("gradient_clip_val")
    if not isinstance(clip.value, (int, float, type(None))):
        yield from _is(clip, "gradient_clip_val: a number")
    fast = job.trainer("fast_dev_run")
    if fast.number is not None and fast.number < 0:
        yield from _is(fast, "fast_dev_run: true, or how many batches")
    time = job.trainer("max_time")
    if isinstance(time.value, (int, float, str)) and not _TIME.fullmatch(
        str(time.value).strip()
    ):
        yield from _is(time, "max_time: DD:HH:MM:SS, as in 00:12:00:00")


def _is(value: Value, instead: str, *more: Value) -> Findings:
    """What the value is, and may not be."""
    if value.known:
        yield _refused(f"{value.key} is {value.text}", (value, *more), instead)


def _validation_never_comes(job: Job) -> Findings:
    limit = job.limit("training")
    interval = job.trainer("val_check_interval", 1.0)
    epochs = job.trainer("check_val_every_n_epoch", 1)
    fast = job.trainer("fast_dev_run", False)
    if not interval.known or not epochs.known:
        return
    batches = as_limit(interval)
    if epochs.value is None:
        if isinstance(batches, float) and interval.value is not None:
            what = (
                f"val_check_interval is {interval.text}, and without"
                " check_val_every_n_epoch it counts batches"
            )
            yield _refused(
                what, (interval, epochs), "val_check_interval: a whole number"
            )
    elif not isinstance(epochs.value, int):
        yield from _is(epochs, "a whole number, or null")
    elif (
        fast.off
        and isinstance(batches, int)
        and isinstance(limit.batches, int)
        and batches > limit.batches > 0
    ):
        what = (
            f"val_check_interval is {batches}, and an epoch has {limit.batches} batches"
        )
        instead = (
            "val_check_interval: no more than that; or check_val_every_n_epoch: null,"
            " to count on over epochs"
        )
        yield _refused(what, (interval, limit.read, epochs), instead)


def _share_of_no_length(job: Job) -> Findings:
    """Lhotse's sampler has no length, stream or not, and Lightning takes a share of that only if it
    is all.
    """
    if not job.trainer("fast_dev_run", False).off:
        return
    for dataset in job.datasets:
        for share in map(job.trainer, _OF_ROLE.get(dataset.role, ())):
            batches = as_limit(share)
            if (
                not dataset.lhotse
                or not share.known
                or not isinstance(batches, float)
                or batches >= 1
            ):
                continue
            if share.key == "trainer.val_check_interval":
                has_length = isinstance(job.limit("training").batches, int)
            else:
                has_length = not batches  # none at all
            if not has_length:
                what = (
                    f"Lhotse reads {dataset.where}, which has no length to take a share"
                    f" of: {share.key}"
                )
                yield _refused(
                    f"{what} is {share.text}",
                    (share, dataset.get("use_lhotse")),
                    "a whole number, or 1.0",
                )


def _refused(
    what: str,
    read: Value | tuple[Value, ...],
    instead: str,
    lightning: str = "Lightning",
) -> Finding:
    return warning(f"{what}: {lightning} stops the job at its start", read, instead)
