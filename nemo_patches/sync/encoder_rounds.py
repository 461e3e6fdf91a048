"""The rounds of this rank, as others see them, and who is told, directly, what happens in them."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from ..channel.exchange import Exchange
from ..channel.rounds import CLOSED, Rounds
from .rank_log import report

# Per encoder: more than a rank comes to between two looks of the watch.
_ROUNDS_KEPT = 16


@dataclass(eq=False)
class Group:
    """One default process group, as seen by this rank."""

    rank: int
    size: int
    store_port: int  # of the job's store's server; 0 where it has none
    closed: bool = False  # the group was destroyed, or replaced by another


@dataclass(eq=False)
class Round:
    """One round of an encoder on this rank. Only the training thread writes it.

    Times are monotonic; 0.0: not yet.
    """

    number: int
    call: int
    training: bool
    length: int
    in_time_at: float = 0.0  # of the last round before it that was in time
    issued_at: float = field(default_factory=time.monotonic)
    gave_up_at: float = 0.0  # when the call stopped waiting
    came_at: float = 0.0  # when the training thread saw the result


class WatchedRounds:
    """The rounds of one encoder, data loader or of the checkpoints, as the watch sees them.

    Any thread may read them; only the training thread writes.
    """

    awaited = "length"  # what a late rank owes the others, for messages

    def __init__(
        self, title: str, key: str, group: Group, rounds: Rounds, late_text: str
    ) -> None:
        """title: for people, "ConformerEncoder #2".

        key: the same on all ranks. late_text: the format of `late`.
        """
        self.title = title
        self.key = key
        self.group = group
        self.rounds = rounds
        self._late_text = late_text
        self.issued = 0  # of the rounds, those of this encoder
        self.round: Round | None = None  # the latest that was issued
        self.latest_rounds = deque[Round](maxlen=_ROUNDS_KEPT)  # with it
        # The encoder's, and the clock before it.
        self.latest_call: tuple[int, tuple[int, int]] = (0, (0, 0))
        # The latest round that a wait gave up, to be reported with the missing ranks.
        self.timed_out: Round | None = None
        # Why the latest call took no part in them: one of protocol.py's APART, or empty.
        self.apart = ""
        self.in_call = False  # a call is in its rounds
        self.in_time_at = 0.0  # when a round last came in time
        # A late one that was logged here; no other until one comes in time.
        self._said: Round | None = None
        self._is_deleted = False  # the encoder

    @property
    def why_over(self) -> str:
        """Why there are no more rounds, as the training thread has seen: a rank has died, or the
        network failed.
        """
        return "" if self.rounds.over == CLOSED else self.rounds.over

    def has_come(self, round_: Round) -> bool:
        """Whether this round has completed, even if the training thread has not looked yet."""
        return self.rounds.latest.number >= round_.number

    def has_failed(self) -> bool:
        """Whether a round has failed, even if the training thread has not looked yet: there will be
        no more.
        """
        if self.rounds.over:
            return bool(self.why_over)
        return bool(self.rounds.exchange.over) and not self.rounds.has_come()

    def is_over(self, round_: Round) -> bool:
        """Whether this round has completed, or never will."""
        return self.has_come(round_) or self.has_failed() or bool(self.rounds.over)

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to watch any more: its encoder was deleted, or there are no more
        rounds.
        """
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
        self.issued += 1
        self.latest_rounds.append(round_)
        self.round = round_

    def was_late(self, round_: Round) -> str:
        """A wait for this round has timed out. Log it, unless the watch does. Return the text."""
        round_.gave_up_at = time.monotonic()
        late = self.late(round_, round_.gave_up_at - round_.issued_at)
        text = f"{self.call_title(round_)}: {late}"
        if listeners.notes.reports_late(self):
            self.timed_out = round_
        elif self._said is None:
            self._said = round_
            report(logging.WARNING, text)
        return text

    def has_arrived(self, round_: Round, in_time: bool) -> None:
        """The training thread has the result of this round."""
        round_.came_at = time.monotonic()
        if round_ is self._said:
            late_s = round_.came_at - round_.issued_at
            text = f"the missing {self.awaited} came {late_s:.2f} s late"
            report(logging.WARNING, f"{self.title}: recovered: {text}")
        if in_time:
            self.in_time_at = round_.came_at
            self._said = None


class CallLeft(NamedTuple):
    """A call has its length."""

    encoder: torch.nn.Module  # not to be kept
    outcome: str  # one of protocol.py's; empty after an exception of a signal handler
    round: int  # the latest that was issued
    waited: timedelta
    local: int  # this rank's own length
    result: int  # the one that the encoder grows to


class NoNotes:
    """What the watch notes: nothing, until it is there and has put its own in place of these.

    On the thread that does it, mostly the training thread. They raise nothing but what a signal
    handler raises meanwhile. An encoder is not to be kept.
    """

    def group_began(self, group: Group, exchange: Exchange) -> None:
        """There is a new default process group of several ranks. Nothing is sent over it yet."""

    def call_began(self, encoder: torch.nn.Module, sync: WatchedRounds) -> None:
        """Its `latest_call` is this one."""

    def rounds_began(self, sync: WatchedRounds) -> None:
        """Of a data loader or of the checkpoints, to be watched and reported like an encoder's."""

    def reports_late(self, sync: WatchedRounds) -> bool:
        """Whether it logs the round whose wait has just timed out, with the missing ranks."""
        return False


class Tracer:
    """What a trace records: nothing where there is none. As NoNotes; the watch tells it, too."""

    def call_left(self, call: CallLeft) -> None:
        pass

    def encoder_grew(self, encoder: torch.nn.Module, old: int, new: int) -> None:
        """old, new: positions."""

    def stall_reported(
        self,
        missing: tuple[Any, ...],
        text: str,
        encoder: str = "",
        call: int = 0,
        waited: bool = False,
        groups: tuple[Any, ...] = (),
    ) -> None:
        """This rank has logged who is missing. missing: of nemo_patches.MissingRank. groups: of a
        stall of the job, where all ranks are: of judging.rank_groups.RankGroup.

        encoder: its title; empty for a stall of the job. text: why it is not known who is missing,
        or the job's line. call: 0 if the length sync has ended. waited: some rank waits for what is
        not known to end by itself.
        """

    def process_exits(self, code: int) -> None:
        """stall_exit ends this process as soon as this returns."""


class Listeners:
    """Of this process. Each is called directly."""

    def __init__(self) -> None:
        self.notes = NoNotes()
        self.tracer = Tracer()
        # On rank 0, once every rank has joined, so each is patched: how many they are, and how they
        # differ; again where that is known only later. Whether it logs the differences.
        self.all_announced = nobody


def nobody(size: int, differences: tuple[str, ...]) -> bool:
    return False


listeners = Listeners()
