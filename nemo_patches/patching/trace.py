"""The trace of this process. Its package is imported when the setting asks for it."""

from __future__ import annotations

import importlib
import sys

from nemo_patches.patching.replacements import Replacements
from nemo_patches.sync.settings import Settings

# What of patching/ imports tracing/.
_RECORDED = "nemo_patches.patching.recorded"


def import_wanted(settings: Settings) -> None:
    """Import what these settings switch on, before anything is changed. Raises ImportError."""
    if settings.trace:
        importlib.import_module(_RECORDED)


def use(settings: Settings, replacements: Replacements) -> None:
    """Begin or go on with the trace that these settings ask for; end it if there is none."""
    if not settings.trace:
        stop(replacements)
        return
    from nemo_patches.patching import recorded
    from nemo_patches.tracing.recorder import tracing

    tracing.use(settings)
    recorded.record(replacements)


def stop(replacements: Replacements) -> None:
    if _RECORDED in sys.modules:
        from nemo_patches.patching import recorded
        from nemo_patches.tracing.recorder import tracing

        tracing.stop()
        recorded.restore(replacements)


def where() -> str:
    """The file that is being written, or why there is none; empty without a trace."""
    if _RECORDED not in sys.modules:
        return ""
    from nemo_patches.tracing.recorder import tracing

    return tracing.where()
