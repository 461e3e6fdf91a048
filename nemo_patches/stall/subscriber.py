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
    """From the first encoder call on, a monitor watches the process group."""

    def __init__(self) -> None:
        self._monitor: StallMonitor | None = None
        self._settings: StallSettings | None = None
        self._notes = TrainingNotes()

    def subscribe(self) -> None:
        """Report stalls from now on; a second time: nothing more."""
        bus.subscribe(SUBSCRIBER, {**self._notes.handlers(), GroupBegan: self._group_began})

    def use(self, settings: StallSettings, others: str = "", may_be_uneven: bool = False) -> None:
        """These settings hold from the monitor's next look on. others: what ranks are to have alike, too.

        may_be_uneven: whether ranks may have fewer batches of an evaluation than others.
        """
        self._settings, self._notes.other_settings, self._notes.may_be_uneven = settings, others, may_be_uneven

    def encoders_were_reverted(self) -> None:
        """Their calls are not seen any more, which is no stall."""
        self._notes.forget_calls()

    def settings_in_force(self) -> StallSettings:
        """Those of `use`, else the environment's. A bad variable is said once and not used."""
        if self._settings is None:
            try:
                self._settings = resolve()
            except SettingsError as error:
                self._settings = StallSettings()
                report(logging.ERROR, f"{error}; using {self._settings}")
        return self._settings

    def monitor(self) -> StallMonitor | None:
        """The monitor of the present (or last) process group; None before its first encoder call."""
        return self._monitor

    def stalls(self) -> tuple[Stall, ...]:
        """The encoders' rounds that this rank waits for, or has given up, with the ranks that are missing from each."""
        return () if self._monitor is None else self._monitor.stalls()

    def unannounced(self) -> tuple[int, ...]:
        """The ranks that have not announced themselves under that process group: unpatched, or not here yet."""
        own = self._monitor.latest if self._monitor is not None else None
        return () if self._monitor is None or (own and own.tells_that_all_sync()) else self._monitor.roll_call.missing

    def _group_began(self, event: GroupBegan) -> None:
        self._monitor = StallMonitor(event.group, self._notes, self.settings_in_force)
        try:
            self._monitor.start()
        except RuntimeError as error:  # as many threads as this user or container may have
            bus.unsubscribe(SUBSCRIBER)  # so that the sync logs its late rounds itself
            report(logging.WARNING, f"there are no stall reports of this rank, training goes on: {error}")


process = StallSubscriber()
subscribe, use, settings_in_force = process.subscribe, process.use, process.settings_in_force
monitor, stalls, unannounced = process.monitor, process.stalls, process.unannounced
encoders_were_reverted = process.encoders_were_reverted
