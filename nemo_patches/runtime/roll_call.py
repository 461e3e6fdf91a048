"""The roll call: which ranks have announced themselves, each at its first distributed encoder call, in every mode.

A rank of stock NeMo never does. It waits in the default process group, where the patched ranks' next collective meets
its reduce; nobody can help it from outside, so it must be seen.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import groupby

import torch.distributed as dist

from .reporting import first_line, report

# One bit for each rank in a number that ranks add to: every kind of store can add, and traffic is linear in ranks.
_RANKS_PER_KEY = 62
# Seconds from one look to the next, which doubles. Many ranks look less often, for the sake of the one store server.
_FIRST_PAUSE, _PAUSE_PER_RANK, _LONGEST_PAUSE = 0.05, 0.001, 5.0


class RollCall:
    """One process group's roll call as this rank sees it. Its helper thread calls `look`, and nobody else."""

    def __init__(self, rank: int, size: int, limit: timedelta) -> None:
        self.missing: tuple[int, ...] = ()  # as it was at the last look
        self.done = False
        self._rank, self._size, self._limit = rank, size, limit
        self._began = time.monotonic()
        self._announced = self._said = False
        self._pause = _FIRST_PAUSE + size * _PAUSE_PER_RANK
        self._next_look = 0.0
        self._broken = ""  # why the store cannot be asked any more

    def look(self, connect: Callable[[], dist.Store]) -> None:
        """Announce this rank, once, and see who else has; name those who have not when `limit` has passed."""
        took = timedelta(seconds=time.monotonic() - self._began)
        late = took >= self._limit and not self._said
        if not late and time.monotonic() < self._next_look:
            return
        try:
            if not self._broken:
                self._see(connect())
        except Exception as error:
            # At the end of a short job the store goes before everybody was seen. Only if this one goes on is it said.
            self._broken, self._next_look = first_line(error), math.inf
            self.done = self._said
        if not self.missing and not self._broken:
            self.done = True
            if self._said:
                late_by = f"{took.total_seconds():.2f} s after this one"
                report(logging.WARNING, f"every rank has announced itself now, {late_by}")
        elif late:
            self._said, self.done = True, bool(self._broken)
            report(logging.WARNING, self._warning())

    def text(self) -> str:
        """Who has not announced itself, as the beginning of a sentence."""
        verb = "has not announced itself" if len(self.missing) == 1 else "have not announced themselves"
        return f"{named(self.missing)} of {self._size} {verb}"

    def _see(self, store: dist.Store) -> None:
        if not self._announced:
            store.add(_key(self._rank // _RANKS_PER_KEY), 1 << self._rank % _RANKS_PER_KEY)
            self._announced = True
        self.missing = tuple(_missing(store, self._size))
        self._next_look = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)

    def _warning(self) -> str:
        if self._broken:
            return f"cannot see whether every rank is patched: {self._broken}"
        return (
            f"{self.text()} within {self._limit.total_seconds():g} s: not patched, not started, or not yet at a first "
            "encoder call. A rank that is not patched waits in the default process group, where the other ranks' next "
            "collective meets its reduce: the job then hangs, dies or reduces wrong numbers. What keeps it from being "
            "patched is on its stderr, and `nemo-patches status` says it there"
        )


def named(ranks: Iterable[int]) -> str:
    """Ranks in rising order, at least one, as a person reads them: "rank 1", "ranks 2, 5-7"."""
    ranges = []
    for _, pairs in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in pairs]
        ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    text = ", ".join(ranges)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def _missing(store: dist.Store, size: int) -> Iterator[int]:
    for first in range(0, size, _RANKS_PER_KEY):
        present = store.add(_key(first // _RANKS_PER_KEY), 0)
        yield from (rank for rank in range(first, min(first + _RANKS_PER_KEY, size)) if not present >> rank - first & 1)


def _key(number: int) -> str:
    return f"present/{number}"
