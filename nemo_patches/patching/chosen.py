"""What settings patch in addition to the encoders: imports options/, by setting."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from nemo_patches.patching.imported import drift
from nemo_patches.patching.replacements import Replacements
from nemo_patches.patching.targets import CHECKPOINT_BASES, CHECKPOINT_TARGETS, Target
from nemo_patches.sync.rank_log import raised_by_signal_handler, rank_and_size, report
from nemo_patches.sync.settings import (
    AGREED,
    DEFERRED,
    EVALUATION,
    STOCK,
    TRAINING,
    Settings,
)

# Of NeMo's checkpoint callback, its own and inherited ones; the functions in their place are
# options/checkpoints.py's.
_CHECKPOINT_METHODS = (
    "setup",
    "_monitor_candidates",
    "on_save_checkpoint",
    "on_train_end",
)
_Method = Callable[..., Any]
_AS_STOCK = "each rank decides about checkpoints, as in stock"


@dataclass(frozen=True)
class ChosenPatch:
    """Methods that are patched together, or not at all.

    setting: its name; STOCK leaves them as they are. others: what else must look as expected.
    refusal: what cannot be done where something does not. left: what is then said under auto-apply.
    """

    setting: str
    targets: tuple[Target, ...]
    others: tuple[Target, ...]
    patch: Callable[[Replacements, Callable[[], bool]], None]
    refusal: str
    left: str

    def is_wanted(self, settings: Settings) -> bool:
        return bool(getattr(settings, self.setting) != STOCK)

    def without(self, settings: Settings) -> Settings:
        as_stock: dict[str, Any] = {self.setting: STOCK}
        return replace(settings, **as_stock)

    def drift(self) -> dict[Target, str]:
        return drift(self.targets + self.others)


class FirstUse:
    """Has NeMo's checkpoint callback ask options/checkpoints.py, which is imported when several
    ranks first use it.
    """

    def __init__(self) -> None:
        self._cannot = False  # a rank that has missed the first question must ask none

    def wrapper(self, original: _Method, in_force: Callable[[], bool]) -> _Method:
        @functools.wraps(original)
        def method(callback: Any, *args: Any, **more: Any) -> Any:
            ours = None
            if in_force() and rank_and_size()[1] > 1:
                ours = self._method(original.__name__)
            if ours is None:
                return original(callback, *args, **more)
            return ours(original, callback, *args, **more)

        return method

    def _method(self, name: str) -> _Method | None:
        if self._cannot:
            return None
        try:
            from nemo_patches.options import checkpoints
        except Exception as error:
            if raised_by_signal_handler(error):
                raise
            self._cannot = True
            text = "nemo_patches cannot import its part for them"
            report(logging.ERROR, f"{_AS_STOCK}: {text}: {error!r}")
            return None
        return checkpoints.METHODS[name]


def _agree_on_checkpoints(
    replacements: Replacements, in_force: Callable[[], bool]
) -> None:
    """Make NeMo's checkpoint callback take rank 0's decisions, unless it does so already."""
    target = CHECKPOINT_TARGETS[0]
    owner = target.find_owner(sys.modules[target.module])
    if owner is not None and not replacements.has(owner):
        first_use = FirstUse()
        for name in _CHECKPOINT_METHODS:
            replacements.put(
                owner, name, first_use.wrapper(getattr(owner, name), in_force)
            )


CHECKPOINTS = ChosenPatch(
    setting="checkpoints",
    targets=CHECKPOINT_TARGETS,
    others=CHECKPOINT_BASES,
    patch=_agree_on_checkpoints,
    refusal="the ranks cannot agree on checkpoints (checkpoints=stock leaves NeMo's)",
    left=_AS_STOCK,
)


def wanted(settings: Settings) -> tuple[ChosenPatch, ...]:
    """What these settings patch. Imports what is ours of it, and raises what that raises."""
    patches = []
    if settings.metrics == DEFERRED:
        from nemo_patches.patching import deferred, metric_targets

        patches.append(
            ChosenPatch(
                setting="metrics",
                targets=metric_targets.METRIC_TARGETS,
                others=metric_targets.METRIC_SUMS,
                patch=deferred.defer,
                refusal="metrics cannot be deferred",
                left="metrics are not deferred",
            )
        )
    if settings.checkpoints == AGREED:
        patches.append(CHECKPOINTS)
    return tuple(patches)


def load(settings: Settings) -> tuple[ChosenPatch, ...]:
    """Import all of ours that these settings need; return what they patch.

    Raises what that raises.
    """
    if settings.stop_together:
        trainer_callback(settings)
    return wanted(settings)


def import_targets(patches: Iterable[ChosenPatch]) -> None:
    """NeMo's modules. One that is missing is a drift."""
    for patch in patches:
        for target in patch.targets + patch.others:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(target.module)


def trainer_callback(settings: Settings) -> Any:
    """For each of Lightning's trainers, with stop_together."""
    from nemo_patches.options.stop_together import StopTogether

    stages = settings.stop_together
    return StopTogether(training=TRAINING in stages, evaluation=EVALUATION in stages)


def stop() -> None:
    """After a revert: what has begun in the meantime is given back."""
    metrics = sys.modules.get("nemo_patches.options.deferred_metrics")
    if metrics is not None:
        metrics.deferred_metrics.stop()
