"""Stall reports for this process: subscribes to the sync's events, and has a stall monitor for the process group."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from ..sync.events import GroupBegan, bus
from .missing_rank import Stall
from .stall_monitor import SUBSCRIBER, StallMonitor
from .training_notes import TrainingNotes


class StallSubscriber:
    """From the first call of an encoder that syncs, a monitor watches the process group."""

    def __init__(self) -> None:
        self.monitor: StallMonitor | None = None  # of the present process group
        self._notes = TrainingNotes()

    def subscribe(self) -> None:
        bus.subscribe(SUBSCRIBER, {**self._notes.handlers(), GroupBegan: self._group_began})

    def _group_began(self, event: GroupBegan) -> None:
        self.monitor = StallMonitor(event.group, self._notes)
        self.monitor.start()


_subscriber = StallSubscriber()


def subscribe() -> None:
    """Report stalls from now on; a second time: nothing more."""
    _subscriber.subscribe()


def monitor() -> StallMonitor | None:
    """The monitor of the present (or last) process group; None before its first encoder call."""
    return _subscriber.monitor


def stalls() -> tuple[Stall, ...]:
    """The encoders' rounds that this rank waits for, or has given up, with the ranks that are missing from each."""
    return () if _subscriber.monitor is None else _subscriber.monitor.stalls()


def unannounced() -> tuple[int, ...]:
    """The ranks that have not announced themselves under the present process group: unpatched, or not here yet."""
    return () if _subscriber.monitor is None else _subscriber.monitor.roll_call.missing
