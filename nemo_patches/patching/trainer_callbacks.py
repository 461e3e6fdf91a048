"""Adds callbacks to Lightning's trainers: for the batch, exceptions and StopTogether.

An installed nemo_patches has `callbacks` as an entry point, which every trainer of the environment
asks, also in projects that have nothing to do with it: nothing of ours is imported where no setting
asks for it, and nothing raised into `Trainer()`. What is only on PYTHONPATH has no entry points:
there the import hook has `hook` called.

A trainer of the package pytorch_lightning, which takes no model of NeMo's, is given the first one.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nemo_patches.patching import (
    LIGHTNING,
    OTHER_LIGHTNING,
    is_one_of_several_ranks,
    is_ours,
    say_error,
)

_CALLBACK_IN = {
    LIGHTNING: "nemo_patches.patching.running_trainer",
    OTHER_LIGHTNING: "nemo_patches.patching.running_other_trainer",
}
_VARIABLE = "NEMO_PATCHES_STOP_TOGETHER"
# One of them, where ours is on.
_IN_FORCE = {
    "nemo_patches.patching.monkeypatch",
    "nemo_patches.patching.job_without_nemo",
}
_LOADS = "_load_external_callbacks"  # what Lightning's callback_connector calls for the group


def hook(
    connector: ModuleType, package: str, begin_reports: Callable[[], None]
) -> None:
    """Add callbacks to those that Lightning finds by itself, unless they are there.

    package: of Lightning's, that the connector is in.
    begin_reports: is called once a trainer has several ranks of which this process's launcher said
    nothing.
    """
    _this_process.begin_reports = begin_reports
    original = getattr(connector, _LOADS, None)
    if original is None:
        if os.environ.get(_VARIABLE):
            from nemo_patches.sync.rank_log import report

            text = f"{_VARIABLE} has no effect: this Lightning has no {_LOADS}"
            advice = "give the trainer a nemo_patches.lightning.StopTogether()"
            report(logging.ERROR, f"{text}; {advice}")
        return
    if hasattr(original, "nemo_patches_hook"):
        return

    @functools.wraps(original)
    def load(group: str) -> list[Any]:
        found = list(original(group))
        if group != f"{package}.callbacks_factory":
            return found
        kinds = {type(callback).__name__ for callback in found}
        added = _this_process.for_trainer(package)
        return found + [ours for ours in added if type(ours).__name__ not in kinds]

    load.nemo_patches_hook = True  # type: ignore[attr-defined]
    setattr(connector, _LOADS, load)


class _Callbacks:
    """Those of this process's trainers."""

    def __init__(self) -> None:
        self.begin_reports: Callable[[], None] | None = None  # under auto-apply
        self._failed = False
        self._has_said_what_is_missing = False

    def for_trainer(self, package: str = LIGHTNING) -> list[Any]:
        """The callbacks for a trainer that is being created; none after an error of ours, which is
        said once.
        """
        if self._failed:
            return []
        try:
            return self._by_settings(package)
        except Exception as error:
            if not is_ours(error):
                raise
            self._failed = True
            text = "no callback is added to Lightning's trainers"
            say_error(f"{text}: {type(error).__name__}: {error}")
            return []

    def _by_settings(self, package: str) -> list[Any]:
        in_force = _IN_FORCE.intersection(sys.modules) or os.environ.get(_VARIABLE)
        begin = None if is_one_of_several_ranks() else self.begin_reports
        if begin is None and not in_force:
            return []
        module = importlib.import_module(_CALLBACK_IN[package])
        found: list[Any] = [module.RunningTrainer(begin)]
        if in_force:
            from nemo_patches.patching import parts
            from nemo_patches.patching.monkeypatch import this_process

            settings = this_process.settings_for_trainers()
            if package == OTHER_LIGHTNING:
                if not self._has_said_what_is_missing:
                    self._has_said_what_is_missing = module.say_what_is_missing(
                        settings
                    )
                return found
            with_callbacks = parts.switched_on(settings, among=parts.WITH_CALLBACKS)
            found += [part.callback(settings) for part in with_callbacks]
        return found


_this_process = _Callbacks()
callbacks = _this_process.for_trainer
callbacks_of_pytorch_lightning = functools.partial(callbacks, OTHER_LIGHTNING)
