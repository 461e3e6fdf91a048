"""The settings of uneven batches and checkpoints: a table like the length sync's."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_patches.sync.settings import CHECKPOINTS, SettingsTable, word_setting
from nemo_patches.tracing.settings import words_setting

STOCK, DEFERRED = "stock", "deferred"
TRAINING, EVALUATION = STAGES = ("training", "evaluation")


@dataclass(frozen=True)
class UnevenSettings(SettingsTable):
    """What is done about ranks that have other batches or checkpoints. stop_together: of STAGES."""

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
