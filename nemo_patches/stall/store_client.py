"""This rank's one connection to the job's store for stall reports, and the short-lived threads that ask over it.

A question may stay unanswered for minutes where a network is cut. So each is asked in a thread of its own, and the
connection is used by one thread at a time, under its lock.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from ..sync import keys
from ..sync.store import JobStore, StoreConnection
from .heartbeat import Heartbeat
from .log_line import report
from .wire import decode_heartbeat, encode_heartbeat

_KEYS_PER_REQUEST = 256
_STORE_SLOW_AFTER_S = 0.5
_SEND_PATIENCE_S = 0.05  # for the lock: a heartbeat waits for nobody's answer


class StoreClient:
    """`asking` for requests that wait for an answer, `send` for a heartbeat, which does not; `ask_in_thread`."""

    def __init__(self, job_store: JobStore) -> None:
        self._job_store = job_store
        self._lock = threading.Lock()
        self._connection: StoreConnection | None = None  # `asking` makes it, under the lock; `disconnect` lets it go
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._said = ""  # why a thread could not start

    @contextmanager
    def asking(self, join: bool = False) -> Iterator[dist.Store]:
        """The store, for requests by this thread alone. May block; raises the store's errors.

        join: look first whether the attempt is still the present one.
        """
        with self._lock:
            if self._connection is None:
                self._connection = self._job_store.connect()
            yield self._connection.join(anew=join)

    def send(self, heartbeat: Heartbeat) -> bool:
        """Leave this rank's heartbeat; False where another thread waits for an answer. Raises the store's errors."""
        connection = self._connection
        if connection is None or connection.part is None or not self._lock.acquire(timeout=_SEND_PATIENCE_S):
            return False
        try:
            connection.check()
            send(connection.part, heartbeat)
            return True
        finally:
            self._lock.release()

    def ask_in_thread(self, ask: Callable[[], None], name: str = "nemo_patches query") -> threading.Thread:
        """Run `ask` in a daemon thread, which `join` knows. Its `ident` is None where it could not start: said once."""
        thread = threading.Thread(target=ask, name=name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # as many as this user or container may have
            if str(error) != self._said:
                self._said = str(error)
                report(logging.WARNING, f"stall reports cannot ask who is missing, training goes on: {error}")
        return thread

    def disconnect(self) -> None:
        """Let the connection go, unless a thread is still asking over it; then that thread does, at its end."""
        self._connection = None

    def join(self, also: Iterable[threading.Thread], limit: timedelta) -> None:
        """At exit: wait for the threads' ends, for a short while; c10d must not return into a dying interpreter.

        A thread that the store still has not answered then stays there.
        """
        end = time.monotonic() + limit.total_seconds()
        for thread in (*also, *list(self._threads)):
            if thread.ident is not None:  # else a signal handler raised before it started
                thread.join(max(end - time.monotonic(), 0.0))
            if thread.is_alive():
                self._job_store.outlive_interpreter()


class AskedStore:
    """The store as one query's thread asks it, and what is wrong with it, which any thread may read."""

    def __init__(self, client: StoreClient) -> None:
        self.error = ""  # the query's thread writes it
        self._client = client
        self._asked_at = 0.0  # since when the store owes an answer

    @contextmanager
    def asking(self) -> Iterator[dist.Store]:
        """While the store owes an answer. Raises the store's errors."""
        self._asked_at = time.monotonic()
        try:
            with self._client.asking() as store:
                yield store
        finally:
            self._asked_at = 0.0

    def trouble(self) -> str:
        """What is wrong with the store; empty where it answers."""
        if self.error:
            return f"the job's store, which all ranks meet at, is gone: {self.error}"
        asked_at = self._asked_at
        owed = time.monotonic() - asked_at if asked_at else 0.0
        return f"the job's store has not answered for {owed:.1f} s" if owed >= _STORE_SLOW_AFTER_S else ""


def announce(store: dist.Store, heartbeat: Heartbeat) -> None:
    """The first heartbeat, and then the sign that there is one."""
    step = keys.RANKS_PER_BLOCK
    send(store, heartbeat)
    store.add(keys.PRESENT.format(block=heartbeat.rank // step), 1 << heartbeat.rank % step)
    store.add(keys.ANNOUNCED, 1)


def count_announced(store: dist.Store) -> int:
    """How many ranks have announced themselves, in one request."""
    return int(store.add(keys.ANNOUNCED, 0))


def announced_ranks(store: dist.Store, size: int) -> set[int]:
    """The ranks that have announced themselves: one request for each 62 ranks."""
    ranks: set[int] = set()
    step = keys.RANKS_PER_BLOCK
    for first in range(0, size, step):
        bits = store.add(keys.PRESENT.format(block=first // step), 0)
        ranks.update(rank for rank in range(first, min(first + step, size)) if bits >> rank - first & 1)
    return ranks


def send(store: dist.Store, heartbeat: Heartbeat) -> None:
    """Waits for no answer."""
    store.set(keys.HEARTBEAT.format(rank=heartbeat.rank), encode_heartbeat(heartbeat).decode())


def read_heartbeats(store: dist.Store, ranks: Iterable[int]) -> dict[int, Heartbeat]:
    """The latest heartbeats of ranks that have announced themselves, by rank."""
    wanted = sorted(ranks)
    heartbeats: dict[int, Heartbeat] = {}
    for start in range(0, len(wanted), _KEYS_PER_REQUEST):
        some = wanted[start : start + _KEYS_PER_REQUEST]
        answers = store.multi_get([keys.HEARTBEAT.format(rank=rank) for rank in some])
        for rank, data in zip(some, answers, strict=True):
            heartbeat = decode_heartbeat(data)
            if heartbeat is not None and heartbeat.rank == rank:
                heartbeats[rank] = heartbeat
    return heartbeats
