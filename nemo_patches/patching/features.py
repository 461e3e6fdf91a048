"""The features that start and stop with the patches: one object per room, over which Patching iterates."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_patches.patching.settings import DEFERRED, AllSettings
from nemo_patches.sync import length_sync
from nemo_patches.watch import subscriber

_TRACING = "nemo_patches.tracing.recorder"
_FORWARD = "nemo_patches.tracing.recorded_forward"


@dataclass(frozen=True)
class Feature:
    """start: with these settings; while it runs, it goes on with them. status: its fields of Status."""

    start: Callable[[AllSettings], None]
    stop: Callable[[], None]
    status: Callable[[], dict[str, Any]]


def _start_stall_reports(settings: AllSettings) -> None:
    subscriber.use(settings.stall, str(settings.options), settings.options.metrics == DEFERRED)
    subscriber.subscribe()


def _start_tracing(settings: AllSettings) -> None:
    if settings.trace.folder:
        from nemo_patches.tracing.recorder import tracing

        tracing.use(settings.trace)
    else:
        _stop_tracing()


def _stop_tracing() -> None:
    if _TRACING in sys.modules:
        from nemo_patches.tracing.recorder import tracing

        tracing.stop()


def _trace_status() -> dict[str, Any]:
    if _TRACING not in sys.modules:
        return {}
    from nemo_patches.tracing.recorder import tracing

    return {"trace_file": tracing.where()}


def import_wanted(settings: AllSettings) -> None:
    """Import what these settings switch on, before anything is changed. Raises ImportError."""
    if settings.trace.folder:
        importlib.import_module(_FORWARD)


SYNC = Feature(
    lambda settings: length_sync.use(settings.sync),
    lambda: None,  # the patched methods are its end
    lambda: {"settings": length_sync.current(), "encoders": length_sync.counters()},
)
STALL_REPORTS = Feature(
    _start_stall_reports,
    subscriber.encoders_were_reverted,
    lambda: {
        "stall_settings": subscriber.settings_in_force(),
        "unannounced": subscriber.unannounced(),
        "stalls": subscriber.stalls(),
    },
)
TRACING = Feature(_start_tracing, _stop_tracing, _trace_status)

# Started before NeMo's methods are patched, so that the first patched call finds its settings, and stopped after they
# are restored, so that no call goes on unseen. The stall reports' settings stand in a trace's header.
BEFORE_PATCHES = (SYNC, STALL_REPORTS)
# Started after NeMo's methods are patched, and stopped before they are restored.
AFTER_PATCHES = (TRACING,)
