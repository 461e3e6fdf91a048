"""Stall reports for this process: a thread that watches the process group while there is one.

It begins with the process group, not with an encoder; nothing of torch is patched for that. In a
daemonic process, as a data loader's worker is, and in one that a rank has forked it begins with the
first encoder call: few of them are ranks.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable
from time import sleep
from typing import TYPE_CHECKING

import torch

from ..channel import process_hooks
from ..channel.daemon import Daemon
from ..channel.exchange import Exchange
from ..channel.process_hooks import InForkedChild
from ..sync import length_sync
from ..sync.encoder_rounds import Group, NoNotes, WatchedRounds, listeners
from ..sync.rank_log import contain, report
from .late_modules import LateModules
from .stall_monitor import StallMonitor
from .training_notes import TrainingNotes

if TYPE_CHECKING:
    from ..judging.missing_rank import Stall

_LOOK_S = 0.25  # between two looks for a process group
_MOST_FAILURES = 8  # looks in a row; then it is said


class StallSubscriber(NoNotes):
    """From the process group's beginning on, a monitor watches it.

    What the length sync tells it raises nothing of ours: an error in a note ends the notes, until
    there is another process group.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._monitor: StallMonitor | None = None
        self._thread: threading.Thread | None = None
        self._said = ""  # why there can be no thread
        self._notes = TrainingNotes()
        self._late = LateModules()
        self._on_group: Callable[[], object] = lambda: None

    def subscribe(self, on_group: Callable[[], object] = lambda: None) -> None:
        """Report stalls from now on. on_group: is called when there is another process group; the
        latest one given holds.
        """
        self._notes.is_reverted = False
        self._on_group = on_group
        listeners.notes = self
        self._start()

    def trains_with(self, trainer: object) -> None:
        """Lightning's, whose loop knows the last batch; the last one that begins counts."""
        self._notes.trains_with(trainer)

    def encoders_were_reverted(self) -> None:
        """The encoders' calls are no longer seen, which is not a stall."""
        self._notes.is_reverted = True
        self._notes.forget_calls()

    def monitor(self) -> StallMonitor | None:
        """The monitor of the current (or last) process group; None before the first one."""
        return self._monitor

    def stalls(self) -> tuple[Stall, ...]:
        """The encoders' rounds that this rank waits for, or has given up, with the missing ranks of
        each.
        """
        monitor = self._monitor
        return () if monitor is None else monitor.incidents.stalls()

    def unannounced(self) -> tuple[int, ...]:
        """The ranks that have not announced themselves under that process group: unpatched, or not
        here yet.
        """
        return () if self._monitor is None else self._monitor.absent.missing

    def in_forked_child(self) -> None:
        """There is no thread. The child may become a rank, unless its parent is one."""
        has_subscribed = self._thread is not None
        self._lock = threading.Lock()
        self._late.in_forked_child()
        self._thread = None
        self._monitor = None
        if has_subscribed and length_sync.process.present_group() is None:
            self._start()

    def group_began(self, group: Group, exchange: Exchange) -> None:
        with contain("the stall monitor", self._notes.fail):
            self._watch(group, exchange)

    def call_began(self, encoder: torch.nn.Module, sync: WatchedRounds) -> None:
        self._note(self._notes.call_began, encoder, sync)

    def rounds_began(self, sync: WatchedRounds) -> None:
        self._note(self._notes.note, sync)

    def reports_late(self, sync: WatchedRounds) -> bool:
        self.rounds_began(sync)
        return self._notes.are_watched and not self._notes.is_broken

    def _watch(self, group: Group, exchange: Exchange) -> None:
        self._notes.begin_anew()
        self._monitor = StallMonitor(group, exchange, self._notes, self._late)
        self._start()
        self._on_group()

    def _note(self, note: Callable[..., None], *arguments: object) -> None:
        if not self._notes.is_broken:
            with contain("what the stall monitor notes", self._notes.fail):
                note(*arguments)

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            thread = Daemon("stall monitor", self._run)
            if why := thread.begin():
                self._notes.are_watched = False
                if self._monitor is not None:
                    self._monitor.exchange.watch = None  # nobody would answer
                if why != self._said:  # the next process group tries again
                    self._said = why
                    report(
                        logging.WARNING,
                        f"there are no stall reports of this rank, training goes on: {why}",
                    )
            else:
                self._thread = thread

    def _run(self) -> None:
        """In the thread."""
        watched: StallMonitor | None = None
        failures = 0
        while threading.main_thread().is_alive():
            try:
                self._look_for_group()
                failures = 0
            # Maybe the process group is being made or destroyed at this moment.
            except Exception as error:
                failures += 1
                if failures == _MOST_FAILURES:
                    report(
                        logging.ERROR,
                        f"there are no stall reports of this rank, training goes on: {error!r}",
                    )
            if (monitor := self._monitor) is not None and monitor is not watched:
                watched = monitor
                monitor.run()
            elif self._is_not_needed():
                return
            else:
                sleep(_LOOK_S)

    def _look_for_group(self) -> None:
        """Publishes a new one. After revert(), no group is watched."""
        group_syncs = (
            None if self._notes.is_reverted else length_sync.process.present_group()
        )
        if group_syncs is not None and (
            self._monitor is None or self._monitor.group is not group_syncs.group
        ):
            # From before `subscribe`.
            self._watch(group_syncs.group, group_syncs.exchange)

    def _is_not_needed(self) -> bool:
        """Whether this is probably not a rank: then the thread ends, and an encoder's call starts
        another.
        """
        with self._lock:
            if self._monitor is None and multiprocessing.current_process().daemon:
                self._thread = None
                return True
            return False


process = StallSubscriber()
subscribe = process.subscribe
trains_with = process.trains_with
monitor = process.monitor
stalls = process.stalls
unannounced = process.unannounced
encoders_were_reverted = process.encoders_were_reverted
process_hooks.run(InForkedChild.STALL_SUBSCRIBER, process.in_forked_child)
