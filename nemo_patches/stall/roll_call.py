"""The roll call: which ranks have announced themselves, each at its first distributed encoder call, in every mode.

A rank of stock NeMo never does. It waits in the default process group, where the patched ranks' next collective meets
its reduce; nobody can help it from outside, so it must be seen. Once all have come, rank 0 compares their versions and
settings, and leaves for all where each rank is, where it listens, and the token that it wants to hear there.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch.distributed as dist

from ..channel import keys
from ..sync.events import Group, bus
from ..sync.length_sync import current
from .heartbeat import Heartbeat
from .log_line import report
from .missing_query import Introduction
from .missing_rank import UNPATCHED
from .own_heartbeat import OwnHeartbeat
from .peers import Listener
from .rank_text import first_line, named
from .settings import StallSettings
from .store_client import StoreClient, announce, announced_ranks, count_announced, read_heartbeats
from .wire import TOKEN_BYTES, Peer, decode_peers, encode_peers

# From one look to the next, which doubles. Many ranks look less often, for the sake of the one store server.
_FIRST_PAUSE_S, _PAUSE_PER_RANK_S, _LONGEST_PAUSE_S = 0.05, 0.001, 5.0
_SLICE_S = 0.05  # between two looks whether the roll call is still wanted


class AllAnnounced(NamedTuple):
    """An event, on rank 0: every rank has announced itself, so each is patched."""

    size: int


class RollCall:
    """One process group's roll call as this rank sees it. `run` is a thread's; nobody else writes the fields."""

    def __init__(
        self,
        group: Group,
        client: StoreClient,
        own_heartbeat: OwnHeartbeat,
        settings: Callable[[], StallSettings],
        stall_reported: Callable[[], bool],
    ) -> None:
        """stall_reported: whether a report has named the missing ranks, who are named here after the sync's timeout."""
        self.missing: tuple[int, ...] = ()  # as it was at the last look
        self.introduction = Introduction()  # replaced as a whole
        self.listener: Listener | None = None  # this rank's
        self.done = False
        self._group, self._client, self._own_heartbeat = group, client, own_heartbeat
        self._settings, self._stall_reported = settings, stall_reported
        self._limit = current().timeout
        self._began = time.monotonic()
        self._attempt = -1  # in which this rank has announced itself
        self._due = self._said = False
        self._pause = _FIRST_PAUSE_S + group.size * _PAUSE_PER_RANK_S
        self._next_look = 0.0
        self._tried = -1  # in which attempt it has begun to
        self._broken = ""  # why the store could not be asked at the last look

    @property
    def has_announced(self) -> bool:
        """Whether this rank's first heartbeat, which says where it listens, is in the store."""
        return self._attempt >= 0

    @property
    def is_outdated(self) -> bool:
        """Whether all had come to what has turned out to be an earlier process group's part of the store."""
        return self.done and self._attempt != self._group.store.attempt

    def run(self, stopped: Callable[[], bool]) -> None:
        """Announce this rank, and look who else has, until all have or `stopped`."""
        self.done = False
        while not self.done and not stopped():
            self._look()
            wake = self._next_look if self._due else min(self._next_look, self._began + self._limit.total_seconds())
            while not self.done and not stopped() and (left := wake - time.monotonic()) > 0:
                time.sleep(min(left, _SLICE_S))
        if stopped() and self.listener is not None:
            self.listener.close()

    def _look(self) -> None:
        """Announce this rank, once, and see who else has; name those who have not when `limit` has passed."""
        due_now = time.monotonic() - self._began >= self._limit.total_seconds() and not self._due
        self._due = self._due or due_now
        try:
            with self._client.asking(join=True) as store:
                self._see(store)
            self._broken = ""
        except Exception as error:
            # At the end of a short job the store goes before everybody was seen. Only if this one goes on is it said.
            self._broken = first_line(error)
        self._next_look = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, _LONGEST_PAUSE_S)
        if due_now and (self.missing or self._broken) and (self._broken or not self._stall_reported()):
            self._said = True
            report(logging.WARNING, self._warning())

    def _see(self, store: dist.Store) -> None:
        if self._attempt != self._group.store.attempt:
            if self.listener is None:
                self._listen()
            again, self._tried = self._tried == self._group.store.attempt, self._group.store.attempt
            announce(store, self._own_heartbeat.make(self.listener), again)
            self._attempt = self._group.store.attempt
        have_come = count_announced(store) == self._group.size
        if not have_come and (self._due or time.monotonic() - self._began > self._limit.total_seconds() / 2):
            # Who it is that is missing takes more requests, so only then.
            missing = tuple(sorted(set(range(self._group.size)) - announced_ranks(store, self._group.size)))
            have_come = not missing  # the count is too low where a rank had to try twice
            self.missing = missing or self.missing
        if have_come:
            self._all_have_come(store)

    def _all_have_come(self, store: dist.Store) -> None:
        if self._said and self.missing:
            late_by = f"{time.monotonic() - self._began:.2f} s after this one"
            report(logging.WARNING, f"every rank has announced itself now, {late_by}")
        self.missing = ()
        if self._group.rank == 0:
            heartbeats = read_heartbeats(store, range(self._group.size))
            self._compare(heartbeats.values())
            peers = {rank: Peer(one.host, one.pid, one.address, one.port) for rank, one in heartbeats.items()}
            token = self.introduction.token or secrets.token_bytes(TOKEN_BYTES)  # the others may have it already
            self._introduce(peers, token)
            store.set(keys.PEERS, encode_peers(peers, token))
            bus.publish(AllAnnounced(self._group.size))
        elif store.check([keys.PEERS]):
            self._introduce(*decode_peers(store.get(keys.PEERS), self._group.size))
        else:
            return
        self.done = True

    def _listen(self) -> None:
        """Where ranks that the store fails may ask this one; without a port it cannot be asked, and asks nobody."""
        server = self._group.store.server
        try:
            if self._settings().stall_port == "off":
                self.introduction = Introduction(problem="stall_port=off")
            elif server is not None:
                self.listener = Listener(server)
        except (OSError, ValueError) as error:
            self.introduction = Introduction(problem=f"this rank has no port: {first_line(error)}")

    def _introduce(self, peers: dict[int, Peer], token: bytes) -> None:
        if (listener := self.listener) is not None:
            if token:
                listener.introduce(peers, token)
            self.introduction = Introduction({rank: listener.from_here(peer) for rank, peer in peers.items()}, token)

    def _compare(self, heartbeats: Iterable[Heartbeat]) -> None:
        """Say where ranks differ in what should be the same on all."""
        own = next(heartbeat for heartbeat in heartbeats if heartbeat.rank == self._group.rank)
        for name in ("versions", "settings"):
            others: dict[str, list[int]] = {}
            for heartbeat in heartbeats:
                if getattr(heartbeat, name) != getattr(own, name):
                    others.setdefault(getattr(heartbeat, name), []).append(heartbeat.rank)
            if others:
                differing = "; ".join(f"{named(ranks)}: {value}" for value, ranks in list(others.items())[:8])
                report(logging.WARNING, f"ranks differ in their {name}: here {getattr(own, name)}; {differing}")

    def _warning(self) -> str:
        if self._broken:
            return f"cannot see whether every rank is patched: {self._broken}"
        verb = "has not announced itself" if len(self.missing) == 1 else "have not announced themselves"
        why = f"not patched, not started, or not yet at a first encoder call. {UNPATCHED}"
        if self._own_heartbeat.make(self.listener).tells_that_all_sync():
            why = "every rank syncs, but there are no stall reports there; stderr there says why"
        return f"{named(self.missing)} of {self._group.size} {verb} within {self._limit.total_seconds():g} s: {why}"
