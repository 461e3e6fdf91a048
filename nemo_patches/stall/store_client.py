"""This rank's way to the job's store for stall reports: who asks over it, and who leaves its heartbeats there.

c10d blocks where a network is cut: a request until its answer comes, and a heartbeat, which has no answer, as soon as
the link takes no more. So each question is asked in a thread of its own, heartbeats leave from another, and one thread
at a time uses a connection. Where an answer does not come, the next to ask makes a connection anew, less and less
often, and who asks meanwhile is told at once; an answer opens the way again.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from ..channel import keys
from ..channel.store import JobStore, StoreConnection
from .heartbeat import Heartbeat
from .log_line import report
from .rank_text import first_line
from .wire import decode_heartbeat, encode_heartbeat

_KEYS_PER_REQUEST = 256
_STORE_SLOW_AFTER_S = 0.5
_GIVEN_UP_AFTER_S = 10.0  # a connection on which an answer does not come
_MOST_FAILURES = 6  # in a row that count; after so many a connection is made anew at most once in 63 s
_NO_ENTRY = ("", "")  # in the store


class StoreUnansweredError(ConnectionError):
    """The store owes another thread an answer. since: time.monotonic() at which that was asked for."""

    def __init__(self, since: float) -> None:
        super().__init__(f"it has not answered for {time.monotonic() - since:.1f} s")
        self.since = since


class StoreClient:
    """`asking` for requests that wait for an answer, `send` for a heartbeat, which does not; `ask_in_thread`."""

    def __init__(self, job_store: JobStore) -> None:
        self._job_store = job_store
        self._way = _Way()
        self._heartbeat = _NO_ENTRY  # the latest; `send` writes it
        self._sent = _NO_ENTRY  # the latest that was sent; the sending thread writes it
        self._wake = threading.Event()  # for that thread
        self._sending = threading.Thread()  # `ident` is None until it has started
        self._disconnected = False
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._said = ""  # why a thread could not start

    @contextmanager
    def asking(self, join: bool = False) -> Iterator[dist.Store]:
        """The store, for requests by this thread alone. May block; raises the store's errors.

        join: look first whether the attempt is still the present one.
        """
        line = self._way.take()
        try:
            yield self._joined(line, join)
        except BaseException as error:
            self._way.failed(line, error)
            raise
        else:
            self._way.answered(line)
        finally:
            self._way.leave(line, closes=self._disconnected and self._sent is self._heartbeat)

    def send(self, heartbeat: Heartbeat) -> None:
        """Leave this rank's heartbeat, from a thread of its own. While one is on its way only the latest waits."""
        self._heartbeat = _entry(heartbeat)
        self._wake.set()
        if not self._sending.is_alive():
            self._sending = self.ask_in_thread(self._send_all, "nemo_patches heartbeats")

    def problem(self) -> str:
        """Why there is no connection to the store at present; empty where there is one, or it is silent."""
        return self._way.problem()

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
        """Let the connection go, once the last heartbeat is sent and no thread is asking over it."""
        self._disconnected = True
        self._wake.set()
        if self._sent is self._heartbeat:
            self._way.close()

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

    def _joined(self, line: _Line, anew: bool) -> dist.Store:
        """The store, over the line's connection, or over a new one where that was lost."""
        if line.connection is not None:
            try:
                line.connection.check()
            except OSError as error:  # what is wrong, should a new connection take long
                self._way.failed(line, error)
        if line.connection is None:
            line.connection = self._job_store.connect()
        return line.connection.join(anew)

    def _send_all(self) -> None:
        """In its own thread."""
        while not (self._disconnected and self._sent is self._heartbeat):
            self._wake.wait()
            self._wake.clear()
            if (latest := self._heartbeat) is not self._sent:
                # The next one comes soon. What is wrong with the store is said by who asks it.
                with contextlib.suppress(Exception), self.asking() as store:
                    store.set(*latest)
                self._sent = latest
        self._way.close()


class _Line:
    """A connection to the store, for one thread at a time."""

    def __init__(self) -> None:
        self.turn = threading.Lock()  # of the thread that uses it, which alone writes the fields
        self.connection: StoreConnection | None = None
        self.asked_at = 0.0  # time.monotonic() since when it owes an answer


