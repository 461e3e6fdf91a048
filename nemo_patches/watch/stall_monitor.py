"""The watch of one process group:
notices that this rank waits, or is waited for, and reports the missing ranks.

The thread itself waits for no other rank: it hands its questions to the exchange, and what is not
answered in time is reported without it.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from time import sleep
from typing import TYPE_CHECKING

import torch.distributed

from ..channel import process_hooks
from ..channel.exchange import Exchange
from ..channel.process_hooks import AtExit, InForkedChild
from ..channel.waker import Waker
from ..facts import CAN_PAGE
from ..sync.length_sync import current
from ..sync.rounds import Group, WatchedRounds
from ..sync.settings import Settings
from ..text import first_line
from .all_ranks import AllRanks
from .job_socket import JobSocket
from .late_modules import LateModules
from .log_line import report
from .looks import Heard, Looks
from .own_facts import OwnFacts
from .progress import Progress
from .training_notes import TrainingNotes
from .unjudged import Unjudged

if TYPE_CHECKING:
    from ..judging.missing_rank import Stall
    from .reports import Reports

_TICK_S = 0.25
_TICK_IN_A_STALL_S = 0.05
_SHORTEST_TICK_S = 0.02
_EXIT_S = 0.8  # at exit, for the last report
# At exit, for the exchange to learn which rank has died.
_DEATH_S = 0.4
_UNLIKELY_S = 0.1  # a healthy end waits so long


class StallMonitor:
    """The monitor of one process group on this rank; it ends with the group. One thread calls
    `run`, and alone writes the fields."""

    def __init__(
        self,
        group: Group,
        exchange: Exchange,
        notes: TrainingNotes,
        settings: Callable[[], Settings],
        late: LateModules,
    ) -> None:
        self.group = group
        self.exchange = exchange
        self._notes = notes
        self._settings = settings
        self._late = late
        self.progress = Progress(notes, late, self._ranks_here)
        self._own_facts = OwnFacts(
            group, notes, self.progress, settings, late, self._page
        )
        self.looks = Looks(exchange, self._own_facts.make, self._wake, self._heard)
        self.all_ranks = AllRanks(group, exchange, notes, self.looks.begin)
        self.reports: Reports | None = None  # until there is something to judge
        self._unjudged = Unjudged(self.progress, self.looks.begin)
        # Outlives its destruction in a DDP module; None: destroyed just now.
        world = torch.distributed.group.WORLD
        self._world: Callable[[], object] = (
            weakref.ref(world) if world is not None else lambda: None
        )
        self._socket: JobSocket | None = None
        self._waker: Waker | None = None  # while the thread runs
        exchange.watch = self.looks
        exchange.on_death = self._wake
        exchange.start()
        # Such a process leaves without atexit. Before the exchange says that it does.
        if multiprocessing.parent_process() is not None:
            process_hooks.at_last(_at_exit)
        self._exiting = False  # written at exit, and in a forked child
        self._end_of_run: threading.Event | None = None  # once a thread runs this
        _monitors.add(self)

    def stalls(self) -> tuple[Stall, ...]:
        return self.reports.stalls() if self.reports is not None else ()

    def unannounced(self) -> tuple[int, ...]:
        return self.reports.roll_call.missing if self.reports is not None else ()

    def stop(self) -> None:
        """End the thread at its next look."""
        self._exiting = True
        self._wake()

    def join(self, limit: timedelta) -> None:
        """At exit: wait for the end of run(), for a short while. Its thread goes on, for the next
        process group.
        """
        if self._end_of_run is not None:
            self._end_of_run.wait(limit.total_seconds())

    def forget(self) -> None:
        """In a forked child: close its copies of the parent's files."""
        self._exiting = True
        self._end_of_run = None
        if self._socket is not None:
            self._socket.forget()
        self._waker = None

    def _wake(self) -> None:
        """Any thread: make the monitor look at once."""
        waker = self._waker  # its file lives at least until this returns
        if waker is not None:
            waker.wake()

    def _ranks_here(self) -> frozenset[int]:
        return self.looks.ranks_here() or frozenset()

    def _page(self) -> str:
        return self.reports.job_stall.page if self.reports is not None else CAN_PAGE

    def _stopped(self) -> bool:
        return self._exiting or self.group.closed

    # What follows runs in the monitor's thread.

    def run(self) -> None:
        """Until the process group ends."""
        self._end_of_run = threading.Event()
        try:
            self._begin()
            while not self._stopped():
                self._tick()
                self._wait(self._pause_s())
            if self._exiting:
                self._wait_for_a_death()
            self._tick(is_last=True)
        except Exception as error:
            self._leave_to_the_sync()
            report(
                logging.ERROR,
                "the stall monitor has ended by an error of its own, please report it:"
                f" {error!r}",
            )
        finally:
            self.looks.cancel()
            self._end()
            self._end_of_run.set()

    def _begin(self) -> None:
        try:
            self._waker = Waker()
        except OSError as error:
            report(
                logging.WARNING,
                f"this rank's stall reports are slow: {first_line(error)}",
            )
        self._late.read()
        try:
            self._socket = JobSocket(self.group.rank, self.group.store_port)
        # Not an OSError where others' class is in the place of Python's socket.
        except Exception as error:
            report(
                logging.INFO,
                f"`nemo-patches diagnose --job` cannot ask this rank: {first_line(error)}",
            )

    def _end(self) -> None:
        if self.reports is not None:
            self.reports.close()
        if self._socket is not None:
            self._socket.close()
        self._waker = None

    def _wait(self, pause_s: float) -> None:
        """Sleep until a question or an answer comes, at most this long."""
        poll = select.poll()
        if self._waker is not None:
            poll.register(self._waker.file, select.POLLIN)
        if self._socket is not None:
            poll.register(self._socket.listener, select.POLLIN)
        for sending in self.reports.sending if self.reports is not None else ():
            poll.register(sending.visitor, select.POLLOUT)
        if poll.poll(1000 * pause_s) and self._waker is not None:
            with contextlib.suppress(OSError):  # it was not this that woke
                self._waker.rest()

    def _pause_s(self) -> float:
        timeout = current().timeout
        shortest = min(
            timeout, self._settings().stall_timeout or timeout
        ).total_seconds()
        is_busy = self.looks.is_busy or (
            self.reports is not None and self.reports.has_late_round()
        )
        return max(
            min(_TICK_IN_A_STALL_S if is_busy else _TICK_S, shortest / 8),
            _SHORTEST_TICK_S,
        )

    def _tick(self, is_last: bool = False) -> None:
        now = time.monotonic()
        settings = self._settings()
        limit_s = settings.stall_timeout.total_seconds()
        is_over = (
            is_last
            or self._notes.is_reverted
            or self._notes.is_broken
            or torch.distributed.group.WORLD is not self._world()
        )
        if limit_s and not is_over:
            self.progress.look(now, limit_s)
        self.looks.tick(now)
        if self.reports is None and self._is_to_judge(now, limit_s, is_last):
            self._make_reports(now, limit_s)
        if self.reports is not None:
            self.reports.look(
                settings, self.all_ranks, is_last=is_last, is_over=is_over
            )
            if self._socket is not None:
                self.reports.answer(self._socket.listener)
        if is_last:
            self.all_ranks.end()
        else:
            self.all_ranks.look(now)

    def _is_to_judge(self, now: float, limit_s: float, is_last: bool) -> bool:
        """Whether there may be something to say, or somebody asks."""
        timeout_s = current().timeout.total_seconds()
        first_call_at = self.all_ranks.first_call_at
        return (
            (limit_s > 0 and now - self.progress.stepped_at >= limit_s / 4)
            or any(
                _is_late(sync, now, timeout_s) for sync in self._notes.syncs(self.group)
            )
            or (
                first_call_at > 0
                and now - first_call_at >= timeout_s / 2
                and not self.exchange.is_joined
            )
            or self.exchange.any_died
            or (self._socket is not None and self._socket.has_visitors())
            or (is_last and _has_raised())
        )

    def _wait_for_a_death(self) -> None:
        """This process ends: maybe since a collective has failed, because another rank has died.

        The exchange hears of that at once, but not before Gloo does. A lost connection, and an
        exception that ends this process, are signs of it; sys.exit() after one shows none.
        """
        began = time.monotonic()
        exchange = self.exchange
        while exchange.has_others and not exchange.any_died:
            is_likely = exchange.has_lost or _has_raised()
            if time.monotonic() - began >= (_DEATH_S if is_likely else _UNLIKELY_S):
                return
            sleep(_SHORTEST_TICK_S)

    def _make_reports(self, now: float, limit_s: float) -> None:
        if why := self._late.run():
            self._leave_to_the_sync()
            if self._socket is not None:  # nobody can answer
                self._socket.close()
                self._socket = None
            self._unjudged.look(now, limit_s, why)
            return
        from .reports import Reports

        self.reports = Reports(
            self.group, self.exchange, self._notes, self.progress, self.looks
        )

    def _leave_to_the_sync(self) -> None:
        """It logs its late rounds itself from now on, unless another group's monitor does."""
        if not self.group.closed:
            self._notes.are_watched = False

    def _heard(self, heard: Heard) -> None:
        """A question's answers, also of one that another rank has asked."""
        if self.reports is None and heard.says_that_ranks_waited:
            self._make_reports(time.monotonic(), 0.0)
        if self.reports is not None:
            self.reports.heard(heard.found())


