"""Begins the watch of a job without NeMo, in one of several ranks, once torch is imported.

Of ours it imports what watches, and not what patches: that imports half of torch.
"""

from __future__ import annotations

from nemo_patches.patching import admission
from nemo_patches.stall import subscriber
from nemo_patches.sync import length_sync
from nemo_patches.sync.settings import Settings, SettingsError


def begin() -> None:
    """With the environment's settings, unless there are others: of apply(), or of a watch that has
    begun.
    """
    if length_sync.has_settings():
        return
    try:
        if admission.disabled():
            return
        settings = Settings.resolve()
    except SettingsError as error:
        from nemo_patches.patching.monkeypatch import this_process

        this_process.refuse(None, error)
        return
    length_sync.use(settings)
    subscriber.subscribe()
