"""What the training thread does, noted from the sync's events on that thread, and read by the stall monitor's."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from ..sync import events
from ..sync.events import Group, Report, WatchedRounds
from . import stacks
from .rank_kinds import LENGTH_SYNC

GROWTH = "growth of the positional encoding"
FORWARD = "forward, after the length sync"


class LastCall(NamedTuple):
    """The latest encoder call of this process under a process group."""

    sync: WatchedRounds | None = None  # of the encoder
    call: int = 0  # of that encoder
    clock: tuple[int, int] = (0, 0)  # of that encoder, before the call: training calls, evaluation calls since
    calls: int = 0  # of all encoders
    since: float = 0.0  # time.monotonic() at which it began; 0.0 before the first
    thread: int = 0
    native_thread: int = 0  # the kernel's number of it
    place: tuple[str, str] = ("", "")  # the function that called the length sync: file and name
    training: bool = True

    def in_forward(self) -> bool:
        """Whether the encoder's forward, which made this call, is still running."""
        return stacks.runs(self.thread, self.place)


class TrainingNotes:
    """The notes of this process. Only the training thread writes them; values are replaced as a whole."""

    def __init__(self) -> None:
        self.last = LastCall()
        self.other_settings = ""  # settings of upper layers that must match on all ranks
        self.may_be_uneven = False  # whether the user allows ranks to have fewer batches of an evaluation than others
        self.is_reverted = False  # NeMo is stock again: calls that are not seen are not a stall
        self._growing = False
        self.end_promises: queue.SimpleQueue[Future[Report]] = queue.SimpleQueue()
        self._places: dict[WatchedRounds, tuple[str, str]] = {}  # the function that called each: file and name

    def syncs(self, group: Group) -> list[WatchedRounds]:
        """Those of one process group, including those of encoders that were just deleted."""
        return [sync for sync in list(self._places) if sync.group is group]

    def allows_uneven(self) -> bool:
        return self.may_be_uneven

    def forget_calls(self) -> None:
        """As before the first."""
        self.last, self._growing = LastCall(), False

    def phase(self) -> str:
        """Of the last call; empty before the first."""
        sync = self.last.sync
        if sync is None:
            return ""
        return LENGTH_SYNC if sync.in_call else GROWTH if self._growing else FORWARD

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """For the event bus."""
        return {
            events.CallBegan: self._call_began,
            events.GrowthBegan: self._growth_began,
            events.Grown: self._grown,
            events.WaitTimedOut: self._wait_timed_out,
            events.SyncEnded: self._sync_ended,
            events.RoundsBegan: self._rounds_began,
        }

    def _call_began(self, event: events.CallBegan) -> None:
        self._growing = False  # also where a growth has raised
        sync, place = event.sync, self._place_of(event.sync)
        calls, threads = self.last.calls + 1, (threading.get_ident(), threading.get_native_id())
        self.last = LastCall(sync, event.call, event.clock, calls, time.monotonic(), *threads, place, event.training)

    def _rounds_began(self, event: events.RoundsBegan) -> None:
        self._place_of(event.sync)

    def _growth_began(self, _: events.GrowthBegan) -> None:
        self._growing = True

    def _grown(self, _: events.Grown) -> None:
        self._growing = False

    def _wait_timed_out(self, event: events.WaitTimedOut) -> None:
        self._place_of(event.sync)
        _promise(event.report)

    def _sync_ended(self, event: events.SyncEnded) -> None:
        if event.report is not None:
            _promise(event.report)
            self.end_promises.put(event.report)

    def _place_of(self, sync: WatchedRounds) -> tuple[str, str]:
        place = self._places.get(sync)
        if place is None:
            # When an encoder is new, forget those that were deleted.
            kept = {sync: place for sync, place in self._places.items() if not sync.is_settled}
            place = kept[sync] = stacks.encoder_function()
            self._places = kept
        return place


def _promise(report: Future[Report] | None) -> None:
    if report is not None:
        report.set_running_or_notify_cancel()
