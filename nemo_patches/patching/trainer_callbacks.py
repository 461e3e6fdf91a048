"""Adds callbacks to Lightning's trainers: by the settings, to record exceptions, StopTogether and BatchCount.

An installed nemo_patches has `callbacks` as an entry point, which every trainer asks. What is only on PYTHONPATH has no
entry points: there the import hook has `hook` called. Both cost next to nothing where no setting asks for anything.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from types import ModuleType
from typing import Any

GROUP = "lightning.pytorch.callbacks_factory"
_VARIABLE = "NEMO_PATCHES_STOP_TOGETHER"
_LOADS = "_load_external_callbacks"  # what Lightning's callback_connector calls for the group


def callbacks() -> list[Any]:
    """The callbacks for a trainer that is being created."""
    if not os.environ.get(_VARIABLE) and "nemo_patches.patching.monkeypatch" not in sys.modules:
        return []
    from nemo_patches.patching.monkeypatch import this_process
    from nemo_patches.uneven.settings import EVALUATION, TRAINING

    settings = this_process.uneven_settings()
    found: list[Any] = []
    if this_process.traces():
        from nemo_patches.tracing.trainer_exceptions import TrainerExceptions

        found.append(TrainerExceptions())
    if stages := settings.stop_together:
        from nemo_patches.uneven.stop_together import StopTogether

        found.append(StopTogether(TRAINING in stages, EVALUATION in stages))
    if settings.compare:
        from nemo_patches.uneven.batch_count import BatchCount

        found.append(BatchCount())
    return found


def hook(connector: ModuleType) -> None:
    """Add `callbacks` to those that Lightning finds by itself, unless they are there."""
    original = getattr(connector, _LOADS, None)
    if original is None:
        if os.environ.get(_VARIABLE):
            from nemo_patches.sync.rank_log import report

            text = f"this Lightning has no {_LOADS}; give the trainer a nemo_patches.lightning.StopTogether()"
            report(logging.ERROR, f"{_VARIABLE} has no effect: {text}")
        return
    if hasattr(original, "nemo_patches_hook"):
        return

    @functools.wraps(original)
    def load(group: str) -> list[Any]:
        found = list(original(group))
        kinds = {type(callback).__name__ for callback in found}
        return found + [ours for ours in callbacks() if group == GROUP and type(ours).__name__ not in kinds]

    load.nemo_patches_hook = True  # type: ignore[attr-defined]
    setattr(connector, _LOADS, load)
