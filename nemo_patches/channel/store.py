"""The job's store: our own connections to it, and the part of it that belongs to this process group."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import struct
import threading
import weakref

import torch.distributed as dist

from .keys import ATTEMPT, PREFIX, SEAT

_CONNECT_S = 2.0
_SO_ATTACH_FILTER = 26  # of Linux, which Python's socket module does not tell
_DROP_ALL = struct.pack("@HBBI", 0x06, 0, 0, 0)  # a socket filter of one instruction: of each packet, return 0 bytes
_LONGEST_ADDRESS = 128  # bytes


class JobStore:
    """The store that all ranks of a process group share. c10d's own client is never used for a request.

    One store may see several process groups, one after the other: torchrun can keep it over restarts, a script may
    initialize again. What a rank could count by itself (its process groups, TORCHELASTIC_RESTART_COUNT) then differs
    between ranks. So the store counts the attempts: who finds its seat taken by another process opens the next one.
    """

    def __init__(self, default_store: dist.Store, rank: int) -> None:
        # Weak: a strong reference would keep rank 0's server, and its port, after destroy_process_group.
        self._default_store = weakref.ref(default_store)
        self.rank, self.id, self.lock = rank, secrets.token_hex(16), threading.Lock()
        self.attempt = -1  # of this process group, if known; written under the lock
        self._answers: weakref.WeakSet[_Answers] = weakref.WeakSet()  # of the connections
        self._is_over = False  # written at exit
        inner = default_store
        while isinstance(inner, dist.PrefixStore):
            inner = inner.underlying_store
        self.is_file = isinstance(inner, dist.FileStore)
        self.server = (inner.host, inner.port) if isinstance(inner, dist.TCPStore) else None

    def connect(self) -> StoreConnection:
        """May block; raises RuntimeError if the group is gone, ConnectionError, and the store's errors."""
        if (store := self._default_store()) is None:
            raise RuntimeError("the process group was destroyed")
        answers = _Answers(self.server[1] if self.server is not None else 0)
        self._answers.add(answers)
        if self._is_over:  # checked afterwards: at exit each connection is stopped, or not made
            raise RuntimeError("this process ends")
        silent = self._connect_silent()  # first: c10d tries a dead server for minutes, and logs each time
        if hasattr(store, "clone") and (self.server is not None or self.is_file):  # newer torch; keeps the prefixes
            store = store.clone()
        elif self.server is not None:
            store = dist.TCPStore(*self.server, is_master=False, wait_for_workers=False)
        answers.connected()
        return StoreConnection(self, dist.PrefixStore(PREFIX, store), silent, answers)

    def _connect_silent(self) -> socket.socket | None:
        """A silent connection, which ends with the server: c10d logs 22 lines for a request to a dead one."""
        if self.server is None:
            return None
        try:
            silent = socket.create_connection(self.server, _CONNECT_S)
        except OSError as error:
            raise ConnectionError(f"its server cannot be reached: {error}") from None
        silent.setblocking(False)
        return silent

    def outlive_interpreter(self) -> None:
        """At exit, where a thread still waits for the store: it must not return into a dying interpreter.

        That ends the thread within c10d, and C++ then aborts the process. So no answer comes any more, and the store's
        server, where this process has it, must not end before the process does: one reference too many.
        """
        self._is_over = True
        for answers in list(self._answers):
            answers.stop()
        if (default_store := self._default_store()) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(default_store))


class StoreConnection:
    """For one thread at a time, which alone writes the fields."""

    def __init__(
        self,
        job_store: JobStore,
        store: dist.Store,
        silent: socket.socket | None = None,
        answers: _Answers | None = None,
    ) -> None:
        self.part: dist.Store | None = None  # the present attempt's, as far as it is known
        self._job_store, self._store, self._attempt = job_store, store, -1
        self._silent, self._answers = silent, answers
        if silent is not None:
            weakref.finalize(self, silent.close).atexit = False  # Python's development mode warns without

    def check(self) -> None:
        """Call it before a request. Raises ConnectionError if the server has died; does not block."""
        with contextlib.suppress(BlockingIOError):
            if self._silent is not None and not self._silent.recv(1):
                raise ConnectionError("its server has closed the connection")

    def part_of(self, attempt: int) -> dist.Store:
        """The part of an attempt in which this rank has taken its seat. No request."""
        self.check()
        return dist.PrefixStore(str(attempt), self._store)

    def join(self, anew: bool) -> dist.Store:
        """The present attempt's part of the store, where this rank has taken its seat. Waits for no rank; may block.

        Until all ranks have come it may turn out to be an earlier one's, so until then ask `anew`.
        """
        self.check()
        job_store = self._job_store
        if anew or job_store.attempt < 0:
            with job_store.lock:  # not for a connection that replaces another: its thread may get no answer
                attempt = self._store.add(ATTEMPT, 0)
                while attempt != job_store.attempt:
                    seat = SEAT.format(attempt=attempt, rank=job_store.rank)
                    if self._store.compare_set(seat, "", job_store.id) == job_store.id.encode():
                        job_store.attempt = attempt
                    else:
                        attempt += 1
                        self._store.set(ATTEMPT, str(attempt))
        if self.part is None or self._attempt != job_store.attempt:
            self._attempt = job_store.attempt
            self.part = dist.PrefixStore(str(self._attempt), self._store)
        return self.part


class _Answers:
    """What the store's server sends over one connection, whose socket c10d has and does not give away."""

    def __init__(self, port: int) -> None:
        """Before the connection is made. port: the server's, 0 where there is none."""
        self._port = port
        self._others = _sockets_to(port).keys()
        self._own: set[int] | None = None  # None: it is being made

    def connected(self) -> None:
        self._own = _sockets_to(self._port).keys() - self._others

    def stop(self) -> None:
        """From now on the kernel drops all packets, if it can."""
        libc, program = ctypes.CDLL(None), ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        filter_ = struct.pack("@HP", 1, ctypes.addressof(program))
        for number, descriptor in _sockets_to(self._port).items():
            if number in self._own if self._own is not None else number not in self._others:
                libc.setsockopt(descriptor, socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_, len(filter_))


def _sockets_to(port: int) -> dict[int, int]:
    """This process's connections to such a port: their file descriptors, by what the kernel numbers them with.

    By the C library: Python makes a socket that it wraps non-blocking, where socket.setdefaulttimeout was called.
    """
    libc, found = ctypes.CDLL(None), dict[int, int]()
    address, length = ctypes.create_string_buffer(_LONGEST_ADDRESS), ctypes.c_uint32()
    descriptors: list[str] = []
    with contextlib.suppress(OSError):  # no file left to read them with, or no such folder
        descriptors = os.listdir("/proc/self/fd") if port else []
    for descriptor in map(int, descriptors):
        length.value = _LONGEST_ADDRESS
        if libc.getpeername(descriptor, address, ctypes.byref(length)) == 0:
            (family,), (its_port,) = struct.unpack_from("@H", address), struct.unpack_from("!H", address, 2)
            if family in (socket.AF_INET, socket.AF_INET6) and its_port == port:
                with contextlib.suppress(OSError):  # it was closed just now
                    found[os.stat(descriptor).st_ino] = descriptor
    return found
