"""Begins stall reports of a job without NeMo, in one of several ranks, once torch is imported.

Of ours it imports what watches, and not what patches: that imports half of torch.
"""

from __future__ import annotations

import logging
import sys

from nemo_patches.patching import COLLECTION, TARGET_MODULES, admission
from nemo_patches.sync import length_sync
from nemo_patches.sync.rank_log import report
from nemo_patches.sync.settings import Settings, SettingsError
from nemo_patches.watch import subscriber


def begin() -> None:
    """With the environment's settings, unless there are others: of apply(), or of reports that have
    begun.
    """
    if length_sync.has_settings():
        return
    try:
        if admission.is_disabled():
            return
        settings = Settings.resolve()
    except SettingsError as error:
        from nemo_patches.patching.monkeypatch import this_process

        this_process.refuse(None, error)
        return
    length_sync.use(settings)
    if settings.trace:
        subscriber.subscribe(_NothingTraced().say)
    else:
        subscriber.subscribe()


class _NothingTraced:
    """Says once that a trace of this rank is not there, which the user has asked for, and why."""

    def __init__(self) -> None:
        self._said = False

    def say(self) -> None:
        if self._said or any(
            name in sys.modules for name in (COLLECTION, *TARGET_MODULES)
        ):
            return
        self._said = True
        report(
            logging.WARNING,
            "nothing is traced: a trace has NeMo's encoder calls, and NeMo's ASR"
            " collection is not imported; stall reports watch the job, and"
            " `nemo-patches diagnose` on its hosts needs no trace",
        )
