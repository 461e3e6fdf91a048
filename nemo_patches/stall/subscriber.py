"""Stall reports for this process: subscribes to the sync's events, and has a stall monitor for the process group."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging

from ..sync.events import GroupBegan, bus
from ..sync.rank_log import report
from ..sync.settings import SettingsError
from .missing_rank import Stall
from .settings import SETTINGS as SETTINGS
from .settings import StallSettings, resolve
from .stall_monitor import SUBSCRIBER, StallMonitor
from .training_notes import TrainingNotes


class StallSubscriber:
    """From the first call of an encoder that syncs, a monitor watches the process group."""

    def __init__(self) -> None:
        self.monitor: StallMonitor | None = None  # of the present process group
        self._settings: StallSettings | None = None
        self._notes = TrainingNotes()

    def subscribe(self) -> None:
        bus.subscribe(SUBSCRIBER, {**self._notes.handlers(), GroupBegan: self._group_began})

    def use(self, settings: StallSettings, others: str) -> None:
        """These settings hold from the monitor's next look on."""
        self._settings, self._notes.other_settings = settings, others

    def settings_in_force(self) -> StallSettings:
        """Those of `use`, else the environment's. A bad variable is said once and not used."""
        if self._settings is None:
            try:
                self._settings = resolve()
            except SettingsError as error:
                self._settings = StallSettings()
                report(logging.ERROR, f"{error}; using {self._settings}")
        return self._settings

    def _group_began(self, event: GroupBegan) -> None:
        self.monitor = StallMonitor(event.group, self._notes, self.settings_in_force)
        self.monitor.start()


_subscriber = StallSubscriber()


def subscribe() -> None:
    """Report stalls from now on; a second time: nothing more."""
    _subscriber.subscribe()


def use(settings: StallSettings, others: str = "") -> None:
    """These settings hold for reports of stalls outside the encoder. others: what ranks are to have alike, too."""
    _subscriber.use(settings, others)


def settings_in_force() -> StallSettings:
    return _subscriber.settings_in_force()


def monitor() -> StallMonitor | None:
    """The monitor of the present (or last) process group; None before its first encoder call."""
    return _subscriber.monitor


def stalls() -> tuple[Stall, ...]:
    """The encoders' rounds that this rank waits for, or has given up, with the ranks that are missing from each."""
    return () if _subscriber.monitor is None else _subscriber.monitor.stalls()


def unannounced() -> tuple[int, ...]:
    """The ranks that have not announced themselves under the present process group: unpatched, or not here yet."""
    return () if _subscriber.monitor is None else _subscriber.monitor.roll_call.missing
