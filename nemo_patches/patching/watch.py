"""Begins the watch of a job without NeMo, in one of several ranks, once torch is imported.

Of ours it imports what watches, and not what patches: that imports half of torch.
"""

from __future__ import annotations

from dataclasses import replace

from nemo_patches.patching import admission
from nemo_patches.patching.features import BEFORE_PATCHES
from nemo_patches.patching.settings import AllSettings, OptionSettings
from nemo_patches.sync.settings import SettingsError
from nemo_patches.watch import subscriber


def begin() -> None:
    """With the environment's settings, unless there are others: of apply(), or of a watch that has
    begun.
    """
    if subscriber.has_settings():
        return
    try:
        if admission.disabled():
            return
        settings = AllSettings.resolve()
    except SettingsError as error:
        from nemo_patches.patching.monkeypatch import this_process

        this_process.refuse(None, error)
        return
    # Metrics and checkpoints are as in stock until NeMo is imported.
    settings = replace(settings, options=OptionSettings())
    for feature in BEFORE_PATCHES:
        feature.start(settings)
