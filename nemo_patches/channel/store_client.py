"""Requests to the job's store that block nothing: each in its own thread and connection, as they are rare.

c10d blocks where a network is cut: a request until its answer comes, for minutes. So nothing here waits for one, and
while one owes an answer no other is made, but who asks is told what is wrong.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from ..text import first_line
from .daemon import Daemon
from .store import JobStore

_STORE_SLOW_AFTER_S = 0.5
_MOST_UNANSWERED = 3  # threads


class StoreRequest:
    """A request that is under way, or over. Its thread writes the fields."""

    def __init__(self) -> None:
        self.is_done = self.is_unreachable = False
        self.error = ""
        self._began = time.monotonic()

    def trouble(self) -> str:
        """What is wrong with the store; empty if it answers."""
        if self.error:
            return f"the job's store, which all ranks meet at, is gone: {self.error}"
        took_s = time.monotonic() - self._began
        is_late = not self.is_done and took_s >= _STORE_SLOW_AFTER_S
        return f"the job's store has not answered for {took_s:.1f} s" if is_late else ""

    def run(self, ask: Callable[[], None]) -> None:
        try:
            ask()
        except Exception as error:  # torch has no common class for what its stores raise
            self.is_unreachable = isinstance(error, ConnectionError)
            self.error = str(error) if self.is_unreachable else first_line(error)
        self.is_done = True


class StoreClient:
    """Any thread may ask."""

    def __init__(self, job_store: JobStore, say: Callable[[str], None]) -> None:
        """say: logs that no thread can be started."""
        self._job_store, self._say = job_store, say
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._requests: tuple[StoreRequest, ...] = ()  # that are not over; replaced as a whole
        self._said = ""  # why a thread could not start

    @contextmanager
    def asking(self, attempt: int | None = None) -> Iterator[dist.Store]:
        """An attempt's part of the store, else the present one's, for this thread alone. May block; raises the store's
        errors."""
        connection = self._job_store.connect()
        yield connection.join(anew=True) if attempt is None else connection.part_of(attempt)

    def ask(self, ask: Callable[[dist.Store], None], attempt: int | None = None) -> StoreRequest:
        """Ask in a thread; if the store owes too many answers, return a request that is under way."""
        self._requests = tuple(one for one in self._requests if not one.is_done)
        if len(self._requests) >= _MOST_UNANSWERED:
            return self._requests[0]
        request = StoreRequest()

        def run() -> None:
            with self.asking(attempt) as store:
                ask(store)

        if self.ask_in_thread(lambda: request.run(run)).ident is None:
            request.error, request.is_done = "no thread can be started", True
        else:
            self._requests = (*self._requests, request)
        return request

    def ask_in_thread(self, ask: Callable[[], None]) -> threading.Thread:
        """Run `ask` in a daemon thread that `join` waits for. If it cannot start, `ident` is None; logged once."""
        thread = Daemon("query", ask)
        self._threads.add(thread)
        if (why := thread.begin()) and why != self._said:
            self._said = why
            self._say(f"the job's store cannot be asked, training goes on: {why}")
        return thread

    def join(self, also: Iterable[threading.Thread], limit: timedelta) -> None:
        """At exit: wait for the threads' ends, for a short while; c10d must not return into a dying interpreter.

        A thread that the store still has not answered then stays there.
        """
        end = time.monotonic() + limit.total_seconds()
        for thread in (*also, *list(self._threads)):
            with contextlib.suppress(RuntimeError):  # it is the calling one
                if thread.ident is not None:  # else a signal handler raised before it started
                    thread.join(max(end - time.monotonic(), 0.0))
                if thread.is_alive():
                    self._job_store.outlive_interpreter()