class _Way:
    """The line that is in use, and when the next may be made where it fails. The fields are written under the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for arithmetic
        self._line = _Line()
        self._failures, self._opens_at = 0, 0.0  # in a row; time.monotonic()
        self._problem, self._unanswered_since = "", 0.0  # of the latest failure; 0.0: it was an error

    def take(self) -> _Line:
        """The line, once it is this thread's. Raises ConnectionError where there is none for a while."""
        while True:
            with self._lock:
                line, now = self._line, time.monotonic()
                if now < self._opens_at or (self._failures and line.turn.locked()):  # another thread tries again
                    raise self._refusal()
            patience_s = max(line.asked_at + _GIVEN_UP_AFTER_S - now, 0.0) if line.asked_at else _GIVEN_UP_AFTER_S
            if line.turn.acquire(timeout=patience_s):
                line.asked_at = time.monotonic()
                return line
            self._give_up(line)

    def answered(self, line: _Line) -> None:
        with self._lock:
            self._failures, self._opens_at = 0, 0.0

    def failed(self, line: _Line, error: BaseException) -> None:
        line.connection = None
        with self._lock:
            if line is self._line:
                self._wait_longer(str(error) if isinstance(error, ConnectionError) else first_line(error), 0.0)

    def leave(self, line: _Line, closes: bool) -> None:
        """closes: let the connection go."""
        with self._lock:
            if closes or line is not self._line:
                line.connection = None
        line.asked_at = 0.0
        line.turn.release()

    def problem(self) -> str:
        """Why there is no connection at present; empty where there is one, or an answer is waited for."""
        with self._lock:
            return self._problem if self._failures else ""

    def close(self) -> None:
        """Let the connection go, where no thread uses it."""
        line = self._line
        if line.turn.acquire(blocking=False):
            line.connection = None
            line.turn.release()

    def _give_up(self, line: _Line) -> None:
        """Its thread has waited too long for an answer, and goes on waiting. Another connection may do better."""
        with self._lock:
            asked_at = line.asked_at
            if line is self._line and asked_at and time.monotonic() - asked_at >= _GIVEN_UP_AFTER_S:
                self._line = _Line()
                self._wait_longer("", asked_at if self._failures == 0 else self._unanswered_since or asked_at)

    def _wait_longer(self, problem: str, unanswered_since: float) -> None:
        self._problem, self._unanswered_since = problem, unanswered_since
        self._opens_at = time.monotonic() + 2**self._failures - 1  # at once, after the first failure
        self._failures = min(self._failures + 1, _MOST_FAILURES)

    def _refusal(self) -> ConnectionError:
        if self._unanswered_since:
            return StoreUnansweredError(self._unanswered_since)
        return ConnectionError(self._problem)


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
        owed_since = 0.0
        try:
            with self._client.asking() as store:
                yield store
        except StoreUnansweredError as error:
            owed_since = error.since
            raise
        finally:
            self._asked_at = owed_since

    def trouble(self) -> str:
        """What is wrong with the store; empty where it answers."""
        asked_at = self._asked_at
        owed = time.monotonic() - asked_at if asked_at else 0.0
        is_slow = owed >= _STORE_SLOW_AFTER_S
        error = self._client.problem() if is_slow else self.error
        if error or not is_slow:
            return f"the job's store, which all ranks meet at, is gone: {error}" if error else ""
        return f"the job's store has not answered for {owed:.1f} s"


def announce(store: dist.Store, heartbeat: Heartbeat, again: bool = False) -> None:
    """The first heartbeat, and then the sign that there is one.

    again: an attempt to has failed, maybe for want of an answer alone. Then nothing is added a second time, and the
    count may stay one too low.
    """
    step = keys.RANKS_PER_BLOCK
    block, bit = keys.PRESENT.format(block=heartbeat.rank // step), 1 << heartbeat.rank % step
    send(store, heartbeat)
    if again and store.add(block, 0) & bit:
        return
    store.add(block, bit)
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
    """Waits for no answer, but for a link that takes no more."""
    store.set(*_entry(heartbeat))


def _entry(heartbeat: Heartbeat) -> tuple[str, str]:
    """Its key in the store, and its value."""
    return keys.HEARTBEAT.format(rank=heartbeat.rank), encode_heartbeat(heartbeat).decode()


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
