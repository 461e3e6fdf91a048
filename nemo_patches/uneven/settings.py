"""The settings of uneven batches, checkpoints and the comparison of parameters: a table like the length sync's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_patches.sync.settings import CHECKPOINTS, Setting, SettingsTable, number, word_setting, words_setting

STOCK, DEFERRED = "stock", "deferred"
TRAINING, EVALUATION = STAGES = ("training", "evaluation")
_MOST_STEPS = 1_000_000_000


def _steps(value: Any) -> int:
    """From a number or its text. Raises ValueError or TypeError."""
    if (found := number(value, 0, _MOST_STEPS)) != int(found):
        raise ValueError
    return int(found)


@dataclass(frozen=True)
class UnevenSettings(SettingsTable):
    """What is done about ranks that have other batches, checkpoints or parameters. stop_together: of STAGES."""

    metrics: str = word_setting(
        "metrics",
        (STOCK, DEFERRED),
        "stock: WER and BLEU wait for all ranks in every batch; deferred: once, at the end.",
    ).as_field()
    stop_together: tuple[str, ...] = words_setting(
        "stop_together",
        STAGES,
        "also both, with a comma",
        "Loaders whose passes end on all ranks after the same number of batches: training, evaluation, or both.",
    ).as_field()
    checkpoints: str = CHECKPOINTS.as_field()
    compare: int = Setting(
        "compare",
        0,
        _steps,
        f"a whole number of optimizer steps, 1 to {_MOST_STEPS}, or 0 (never)",
        "Compare all ranks' parameters each time after this many optimizer steps; 0: never.",
    ).as_field()
