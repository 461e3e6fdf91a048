"""The callback of running_trainer.py, for trainers of the package pytorch_lightning."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pytorch_lightning import Callback

from nemo_patches.patching import LIGHTNING, OTHER_LIGHTNING
from nemo_patches.patching.trainer_begins import TrainerBegins

if TYPE_CHECKING:
    from nemo_patches.sync.settings import Settings

# What is left as it was where a trainer takes no callback of a setting's.
_LEFT = {
    "trace": "a trainer's exceptions are not in the trace",
    "stop_together": "a pass ends as in stock",
}


class RunningTrainer(TrainerBegins, Callback):  # type: ignore[misc]  # Lightning is not looked into
    """Where a launcher pickles its trainer, it is found by its name."""


def say_what_is_missing(settings: Settings) -> bool:
    """Log it, if a setting wants more of such a trainer. Returns whether one does."""
    # A trainer of which no setting wants anything imports none of these.
    from nemo_patches.patching import parts
    from nemo_patches.sync.rank_log import report

    problems = [
        f"{setting}: {left}"
        for setting, left in _LEFT.items()
        if parts.is_on(setting, settings)
    ]
    if problems:
        text = f"a trainer of {OTHER_LIGHTNING} takes no callback of ours"
        advice = f"import {LIGHTNING} in its place"
        report(logging.ERROR, f"{text}. {'; '.join(problems)}; {advice}")
    return bool(problems)
