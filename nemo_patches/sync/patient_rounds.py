"""Rounds that wait for every rank without limit, and inform the watch: those of data loaders and checkpoints."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

from ..channel.extremes import Extremes, ExtremesRounds
from .events import Round, RoundsBegan, SyncHandle, WaitTimedOut, bus
from .length_sync import GroupSyncs, current
from .rank_log import report


class PatientRounds:
    """At most one outstanding: `issue`, then `result`. Both raise RoundFailed. Only the training thread calls them."""

    def __init__(
        self, group_syncs: GroupSyncs, title: str, key: str, late_text: str, place: Callable[[int], str]
    ) -> None:
        """key: the same on all ranks. late_text, place: for messages: what is waited for, and the name of a call."""
        self._rounds, self.waited = ExtremesRounds(group_syncs.channel, key), timedelta(0)
        self._handle = _Handle(title, key, group_syncs.group, self._rounds.last, late_text)
        self._handle.place = place
        self._outstanding: Round | None = None
        weakref.finalize(self, self._rounds.close).atexit = False
        bus.publish(RoundsBegan(self._handle))

    @property
    def is_outstanding(self) -> bool:
        return self._outstanding is not None

    def issue(self, value: int, call: int) -> None:
        round_ = Round(self._rounds.last.done + 1, call, training=True, length=0, in_time_at=self._handle.in_time_at)
        self._rounds.issue(value)
        self._handle.round = self._outstanding = round_  # after issue(), as EncoderSync does

    def result(self) -> Extremes:
        """The outstanding round's result. Waits for a late rank, and reports it."""
        assert self._outstanding is not None
        handle, round_, began_at, said = self._handle, self._outstanding, time.monotonic(), False
        handle.in_call = True
        try:
            while (extremes := self._rounds.wait(current().timeout)) is None:
                if not round_.gave_up_at:
                    round_.gave_up_at = time.monotonic()
                    late = handle.late(round_, round_.gave_up_at - round_.issued_at)
                    if not bus.publish(WaitTimedOut(handle, round_, None)):  # else the report names the rank
                        said = True
                        report(logging.WARNING, f"{handle.call_title(round_)}: {late}")
        finally:
            handle.in_call = False
            self.waited += timedelta(seconds=time.monotonic() - began_at)
        round_.came_at, self._outstanding = time.monotonic(), None
        if not round_.gave_up_at:
            handle.in_time_at = round_.came_at
        if said:
            late_s = round_.came_at - round_.issued_at
            report(logging.WARNING, f"{handle.title}: recovered: the missing word came {late_s:.2f} s late")
        return extremes

    def end(self, reason: str) -> None:
        """There will be no more."""
        self._handle.ended = reason
        self._rounds.close()


class _Handle(SyncHandle):
    place: Callable[[int], str]

    def call_title(self, round_: Round) -> str:
        return f"{self.title}: {self.place(round_.call)}"
