"""The rounds of one name, as the training thread has them: send a number, wait for the largest."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

CLOSED = "closed"  # this rank needs no more of these rounds
_SIGNAL_S = 0.5  # a signal's handler runs at most so late during a wait


class RoundFailed(Exception):
    """There are no more rounds: a rank has ended or left, or cannot take part."""


class RoundsStopped(RoundFailed):
    """A rank has stopped these rounds: from the same one on, no rank gets a result."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} takes part no more; its stderr may say why")
        self.rank = rank


class Stop(NamedTuple):
    """No rank gets the result of this round, nor of a later one. rank: it wanted that."""

    number: int
    rank: int


NEVER = Stop(1 << 62, -1)


class Latest(NamedTuple):
    """The last round that came. came_at: time.monotonic()."""

    number: int = 0
    result: int = 0
    came_at: float = 0.0


class Rounds:
    """The rounds of one name, at most one outstanding: `issue`, then `wait` or `poll`.

    For the training thread. It has no lock that the exchange's thread waits for: a signal handler
    may raise anywhere.
    """

    def __init__(self, exchange: Any, key: int) -> None:
        """exchange: the Exchange, which imports this module."""
        self.issued = 0
        # Why this rank issues no more: CLOSED, or how a round has failed.
        self.over = ""
        self.latest = Latest()  # the exchange's thread replaces it as a whole
        # The exchange's thread: by rank, of the next round.
        self.arrived: dict[int, int] = {}
        # The exchange's thread: what this rank, or one below it, has asked for, and what holds.
        self.wanted_stop = NEVER
        self.stopped = NEVER
        self.key = key
        self.exchange = exchange
        # Released when a result has come. No SimpleQueue: before Python 3.13 its get(timeout=)
        # waits without limit once a signal handler has run beyond the time-out.
        self._came = threading.Lock()
        self._came.acquire()

    def issue(self, value: int) -> None:
        """Send an int64 for the next round, if none is outstanding. Raises RoundFailed."""
        self.exchange.check()
        number = self.latest.number + 1
        if self.issued < number:
            own = self.exchange.rank
            self.exchange.post(
                functools.partial(self.exchange.arrive, self, number, value, own)
            )
            self.issued = number

    def wait(self, limit: timedelta) -> int | None:
        """The outstanding round's result; None if it does not come in time.

        Raises RoundFailed, RoundsStopped.
        """
        end = time.monotonic() + limit.total_seconds()
        while (result := self.poll()) is None:
            left_s = end - time.monotonic()
            if left_s <= 0:
                return None
            self._came.acquire(timeout=min(left_s, _SIGNAL_S))
        return result

    def poll(self) -> int | None:
        """The same, without waiting."""
        latest = self.latest
        if latest.number >= self.issued:
            return latest.result
        if self.issued >= self.stopped.number:
            raise RoundsStopped(self.stopped.rank)
        self.exchange.check()
        return None

    def give_up(self) -> None:
        """Have the outstanding round come on no rank, unless it has come on rank 0, which decides.

        `wait` then ends as on all ranks.
        """
        stop = Stop(self.issued, self.exchange.rank)
        self.exchange.post(functools.partial(self.exchange.stop, self, stop))

    def leave(self) -> None:
        """This rank issues no more of a name whose results all ranks must have alike: no rank
        waits for it. The garbage collector may call this.
        """
        self.close()
        self.exchange.post(functools.partial(self.exchange.leave, self))

    def has_come(self) -> bool:
        """Whether the outstanding round has a result; any thread may ask."""
        return self.latest.number >= self.issued

    def close(self, why: str = CLOSED) -> None:
        """This rank issues no more; the first reason stays. The garbage collector may call this."""
        self.over = self.over or why

    def wake(self) -> None:
        """The exchange's thread: a result has come, or there are no more."""
        if self._came.locked():
            self._came.release()
