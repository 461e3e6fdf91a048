"""What the length sync does on this rank, as small immutable events: the sync publishes, others subscribe.

Handlers run on the thread that publishes, mostly the training thread, and only note what they are given.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from ..channel.exchange import CLOSED, Exchange, Rounds
from .rank_log import raised_by_signal_handler, report

_ROUNDS_KEPT = 16  # per encoder: more than a rank comes to between two looks of a subscriber


class Group:
    """One default process group, as seen by this rank.

    store_port: of the job's store's server; 0 where it has none. closed: the group was destroyed, or replaced by
    another.
    """

    def __init__(self, rank: int, size: int, store_port: int) -> None:
        self.rank = rank
        self.size = size
        self.store_port = store_port
        self.closed = False


class Round:
    """One round of an encoder on this rank. Only the training thread writes it. Times are monotonic; 0.0: not yet."""

    def __init__(self, number: int, call: int, training: bool, length: int, in_time_at: float = 0.0) -> None:
        self.number, self.call, self.training, self.length = number, call, training, length
        self.issued_at, self.in_time_at = time.monotonic(), in_time_at  # the latter: of the last round in time
        self.gave_up_at = self.came_at = 0.0  # when the call stopped waiting; when the training thread saw the result


class WatchedRounds:
    """The rounds of one encoder, data loader or of the checkpoints, as subscribers see them.

    Any thread may read them; only the training thread writes.
    """

    awaited = "length"  # what a late rank owes the others, for messages

    def __init__(self, title: str, key: str, group: Group, rounds: Rounds, late_text: str) -> None:
        """title: for people, "ConformerEncoder #2". key: the same on all ranks. late_text: the format of `late`."""
        self.title, self.key, self.group = title, key, group
        self.rounds, self._late_text = rounds, late_text
        self.round: Round | None = None  # the latest that was issued
        self.latest_rounds = deque[Round](maxlen=_ROUNDS_KEPT)  # with it
        self.latest_call: tuple[int, tuple[int, int]] = (0, (0, 0))  # the encoder's, and the clock before it
        self.timed_out: WaitTimedOut | None = None  # the latest wait that did, to be reported with the missing ranks
        self.apart = ""  # why the latest call took no part in them: one of protocol.py's APART, or empty
        self.in_call = False  # a call is in its rounds
        self.in_time_at = 0.0  # when a round last came in time
        self._said: Round | None = None  # a late one that was logged here; no other until one comes in time
        self._is_deleted = False  # the encoder

    @property
    def ended(self) -> str:
        """Why there are no more rounds, as the training thread has seen: a rank has died, or the network failed."""
        return "" if self.rounds.over == CLOSED else self.rounds.over

    def has_come(self, round_: Round) -> bool:
        """Whether this round has completed, even if the training thread has not looked yet."""
        return self.rounds.latest.number >= round_.number

    def has_failed(self) -> bool:
        """Whether a round has failed, even if the training thread has not looked yet: there will be no more."""
        if self.rounds.over:
            return bool(self.ended)
        return bool(self.rounds.exchange.over) and not self.rounds.has_come()

    def is_over(self, round_: Round) -> bool:
        """Whether this round has completed, or never will."""
        return self.has_come(round_) or self.has_failed() or bool(self.rounds.over)

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to watch any more: its encoder was deleted, or there are no more rounds."""
        is_open = self.round is not None and not self.has_come(self.round)
        return bool(self.rounds.over) or (self._is_deleted and not is_open)

    def encoder_was_deleted(self) -> None:
        """Takes no lock: the garbage collector calls this."""
        self._is_deleted = True

    def call_title(self, round_: Round) -> str:
        return f"{self.title}: {'training' if round_.training else 'evaluation'} call {round_.call}"

    def late(self, round_: Round, waited_s: float) -> str:
        """The text of a report about a call that has waited this long for this round."""
        return self._late_text.format(waited=waited_s, length=round_.length)

    # What follows is the training thread's.

    def was_issued(self, round_: Round) -> None:
        self.latest_rounds.append(round_)
        self.round = round_

    def was_late(self, round_: Round, promise: Future[Report] | None = None) -> str:
        """Publish that a wait for this round has timed out; without a subscriber, log it. Return the text."""
        round_.gave_up_at = time.monotonic()
        text = f"{self.call_title(round_)}: {self.late(round_, round_.gave_up_at - round_.issued_at)}"
        event = WaitTimedOut(self, round_, promise)
        if bus.publish(event):
            self.timed_out = event  # for the subscriber that has accepted the promise
        elif self._said is None:
            self._said = round_
            report(logging.WARNING, text)
        return text

    def has_arrived(self, round_: Round, in_time: bool) -> None:
        """The training thread has the result of this round."""
        round_.came_at = time.monotonic()
        if round_ is self._said:
            late_s = round_.came_at - round_.issued_at
            report(logging.WARNING, f"{self.title}: recovered: the missing {self.awaited} came {late_s:.2f} s late")
        if in_time:
            self.in_time_at, self._said = round_.came_at, None


