"""The job's store: connections of our own to it, and which part of it belongs to this process group."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import ctypes
import secrets
import socket
import threading
import weakref

import torch.distributed as dist

from .keys import ATTEMPT, PREFIX, SEAT

_CONNECT_S = 2.0


class JobStore:
    """The store that all ranks of a process group meet at. c10d's own client of it is never used for a request.

    One store may see several process groups, one after the other: torchrun can keep it over restarts, a script may
    initialize again. What a rank could count by itself (its process groups, TORCHELASTIC_RESTART_COUNT) then differs
    between ranks. So the store counts the attempts: who finds its seat taken by another process opens the next one.
    """

    def __init__(self, default_store: dist.Store, rank: int) -> None:
        # Weak: a strong reference would keep rank 0's server, and its port, after destroy_process_group.
        self._default_store = weakref.ref(default_store)
        self.rank, self.id, self.lock = rank, secrets.token_hex(16), threading.Lock()
        self.attempt = -1  # of this process group, as far as it is known; written under the lock
        inner = default_store
        while isinstance(inner, dist.PrefixStore):
            inner = inner.underlying_store
        self.is_file = isinstance(inner, dist.FileStore)
        self.server = (inner.host, inner.port) if isinstance(inner, dist.TCPStore) else None

    def connect(self) -> StoreConnection:
        """May block; raises RuntimeError where the group is gone, and the store's errors."""
        if (store := self._default_store()) is None:
            raise RuntimeError("the process group was destroyed")
        if hasattr(store, "clone") and (self.server is not None or self.is_file):  # newer torch; keeps the prefixes
            store = store.clone()
        elif self.server is not None:
            store = dist.TCPStore(*self.server, is_master=False, wait_for_workers=False)
        return StoreConnection(self, dist.PrefixStore(PREFIX, store))

    def outlive_interpreter(self) -> None:
        """At exit, where a thread still waits for the store: it must not return into a dying interpreter.

        So the store's server, where this process has it, must not end before the process does: one reference too many.
        """
        if (default_store := self._default_store()) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(default_store))


class StoreConnection:
    """For one thread at a time, which alone writes the fields."""

    def __init__(self, job_store: JobStore, store: dist.Store) -> None:
        self.part: dist.Store | None = None  # the present attempt's, as far as it is known
        self._job_store, self._store, self._attempt = job_store, store, -1
        # It says nothing, and tells when the server has gone: c10d logs 22 lines for a request then.
        self._silent = socket.create_connection(job_store.server, _CONNECT_S) if job_store.server is not None else None
        if self._silent is not None:
            self._silent.setblocking(False)
            weakref.finalize(self, self._silent.close).atexit = False  # Python's development mode warns without

    def check(self) -> None:
        """Before a request. Raises ConnectionError where the server has gone; does not block."""
        with contextlib.suppress(BlockingIOError):
            if self._silent is not None and not self._silent.recv(1):
                raise ConnectionError("its server has closed the connection")

    def join(self, anew: bool) -> dist.Store:
        """The present attempt's part of the store, where this rank has taken its seat. Waits for no rank; may block.

        Until all ranks have come it may turn out to be an earlier one's, so until then ask `anew`.
        """
        self.check()
        job_store = self._job_store
        if anew or self.part is None or self._attempt != job_store.attempt:
            with job_store.lock:
                attempt = self._store.add(ATTEMPT, 0)
                while attempt != job_store.attempt:
                    seat = SEAT.format(attempt=attempt, rank=job_store.rank)
                    if self._store.compare_set(seat, "", job_store.id) == job_store.id.encode():
                        job_store.attempt = attempt
                    else:
                        attempt += 1
                        self._store.set(ATTEMPT, str(attempt))
            self.part, self._attempt = dist.PrefixStore(str(attempt), self._store), attempt
        return self.part