def _has_raised() -> bool:
    """Whether an exception ends this process."""
    return hasattr(sys, "last_value")


def _is_late(sync: WatchedRounds, now: float, timeout_s: float) -> bool:
    """Whether a round of it is late enough to be looked into, has been waited for in vain, or has
    failed.
    """
    if sync.timed_out is not None or sync.has_failed():
        return True
    round_ = sync.round
    return (
        round_ is not None
        and not sync.is_over(round_)
        and now - round_.issued_at >= timeout_s / 2
    )


_monitors: weakref.WeakSet[StallMonitor] = weakref.WeakSet()


def _at_exit() -> None:
    # If another rank ended first, this one's collective has failed because of that: which one, its
    # report says.
    monitors = list(_monitors)
    leaving = [
        monitor.reports
        for monitor in monitors
        if monitor.reports is not None and monitor.reports.job_stall.leaves
    ]
    for monitor in monitors:
        monitor.stop()
    for monitor in monitors:
        monitor.join(timedelta(seconds=_EXIT_S))
    for reports in leaving:
        reports.job_stall.leave()


def _in_forked_child() -> None:
    for monitor in list(_monitors):
        monitor.forget()


process_hooks.run(AtExit.STALL_MONITORS, _at_exit)
process_hooks.run(InForkedChild.STALL_MONITORS, _in_forked_child)
