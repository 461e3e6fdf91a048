"""The roll call: which ranks have announced themselves, each at its first distributed encoder call, in every mode.

A rank of stock NeMo never does. It waits in the default process group, where the patched ranks' next collective meets
its reduce; nobody can help it from outside, so it must be seen. Once all have come, rank 0 compares their versions and
settings, and leaves for all where each rank is, and where it listens.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ..sync.rank_log import first_line, report
from .heartbeats import UNPATCHED, Beat, announce, announced, present, read
from .peers import Peer, decode_peers, encode_peers
from .rank_text import named

# Seconds from one look to the next, which doubles. Many ranks look less often, for the sake of the one store server.
_FIRST_PAUSE, _PAUSE_PER_RANK, _LONGEST_PAUSE = 0.05, 0.001, 5.0


class RollCall:
    """One process group's roll call as this rank sees it. Its helper thread calls `look`, and nobody else."""

    def __init__(
        self, rank: int, size: int, limit: timedelta, first_beat: Callable[[], Beat], told_elsewhere: Callable[[], bool]
    ) -> None:
        """told_elsewhere: whether the stall monitor tells of the ranks that are missing, so that this need not."""
        self.missing: tuple[int, ...] = ()  # as it was at the last look
        self.peers: dict[int, Peer] = {}  # by rank, once all have come
        self.done = False
        self._rank, self._size, self._limit = rank, size, limit
        self._first_beat, self._told_elsewhere = first_beat, told_elsewhere
        self._began = time.monotonic()
        self._announced = self._due = self._said = False
        self._pause = _FIRST_PAUSE + size * _PAUSE_PER_RANK
        self._next_look = 0.0
        self._broken = ""  # why the store cannot be asked any more

    def look(self, connect: Callable[[], dist.Store]) -> None:
        """Announce this rank, once, and see who else has; name those who have not when `limit` has passed."""
        took = timedelta(seconds=time.monotonic() - self._began)
        due_now = took >= self._limit and not self._due
        if not due_now and time.monotonic() < self._next_look:
            return
        self._due = self._due or due_now
        try:
            if not self._broken:
                self._see(connect())
        except Exception as error:
            # At the end of a short job the store goes before everybody was seen. Only if this one goes on is it said.
            self._broken, self._next_look = first_line(error), math.inf
            self.done = self._due
        if due_now and (self.missing or self._broken):
            self.done = bool(self._broken)
            if self._broken or not self._told_elsewhere():
                self._said = True
                report(logging.WARNING, self._warning())

    def _see(self, store: dist.Store) -> None:
        if not self._announced:
            announce(store, self._first_beat())
            self._announced = True
        if announced(store) == self._size:
            self._all_have_come(store)
        elif self._due or time.monotonic() - self._began > self._limit.total_seconds() / 2:
            # Who it is that is missing takes more requests, so only then.
            self.missing = tuple(sorted(set(range(self._size)) - present(store, self._size)))
        self._next_look = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)

    def _all_have_come(self, store: dist.Store) -> None:
        if self._said and self.missing:
            late_by = f"{time.monotonic() - self._began:.2f} s after this one"
            report(logging.WARNING, f"every rank has announced itself now, {late_by}")
        self.missing = ()
        if self._rank == 0:
            beats = read(store, range(self._size))
            self._compare(list(beats.values()))
            self.peers = {rank: Peer(beat.host, beat.pid, beat.address, beat.port) for rank, beat in beats.items()}
            store.set("peers", encode_peers(self.peers))
        elif store.check(["peers"]):
            self.peers = decode_peers(store.get("peers"), self._size)
        else:
            return
        self.done = True

    def _compare(self, beats: list[Beat]) -> None:
        """Say where ranks differ in what should be the same on all."""
        mine = next(beat for beat in beats if beat.rank == self._rank)
        for name in ("versions", "settings"):
            others: dict[str, list[int]] = {}
            for beat in beats:
                if getattr(beat, name) != getattr(mine, name):
                    others.setdefault(getattr(beat, name), []).append(beat.rank)
            if others:
                found = "; ".join(f"{named(ranks)}: {value}" for value, ranks in list(others.items())[:8])
                report(logging.WARNING, f"ranks differ in their {name}: here {getattr(mine, name)}; {found}")

    def _warning(self) -> str:
        if self._broken:
            return f"cannot see whether every rank is patched: {self._broken}"
        verb = "has not announced itself" if len(self.missing) == 1 else "have not announced themselves"
        return (
            f"{named(self.missing)} of {self._size} {verb} within {self._limit.total_seconds():g} s: not patched, not "
            f"started, or not yet at a first encoder call. {UNPATCHED}"
        )
