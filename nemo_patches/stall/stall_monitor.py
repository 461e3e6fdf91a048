"""Sees that this rank waits, or is waited for, and says who is missing and what it does: one daemon thread per process.

The thread itself never calls the job's store, because an answer may take minutes where a network is cut, and so may
what has no answer: queries run in short-lived threads and heartbeats leave from another (store_client.py), and what is
not answered in time is reported without it.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

from ..sync.events import Group, bus
from ..sync.length_sync import current
from .call_watchdog import CallWatchdog
from .census import Census
from .encoder_watch import EncoderWatch
from .heartbeat import PERIOD_ON_A_FILE_S, Heartbeat, period_for_s
from .job_stall import JobStallWatch
from .late_return import LateReturn
from .log_line import report
from .missing_query import MissingQuery, Surroundings
from .missing_rank import Stall
from .own_heartbeat import OwnHeartbeat
from .rank_text import LEFT
from .roll_call import RollCall
from .settings import StallSettings
from .store_client import StoreClient
from .sync_end_report import SyncEndReport
from .training_notes import EncoderNotes, TrainingNotes

SUBSCRIBER = "the stall monitor"
_TICK_S, _TICK_IN_A_STALL_S, _SHORTEST_TICK_S = 0.25, 0.05, 0.02


class StallMonitor:
    """The monitor of one process group on this rank; it ends with the group. Its thread alone writes the fields."""

    def __init__(self, group: Group, notes: TrainingNotes, settings: Callable[[], StallSettings]) -> None:
        self._settings = settings
        self.client = StoreClient(group.store)
        self._group, self._notes = group, notes
        self._own_heartbeat = OwnHeartbeat(group, notes, settings)
        self.roll_call = RollCall(group, self.client, self._own_heartbeat, settings, self._has_stall)
        period_s = PERIOD_ON_A_FILE_S if group.store.is_file else period_for_s(group.size)
        self._surroundings = Surroundings(
            group.rank,
            group.size,
            period_s,
            self.client,
            lambda: self.roll_call.introduction,
            lambda: notes.may_be_uneven,
        )
        self._watches: dict[EncoderNotes, EncoderWatch] = {}
        self._end_report = SyncEndReport(self._surroundings, notes.end_promises)
        self._late_return = LateReturn(group.rank, self.client, notes)
        self._watchdog = CallWatchdog(notes)
        progress = self._own_heartbeat.progress
        self._job_stall = JobStallWatch(notes, self._surroundings, progress, self._make_heartbeat, self._send_heartbeat)
        self._next_heartbeat_at = 0.0
        self.latest: Heartbeat | None = None  # of this rank
        self._roll_call_thread = threading.Thread()  # the latest; `ident` is None until one has started
        self._exiting = False  # written at exit, and in a forked child
        self._thread = threading.Thread(target=self._loop, name="nemo_patches stall monitor", daemon=True)
        _monitors.add(self)

    def start(self) -> None:
        self._thread.start()

    def stalls(self) -> tuple[Stall, ...]:
        """The rounds that were reported and have not come; where one has failed, who has gone; a job that stalls."""
        reports = [
            self._end_report.stall(),
            self._job_stall.stall(),
            *(watch.stall() for watch in list(self._watches.values())),
        ]
        return tuple(stall for stall in reports if stall is not None)

    def stop(self) -> None:
        """End the threads at their next look."""
        self._exiting = True

    def join(self, limit: timedelta) -> None:
        """At exit: wait for the threads' ends, for a short while."""
        self.client.join([self._thread], limit)

    def stop_listening(self) -> None:
        if (listener := self.roll_call.listener) is not None:
            listener.close()

    def _stopped(self) -> bool:
        return self._exiting or self._group.closed

    def _has_stall(self) -> bool:
        """Whether a round is late enough to be looked into."""
        return any(watch.busy for watch in list(self._watches.values()))

    # What follows runs in the monitor's thread.

    def _call_roll(self) -> None:
        roll_call = self.client.ask_in_thread(lambda: self.roll_call.run(self._stopped), "nemo_patches roll call")
        self._roll_call_thread = roll_call

    def _loop(self) -> None:
        try:
            while not self._stopped():
                self._tick()
                time.sleep(self._pause_s())
            self._tick(is_last=True)
            self._send_heartbeat(LEFT)
        except Exception as error:
            bus.unsubscribe(SUBSCRIBER)  # so that the sync logs its late rounds itself
            report(logging.ERROR, f"{SUBSCRIBER} has ended by an error of its own, please report it: {error!r}")
        finally:
            self._late_return.cancel()
            for query in self._queries():
                query.cancel()
            self.stop_listening()
            self.client.disconnect()

    def _pause_s(self) -> float:
        timeout, settings = current().timeout, self._settings()
        limits = (settings.call_timeout, settings.stall_timeout)
        shortest = min([timeout, *(limit for limit in limits if limit)]).total_seconds()
        return max(min(_TICK_IN_A_STALL_S if self._has_stall() else _TICK_S, shortest / 8), _SHORTEST_TICK_S)

    def _tick(self, is_last: bool = False) -> None:
        now, settings = time.monotonic(), self._settings()
        timeout_s = current().timeout.total_seconds()
        where = self.latest.where if self.latest is not None else ""
        came_back = not is_last and self._late_return.look(timeout_s / 2, where)
        for query in self._queries():
            query.look_after_the_store()
        if not is_last and (self.roll_call.is_outdated or self._roll_call_thread.ident is None):
            self._call_roll()
        if now >= self._next_heartbeat_at or came_back:
            self._send_heartbeat()
        self._watch_encoders(now, timeout_s, is_last)
        self._end_report.look(is_last)
        if (listener := self.roll_call.listener) is not None:
            listener.answer(self._make_heartbeat)
        self._watchdog.look(now, settings.call_timeout.total_seconds())
        self._job_stall.look(time.monotonic(), settings, is_last)

    def _queries(self) -> list[MissingQuery | Census]:
        in_watches = [query for watch in self._watches.values() for query in watch.queries()]
        return [*self._end_report.queries(), *in_watches, *self._job_stall.censuses()]

    def _watch_encoders(self, now: float, timeout_s: float, is_last: bool) -> None:
        known = self._notes.encoders(self._group)
        for notes in known:
            if notes not in self._watches:
                self._watches[notes] = EncoderWatch(notes, self._surroundings, self._send_heartbeat)
        forgotten = set(self._watches).difference(known)
        for notes, watch in list(self._watches.items()):
            if notes.sync.has_failed() and not is_last:
                self._end_report.ended(notes.sync, now)
            watch.look(now, timeout_s, is_last)
            if notes in forgotten and not watch.busy:
                del self._watches[notes]

    def _make_heartbeat(self, phase: str = "") -> Heartbeat:
        return self._own_heartbeat.make(self.roll_call.listener, phase)

    def _send_heartbeat(self, phase: str = "") -> None:
        if not self.roll_call.has_announced:  # else one from before the port may hide the first
            return
        self.latest = heartbeat = self._make_heartbeat(phase)
        self.client.send(heartbeat)
        self._next_heartbeat_at = time.monotonic() + self._surroundings.period_s


_monitors: weakref.WeakSet[StallMonitor] = weakref.WeakSet()


def _at_exit() -> None:
    for monitor in list(_monitors):
        monitor.stop()
    for monitor in list(_monitors):
        monitor.join(timedelta(seconds=0.6))


def _in_forked_child() -> None:
    for monitor in list(_monitors):
        monitor.stop()
        monitor.stop_listening()  # the parent's port


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_forked_child)
