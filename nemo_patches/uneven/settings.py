"""The settings of uneven batches, checkpoints and the comparison of parameters, and the table of all settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from types import MappingProxyType
from typing import Any

from nemo_patches.stall import settings as stall_settings
from nemo_patches.sync import settings as sync_settings
from nemo_patches.sync.settings import CHECKPOINTS, Setting, SettingsError, number, word_setting
from nemo_patches.tracing import settings as trace_settings

STOCK, DEFERRED = "stock", "deferred"
TRAINING, EVALUATION = STAGES = ("training", "evaluation")
_MOST_STEPS = 1_000_000_000


def _whole(value: Any, most: int) -> int:
    """From a number or its text. Raises ValueError or TypeError."""
    if (found := number(value, 0, most)) != int(found):
        raise ValueError
    return int(found)


METRICS = word_setting(
    "metrics", (STOCK, DEFERRED), "stock: WER and BLEU wait for all ranks in every batch; deferred: once, at the end."
)
STOP_TOGETHER: Setting[tuple[str, ...]] = Setting(
    "stop_together",
    (),
    lambda value: trace_settings.chosen_words(value, STAGES),
    f"{', '.join(map(repr, STAGES))}, also both, with a comma",
    "Of whose loaders all ranks end a pass after the same number of batches: training, evaluation, or both.",
    lambda stages: ",".join(stages) or "none",
)
COMPARE = Setting(
    "compare",
    0,
    lambda value: _whole(value, _MOST_STEPS),
    f"a whole number of optimizer steps, 1 to {_MOST_STEPS}, or 0 (never)",
    "Optimizer steps, after each so many of which all ranks' parameters are compared; 0: never.",
)
SETTINGS: tuple[Setting[Any], ...] = (METRICS, STOP_TOGETHER, CHECKPOINTS, COMPARE)
ALL_SETTINGS = (*sync_settings.SETTINGS, *stall_settings.SETTINGS, *trace_settings.SETTINGS, *SETTINGS)  # apply()'s


@dataclass(frozen=True)
class UnevenSettings:
    """A field for each of SETTINGS, in their order. stop_together: of STAGES."""

    metrics: str = METRICS.default
    stop_together: tuple[str, ...] = STOP_TOGETHER.default
    checkpoints: str = CHECKPOINTS.default
    compare: int = COMPARE.default

    def items(self) -> Iterable[tuple[Setting[Any], Any]]:
        """Each setting of the table, with its value here."""
        return zip(SETTINGS, astuple(self), strict=True)

    def __str__(self) -> str:
        """What is not as by default."""
        return ", ".join(setting.shown(value) for setting, value in self.items() if value != setting.default)


def resolve(
    metrics: str | None = None,
    stop_together: str | Sequence[str] | None = None,
    checkpoints: str | None = None,
    compare: int | str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> UnevenSettings:
    """From keywords, else the environment, else the defaults. Raises SettingsError."""
    given = zip(SETTINGS, (metrics, stop_together, checkpoints, compare), strict=True)
    return UnevenSettings(*(setting.value(keyword, environment) for setting, keyword in given))


def refusals(given: Mapping[str, Any] = MappingProxyType({})) -> Iterator[SettingsError]:
    """Why apply() would refuse these keywords and this process's environment; one at most for each part of them."""
    parts: tuple[tuple[tuple[Setting[Any], ...], Callable[..., object]], ...] = (
        (sync_settings.SETTINGS, sync_settings.resolve),
        (stall_settings.SETTINGS, stall_settings.resolve),
        (trace_settings.SETTINGS, trace_settings.resolve),
        (SETTINGS, resolve),
    )
    for settings, resolve_part in parts:
        try:
            resolve_part(*(given.get(setting.name) for setting in settings))
        except SettingsError as error:
            yield error
