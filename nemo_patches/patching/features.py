"""The features that start and stop with the patches: one object per room, over which Patching iterates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_patches.patching.settings import DEFERRED, AllSettings
from nemo_patches.stall import subscriber
from nemo_patches.sync import length_sync
from nemo_patches.tracing.dump import dumps
from nemo_patches.tracing.recorder import tracing
from nemo_patches.tracing.settings import STDERR


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
    tracing.length_sync_changed(settings.sync)
    if tracing.recorder is None or tracing.recorder.settings != settings.trace:
        tracing.stop()
        if settings.trace.folder:
            tracing.start(settings.trace)


def _start_dumps(settings: AllSettings) -> None:
    if settings.trace.folder in (None, STDERR):  # there is no file of the calls
        dumps.start(settings.trace.dump)
    else:
        dumps.stop()


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
TRACING = Feature(_start_tracing, tracing.stop, lambda: {"trace_file": tracing.where()})
DUMPS = Feature(_start_dumps, dumps.stop, dict)

# Started before NeMo's methods are patched, so that the first patched call finds its settings, and stopped after they
# are restored, so that no call goes on unseen. The stall reports' settings stand in a trace's header.
BEFORE_PATCHES = (SYNC, STALL_REPORTS)
# Started after NeMo's methods are patched, and stopped before they are restored. Tracing stops first, too: its hook for
# exceptions came with the first encoder call, and is around that of the dumps.
AFTER_PATCHES = (TRACING, DUMPS)
# Of a job that trains with Lightning and has no encoder of NeMo's.
WITHOUT_PATCHES = (*BEFORE_PATCHES, DUMPS)
