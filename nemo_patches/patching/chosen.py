"""What settings patch in addition to the encoders: deferred metrics, and checkpoints that all ranks agree on."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nemo_patches.patching.imported import drift
from nemo_patches.patching.replacements import Replacements
from nemo_patches.patching.settings import STOCK, OptionSettings
from nemo_patches.patching.targets import (
    CHECKPOINT_BASES,
    CHECKPOINT_TARGETS,
    METRIC_SUMS,
    METRIC_TARGETS,
    Target,
)


@dataclass(frozen=True)
class ChosenPatch:
    """Methods that are patched together, or not at all.

    setting: of OptionSettings; STOCK leaves them as they are. others: what else must look as expected.
    refusal: what cannot be done where something does not. left: what is then said under auto-apply.
    """

    setting: str
    targets: tuple[Target, ...]
    others: tuple[Target, ...]
    patch: Callable[[Replacements, Callable[[], bool]], None]
    refusal: str
    left: str

    def is_wanted(self, options: OptionSettings) -> bool:
        return bool(getattr(options, self.setting) != STOCK)

    def without(self, options: OptionSettings) -> OptionSettings:
        as_stock: dict[str, Any] = {self.setting: STOCK}
        return replace(options, **as_stock)

    def drift(self) -> dict[Target, str]:
        return drift(self.targets + self.others)


METRICS = ChosenPatch(
    "metrics",
    METRIC_TARGETS,
    METRIC_SUMS,
    Replacements.defer_metrics,
    "metrics cannot be deferred",
    "metrics are not deferred",
)
CHECKPOINTS = ChosenPatch(
    "checkpoints",
    CHECKPOINT_TARGETS,
    CHECKPOINT_BASES,
    Replacements.agree_on_checkpoints,
    "the ranks cannot agree on checkpoints (checkpoints=stock leaves NeMo's)",
    "each rank decides about checkpoints, as in stock",
)
ALL_CHOSEN = (METRICS, CHECKPOINTS)


def import_chosen(options: OptionSettings) -> None:
    """Import the modules to patch. A missing one is a drift."""
    for chosen in ALL_CHOSEN:
        for target in chosen.targets + chosen.others if chosen.is_wanted(options) else ():
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(target.module)
