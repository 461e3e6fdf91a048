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

from ..channel.side_channel import Rounds, SideChannel
from ..channel.store import JobStore
from .rank_log import raised_by_signal_handler, report

_ROUNDS_KEPT = 16  # per encoder: more than a rank comes to between two looks of a subscriber


class Group:
    """One default process group, as seen by this rank. closed: it was destroyed, or replaced by another."""

    def __init__(self, rank: int, size: int, store: JobStore) -> None:
        self.rank, self.size, self.store, self.closed = rank, size, store, False


class Round:
    """One round of an encoder on this rank. Only the training thread writes it. Times are monotonic; 0.0: not yet."""

    def __init__(self, number: int, call: int, training: bool, length: int, in_time_at: float = 0.0) -> None:
        self.number, self.call, self.training, self.length = number, call, training, length
        self.issued_at, self.in_time_at = time.monotonic(), in_time_at  # the latter: of the last round in time
        self.gave_up_at = self.came_at = 0.0  # when the call stopped waiting; when the training thread saw the result


class SyncHandle:
    """What a subscriber may read of one encoder's sync, on any thread. Only the training thread writes it."""

    def __init__(self, title: str, key: str, group: Group, rounds: Rounds, late_text: str) -> None:
        """title: for people, "ConformerEncoder #2". key: the same on all ranks. late_text: the format of `late`."""
        self.title, self.key, self.group = title, key, group
        self.round: Round | None = None  # the latest that was issued
        self.latest_rounds = deque[Round](maxlen=_ROUNDS_KEPT)  # with it
        self.ended = ""  # why there are no more rounds
        self.apart = ""  # why the latest call took no part in them: one of protocol.py's APART, or empty
        self.in_call, self.in_time_at = False, 0.0  # a call is in its length sync; when a round last came in time
        self.rounds, self._late_text = rounds, late_text  # rounds.closed: the encoder or its process group is gone

    def issued(self, round_: Round) -> None:
        self.latest_rounds.append(round_)
        self.round = round_

    def call_title(self, round_: Round) -> str:
        return f"{self.title}: {'training' if round_.training else 'evaluation'} call {round_.call}"

    def late(self, round_: Round, waited_s: float) -> str:
        """The text of a report about a call that has waited this long for this round."""
        return self._late_text.format(waited=waited_s, length=round_.length)

    def has_come(self, round_: Round) -> bool:
        """Whether a round of this encoder has completed, even if the training thread has not looked yet."""
        return round_.came_at > 0 or self.round is not round_ or self.rounds.has_come()

    def has_failed(self) -> bool:
        """Whether a round has failed, so that there will be no more."""
        return bool(self.ended or (self.rounds.channel.error and not self.rounds.closed and not self.rounds.has_come()))


class Report(NamedTuple):
    """What a subscriber adds to an exception: the line that it logs, and a nemo_patches.MissingRank for each."""

    text: str = ""
    missing: tuple[Any, ...] = ()


class GroupBegan(NamedTuple):
    """This process has a new default process group of several ranks; published on the thread that saw it first.

    channel: nothing is sent over it yet.
    """

    group: Group
    channel: SideChannel


class CallBegan(NamedTuple):
    sync: SyncHandle
    call: int  # of this encoder, from 1
    clock: tuple[int, int]  # before the call: training calls, evaluation calls since the last of them
    training: bool = True


class RoundsBegan(NamedTuple):
    """Rounds that belong to a data loader, to be watched and reported like an encoder's."""

    sync: SyncHandle


class FlagIsOff(NamedTuple):
    """The first call of an encoder that has no length sync: its own `sync_max_audio_length` is false."""

    encoder: torch.nn.Module  # not to be kept
    sync: SyncHandle


class WaitTimedOut(NamedTuple):
    """A call has stopped waiting for its round and uses this rank's own length.

    report: for on_timeout="raise". A subscriber that will report who is missing says so before it returns
    (`set_running_or_notify_cancel`) and gives its Report soon; the call waits for it a short time.
    """

    sync: SyncHandle
    round: Round
    report: Future[Report] | None


class SyncEnded(NamedTuple):
    """A round has failed: the encoder has no more rounds; `sync.ended` says why. report: as in WaitTimedOut."""

    sync: SyncHandle
    report: Future[Report] | None


class CallLeft(NamedTuple):
    """A call has its length."""

    encoder: torch.nn.Module  # not to be kept
    sync: SyncHandle
    outcome: str  # one of protocol.py's; empty after an exception of a signal handler
    round: int  # the latest that was issued
    waited: timedelta
    local: int  # this rank's own length
    result: int  # the one that the encoder grows to


class GrowthBegan(NamedTuple):
    encoder: torch.nn.Module  # not to be kept


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