class Report(NamedTuple):
    """What a subscriber adds to an exception: the line that it logs, and a nemo_patches.MissingRank for each."""

    text: str = ""
    missing: tuple[Any, ...] = ()


class GroupBegan(NamedTuple):
    """This process has a new default process group of several ranks; published on the thread that saw it first.

    exchange: nothing is sent over it yet.
    """

    group: Group
    exchange: Exchange


class CallBegan(NamedTuple):
    sync: WatchedRounds
    call: int  # of this encoder, from 1
    clock: tuple[int, int]  # before the call: training calls, evaluation calls since the last of them
    training: bool = True


class RoundsBegan(NamedTuple):
    """Rounds of a data loader or of the checkpoints, to be watched and reported like an encoder's."""

    sync: WatchedRounds


class FirstCall(NamedTuple):
    """The first encoder call of this process, or its first one under a process group."""

    encoder: torch.nn.Module  # not to be kept
    sync: WatchedRounds | None  # None: there is no process group


class WaitTimedOut(NamedTuple):
    """A call has stopped waiting for its round and uses this rank's own length.

    report: for on_timeout="raise". A subscriber that will report who is missing says so before it returns
    (`set_running_or_notify_cancel`) and gives its Report soon; the call waits for it a short time.
    """

    sync: WatchedRounds
    round: Round
    report: Future[Report] | None


class SyncEnded(NamedTuple):
    """A round has failed: the encoder has no more rounds; `sync.ended` says why. report: as in WaitTimedOut."""

    sync: WatchedRounds
    report: Future[Report] | None


class CallLeft(NamedTuple):
    """A call has its length."""

    encoder: torch.nn.Module  # not to be kept
    sync: WatchedRounds
    outcome: str  # one of protocol.py's; empty after an exception of a signal handler
    round: int  # the latest that was issued
    waited: timedelta
    local: int  # this rank's own length
    result: int  # the one that the encoder grows to


class Grown(NamedTuple):
    encoder: torch.nn.Module  # not to be kept; it may have no sync
    old: int  # positions
    new: int


class EventBus:
    """Delivers each event to its subscribers. A subscriber that raises is logged once, and gets no more events."""

    def __init__(self) -> None:
        self._subscribers: dict[str, Mapping[type, Callable[[Any], None]]] = {}  # replaced as a whole

    def subscribe(self, name: str, handlers: Mapping[type, Callable[[Any], None]]) -> None:
        """Subscribe handlers, by kind of event. An error is logged under `name`, the subscriber's own."""
        self._subscribers = {**self._subscribers, name: handlers}

    def unsubscribe(self, name: str) -> None:
        self._subscribers = {other: theirs for other, theirs in self._subscribers.items() if other != name}

    def publish(self, event: tuple[Any, ...]) -> bool:
        """Whether a subscriber handled it. Raises only what a signal handler raises meanwhile."""
        kind = type(event)
        handlers = [(name, handlers[kind]) for name, handlers in self._subscribers.items() if kind in handlers]
        for name, handle in handlers:
            try:
                handle(event)
            except Exception as error:
                if raised_by_signal_handler(error):
                    raise
                self.unsubscribe(name)
                report(logging.ERROR, f"{name} has ended by an error of its own, please report it: {error!r}")
        return bool(handlers)


bus = EventBus()  # of this process
