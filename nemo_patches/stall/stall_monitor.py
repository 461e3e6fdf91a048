"""The watch of one process group: notices that this rank waits, or is waited for, and reports the missing ranks.

The thread itself waits for no other rank: it hands its questions to the exchange, and what is not answered in time is
reported without it.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

from ..channel import process_hooks
from ..channel.exchange import Exchange
from ..channel.process_hooks import AtExit, InForkedChild
from ..sync.events import Group, WatchedRounds, observers
from ..sync.length_sync import current
from ..sync.settings import Settings
from ..text import first_line
from .encoder_watch import EncoderWatch
from .job_socket import JobSocket
from .job_stall import JobStallWatch
from .late_return import LateReturn
from .log_line import report
from .looks import Look, Looks
from .missing_rank import Stall
from .own_state import OwnState
from .progress import Progress
from .report_file import ReportFile, as_json
from .roll_call import RollCall
from .sync_end_report import SyncEndReport
from .torch_knows import FlightRecording
from .training_notes import TrainingNotes

SUBSCRIBER = TrainingNotes.name
_TICK_S, _TICK_IN_A_STALL_S, _SHORTEST_TICK_S = 0.25, 0.05, 0.02
_EXIT_S = 0.8  # at exit, for the last report


class StallMonitor:
    """The monitor of one process group on this rank; it ends with the group. One thread calls `run`, and alone writes
    the fields."""

    def __init__(
        self, group: Group, exchange: Exchange, notes: TrainingNotes, settings: Callable[[], Settings]
    ) -> None:
        self.group = group
        self.exchange = exchange
        self._notes = notes
        self._settings = settings
        self.progress = Progress(notes)
        self._own_state = OwnState(group, notes, self.progress, settings)
        self._late_return = LateReturn(group, notes)
        self.looks = Looks(exchange, self._own_state.make, self._wake, self._late_return.heard)
        look = self.looks.begin
        self.roll_call = RollCall(group, exchange, notes, look, self._has_late_round, self.stalls)
        self._watches: dict[WatchedRounds, EncoderWatch] = {}
        self._end_report = SyncEndReport(exchange, group.size, look)
        report_file = ReportFile(group.rank, group.store_port)
        self.job_stall = JobStallWatch(notes, group.rank, group.size, self.progress, look, report_file)
        self._socket: JobSocket | None = None
        self._visitors: list[tuple[socket.socket, Look, FlightRecording]] = []
        self._wakes = -1  # a file that wakes the thread
        self._wakes_lock = threading.Lock()  # so that none writes to a file that has this one's number next
        try:
            self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            report(logging.WARNING, f"this rank's stall reports are slow: {first_line(error)}")
        exchange.watch = self.looks
        exchange.start()
        self._exiting = False  # written at exit, and in a forked child
        self._thread: threading.Thread | None = None  # that runs this
        _monitors.add(self)

    def stalls(self) -> tuple[Stall, ...]:
        """The reported rounds that have not completed; the ranks that have died, if one failed; a stall of the job."""
        reports = [
            self._end_report.stall(),
            self.job_stall.stall(),
            *(watch.stall() for watch in list(self._watches.values())),
        ]
        return tuple(stall for stall in reports if stall is not None)

    def stop(self) -> None:
        """End the thread at its next look."""
        self._exiting = True
        self._wake()

    def join(self, limit: timedelta) -> None:
        """At exit: wait for the thread's end, for a short while."""
        with contextlib.suppress(RuntimeError):  # it is the calling one
            if self._thread is not None:
                self._thread.join(limit.total_seconds())

    def forget(self) -> None:
        """In a forked child: close its copies of the parent's files."""
        self._exiting = True
        self._wakes_lock = threading.Lock()  # a thread of the parent's may have held it
        if self._socket is not None:
            self._socket.forget()
        if self._wakes >= 0:
            os.close(self._wakes)
            self._wakes = -1

    def _wake(self) -> None:
        """Any thread: make the monitor look at once."""
        with self._wakes_lock:
            if self._wakes >= 0:
                os.eventfd_write(self._wakes, 1)

    def _stopped(self) -> bool:
        return self._exiting or self.group.closed

    def _has_late_round(self) -> bool:
        """Whether a round is late enough to be looked into."""
        return any(watch.busy for watch in list(self._watches.values()))

    # What follows runs in the monitor's thread.

    def run(self) -> None:
        """Until the process group ends."""
        self._thread = threading.current_thread()
        try:
            self._begin()
            while not self._stopped():
                self._tick()
                self._wait(self._pause_s())
            self._tick(is_last=True)
        except Exception as error:
            observers.remove(SUBSCRIBER)  # so that the sync logs its late rounds itself
            report(logging.ERROR, f"{SUBSCRIBER} has ended by an error of its own, please report it: {error!r}")
        finally:
            self.looks.cancel()
            self._end()

    def _begin(self) -> None:
        try:
            self._socket = JobSocket(self.group.rank, self.group.store_port)
        except Exception as error:  # not an OSError where others' class is in the place of Python's socket
            report(logging.INFO, f"`nemo-patches diagnose --job` cannot ask this rank: {first_line(error)}")

    def _end(self) -> None:
        for visitor, _, _ in self._visitors:
            visitor.close()
        if self._socket is not None:
            self._socket.close()
        with self._wakes_lock:
            if self._wakes >= 0:
                os.close(self._wakes)
            self._wakes = -1

    def _wait(self, pause_s: float) -> None:
        """Sleep until a question or an answer comes, at most this long."""
        poll = select.poll()
        if self._wakes >= 0:
            poll.register(self._wakes, select.POLLIN)
        if self._socket is not None:
            poll.register(self._socket.listener, select.POLLIN)
        if poll.poll(1000 * pause_s):
            with contextlib.suppress(BlockingIOError, OSError):
                os.eventfd_read(self._wakes)

    def _pause_s(self) -> float:
        timeout = current().timeout
        shortest = min(timeout, self._settings().stall_timeout or timeout).total_seconds()
        is_busy = self._has_late_round() or self.looks.is_busy
        return max(min(_TICK_IN_A_STALL_S if is_busy else _TICK_S, shortest / 8), _SHORTEST_TICK_S)

    def _tick(self, is_last: bool = False) -> None:
        now = time.monotonic()
        settings = self._settings()
        timeout_s = current().timeout.total_seconds()
        is_over = is_last or self._notes.is_reverted
        if not is_over:
            self.job_stall.look_at_this_rank(now, settings)  # before anything tells of it
        self.looks.tick(now)
        self._late_return.look()
        self._watch_encoders(now, timeout_s, is_last)
        if not is_last:
            self.roll_call.look(now)  # after the rounds: a late one is reported with the same ranks
        self._end_report.look(now, is_last)
        self.job_stall.look(time.monotonic(), settings, is_over)
        self._answer_visitors()

    def _watch_encoders(self, now: float, timeout_s: float, is_last: bool) -> None:
        known = self._notes.syncs(self.group)
        for sync in known:
            if sync not in self._watches:
                uneven = self._notes.allows_uneven
                self._watches[sync] = EncoderWatch(sync, self.group.rank, self.group.size, self.looks.begin, uneven)
        forgotten = set(self._watches).difference(known)
        for sync, watch in list(self._watches.items()):
            if sync.has_failed() and not is_last:
                self._end_report.ended(sync)
            watch.look(now, timeout_s, is_last)
            if sync in forgotten and not watch.busy:
                del self._watches[sync]

    def _answer_visitors(self) -> None:
        if self._socket is None:
            return
        for visitor in self._socket.visitors():
            self._visitors.append((visitor, self.looks.begin(), FlightRecording()))
        for visitor, look, recording in [one for one in self._visitors if one[1].is_done and one[2].is_done]:
            answer = self.job_stall.answer(look.found, time.monotonic())
            self._socket.answer(visitor, as_json(answer, recording.wait()))
            self._visitors.remove((visitor, look, recording))


_monitors: weakref.WeakSet[StallMonitor] = weakref.WeakSet()


def _at_exit() -> None:
    # If another rank ended first, this one's collective has failed because of that: which one, its report says.
    leaving = [monitor for monitor in list(_monitors) if monitor.job_stall.leaves]
    for monitor in list(_monitors):
        monitor.stop()
    for monitor in list(_monitors):
        monitor.join(timedelta(seconds=_EXIT_S))
    for monitor in leaving:
        monitor.job_stall.leave()


def _in_forked_child() -> None:
    for monitor in list(_monitors):
        monitor.forget()


process_hooks.run(AtExit.STALL_MONITORS, _at_exit)
process_hooks.run(InForkedChild.STALL_MONITORS, _in_forked_child)
