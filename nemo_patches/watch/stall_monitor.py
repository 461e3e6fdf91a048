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
from time import sleep

import torch.distributed

from ..channel import process_hooks
from ..channel.exchange import Exchange
from ..channel.process_hooks import AtExit, InForkedChild
from ..channel.waker import Waker
from ..sync.encoder_rounds import Group
from ..sync.length_sync import current
from ..text import first_line
from .exits import Exits
from .incidents import Incidents
from .job_socket import JobSocket
from .late_modules import LateModules
from .late_rounds import LateRounds
from .log_line import report
from .looks import Looks
from .membership import Absent, Gone, Roll
from .own_facts import OwnFacts
from .progress import Progress
from .stalls import Stalls
from .training_notes import TrainingNotes
from .visitors import Visitors

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
        late: LateModules,
    ) -> None:
        self.group = group
        self.exchange = exchange
        self._notes = notes
        self._late = late
        self.progress = Progress(notes, late, lambda: self.looks.ranks_here() or ())
        self.looks = Looks(
            exchange,
            late,
            lambda: self._own_facts.make(),
            self._wake,
            lambda told, own: incidents.heard(told, own),
        )
        self.incidents = incidents = Incidents(
            group, exchange, notes, self.progress, late, self.looks
        )
        self.late_rounds = LateRounds(incidents)
        # After the rounds: a late one is reported with the same ranks.
        self.absent = Absent(incidents, self.late_rounds)
        Gone(incidents)
        self.stall = Stalls(incidents)
        self.exits = Exits(incidents, self.stall)
        self.visitors = Visitors(incidents, self.stall)
        self.roll = Roll(incidents)
        self._own_facts = OwnFacts(incidents, self.late_rounds, self.stall)
        # Outlives its destruction in a DDP module; None: destroyed just now.
        world = torch.distributed.group.WORLD
        self._world: Callable[[], object] = (
            weakref.ref(world) if world is not None else lambda: None
        )
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

    def stop(self) -> None:
        """End the thread at its next look."""
        self._exiting = True
        self._wake()

    def join(self) -> None:
        """At exit: wait for the end of run(), for a short while. Its thread goes on, for the next
        process group.
        """
        if self._end_of_run is not None:
            self._end_of_run.wait(_EXIT_S)

    def forget(self) -> None:
        """In a forked child: close its copies of the parent's files."""
        self._exiting = True
        self._end_of_run = None
        if self.visitors.socket is not None:
            self.visitors.socket.forget()
        self._waker = None

    def _wake(self) -> None:
        """Any thread: make the monitor look at once."""
        waker = self._waker  # its file lives at least until this returns
        if waker is not None:
            waker.wake()

    # What follows runs in the monitor's thread.

    def run(self) -> None:
        """Until the process group ends."""
        self._end_of_run = threading.Event()
        try:
            self._begin()
            while not (self._exiting or self.group.closed):
                self._tick()
                self._wait(self._pause_s())
            if self._exiting:
                self._wait_for_a_death()
            self._tick(is_last=True)
        except Exception as error:
            if not self.group.closed:
                # The sync logs its late rounds itself, unless another group's monitor does.
                self._notes.are_watched = False
            report(
                logging.ERROR,
                "the stall monitor has ended by an error of its own, please report it:"
                f" {error!r}",
            )
        finally:
            self.visitors.close()
            self._waker = None
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
            self.visitors.socket = JobSocket(self.group.rank, self.group.store_port)
        # Not an OSError where others' class is in the place of Python's socket.
        except Exception as error:
            report(
                logging.INFO,
                f"`nemo-patches diagnose --job` cannot ask this rank: {first_line(error)}",
            )

    def _wait(self, pause_s: float) -> None:
        """Sleep until a question or an answer comes, at most this long."""
        poll = select.poll()
        if self._waker is not None:
            poll.register(self._waker.file, select.POLLIN)
        if self.visitors.socket is not None:
            poll.register(self.visitors.socket.listener, select.POLLIN)
        for sending in self.visitors.sending:
            poll.register(sending.visitor, select.POLLOUT)
        if poll.poll(1000 * pause_s) and self._waker is not None:
            with contextlib.suppress(OSError):  # it was not this that woke
                self._waker.rest()

    def _pause_s(self) -> float:
        timeout = current().timeout
        shortest = min(timeout, current().stall_timeout or timeout).total_seconds()
        is_busy = self.looks.is_busy or self.late_rounds.is_busy
        return max(
            min(_TICK_IN_A_STALL_S if is_busy else _TICK_S, shortest / 8),
            _SHORTEST_TICK_S,
        )

    def _tick(self, is_last: bool = False) -> None:
        now = time.monotonic()
        limit_s = current().stall_timeout.total_seconds()
        self.stall.is_over = (
            is_last
            or self._notes.is_reverted
            or self._notes.is_broken
            or torch.distributed.group.WORLD is not self._world()
        )
        if limit_s and not self.stall.is_over:
            self.progress.look(now, limit_s)
        self.looks.tick(now)
        self.incidents.tick(is_last)

    def _wait_for_a_death(self) -> None:
        """This process ends: maybe since a collective has failed, because another rank has died.

        The exchange hears of that at once, but not before Gloo does. A lost connection, and an
        exception that ends this process, are signs of it; sys.exit() after one shows none.
        """
        began = time.monotonic()
        exchange = self.exchange
        while exchange.has_others and not exchange.any_died:
            # An exception ends this process.
            is_likely = exchange.has_lost or hasattr(sys, "last_value")
            if time.monotonic() - began >= (_DEATH_S if is_likely else _UNLIKELY_S):
                return
            sleep(_SHORTEST_TICK_S)


_monitors: weakref.WeakSet[StallMonitor] = weakref.WeakSet()


def _at_exit() -> None:
    # If another rank ended first, this one's collective has failed because of that: which one, its
    # report says.
    monitors = list(_monitors)
    leaving = [monitor.exits for monitor in monitors if monitor.exits.leaves]
    for monitor in monitors:
        monitor.stop()
    for monitor in monitors:
        monitor.join()
    for exits in leaving:
        exits.leave()


def _in_forked_child() -> None:
    for monitor in list(_monitors):
        monitor.forget()


process_hooks.run(AtExit.STALL_MONITORS, _at_exit)
process_hooks.run(InForkedChild.STALL_MONITORS, _in_forked_child)
