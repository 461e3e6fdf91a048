"""Rounds over a tree of sockets: MAX all-reduces of one int64 among all ranks, waited for in bounded time.

One tree per process group, in one daemon thread; all encoders' rounds travel on the same connections. Values go up to
rank 0, each rank's for all ranks below it, and the result comes down. Messages carry key and number, so nothing is
paired by order. A lost connection ends the rounds on every rank. No torch: the job's store is handed in.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .tree import FAN_OUT, Connection, Place, make_room

if TYPE_CHECKING:
    from .store import JobStore

# In place of a number; the value is the rank that lets this one in, that has gone, or that has left in good order.
_WELCOME, _GONE, _LEFT = -1, -2, -3
_REASONS = {
    _GONE: "has gone, or the network to it was lost",
    _LEFT: "has left: it ended, or destroyed its process group",
}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_PER_RANK_S = 0.002, 0.25, 0.002  # many ranks ask the one store less often
_IDLE_S, _SIGNAL_S = 5.0, 0.5


class RoundFailed(Exception):
    """There will be no more rounds: a rank has gone or cannot take part, or the network failed."""


class Rounds:
    """One encoder's rounds, at most one outstanding: `issue`, then `wait` or `poll` until it gives the result."""

    def __init__(self, channel: SideChannel, key: bytes) -> None:
        self.key, self.closed = key, False  # closed: nobody here wants these rounds any more
        self.issued = self.done = self.result = 0
        self.came_at = 0.0  # time.monotonic() of the last result
        self.arrived: dict[int, int] = {}  # to the round that is not done, by rank: the children's, and this rank's own
        self.channel, self._pending = channel, threading.Lock()  # locked from a round's issue until it has come

    def issue(self, value: int) -> None:
        """Send a round off; raises RoundFailed where there are no more. `value` is an int64."""
        with self.channel.lock:
            self.channel.start()
            self._pending.acquire(blocking=False)
            self.issued = self.done + 1
            try:
                self.channel.arrive(self, self.issued, value, self.channel.rank)
            except BaseException:  # a signal handler's: the others must have this value, or the result, all the same
                self.channel.arrive(self, self.issued, value, self.channel.rank)
                raise
        self.poll()

    def wait(self, limit: timedelta) -> int | None:
        """The outstanding round's result; None if it has not come within `limit`. Signal handlers run meanwhile."""
        end = time.monotonic() + limit.total_seconds()
        while not self.has_come() and not self.channel.error and (left := end - time.monotonic()) > 0:
            self._pending.acquire(timeout=min(left, _SIGNAL_S))  # a signal just before, or to another thread, ends none
        return self.poll()

    def poll(self) -> int | None:
        """The outstanding round's result, or None while it has not come; raises RoundFailed. Does not block."""
        if not self.has_come() and self.channel.error:
            raise RoundFailed(self.channel.error)
        return self.result if self.has_come() else None

    def has_come(self) -> bool:
        """Whether the outstanding round has come; any thread may ask."""
        return self.done >= self.issued

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # nobody waits
            self._pending.release()


class SideChannel:
    """This rank's part of the tree. Its thread begins with the first round, and ends with the process group."""

    def __init__(self, job_store: JobStore, rank: int, size: int, say: Callable[[str], None]) -> None:
        """say: logs what keeps this rank from connecting."""
        self.rank, self.by_key, self.kept = rank, dict[bytes, Rounds](), set[Rounds]()  # kept: not to be forgotten
        self.error, self.left = "", -1  # why there are no more rounds; the rank that ended them in good order
        self._leaves = False  # this one ends, or its process group, and tells the others
        self.lock = threading.RLock()  # held for arithmetic, and for sends that do not block
        self._job_store, self._say, self._place = job_store, say, Place(job_store.server, rank, size)
        self._longest_pause_s = _LONGEST_PAUSE_S + size * _PAUSE_PER_RANK_S
        self._connections: dict[int, Connection] = {}  # by rank: the children, and the parent
        self._parent: Connection | None = None  # also before it has let this rank in
        self._selector = selectors.PollSelector()  # which is no file: this process may have none left
        self._token = secrets.token_bytes(16)
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._troubles: dict[str, int] = {}  # how often something has kept this rank from connecting
        _channels.add(self)

    def rounds(self, name: str) -> Rounds:
        """The rounds of this name, which is the same on all ranks. Time to forget those that nobody wants."""
        with self.lock:
            forgotten = {one for one in self.by_key.values() if one.closed and one.has_come()} - self.kept
            self.by_key = {key: one for key, one in self.by_key.items() if one not in forgotten}
            return self._of(hashlib.blake2b(name.encode(), digest_size=8).digest())

    def start(self) -> None:
        """From now on there is a thread. With the lock held."""
        if self._thread is None and not self.error:
            self._thread = threading.Thread(target=self._run, name="nemo_patches side channel", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # as many as this user or container may have
                self.stop(f"this rank cannot take part: {error}")

    def stop(self, reason: str, leaves: bool = False) -> None:
        """End this rank's rounds at once, and the thread soon. Takes no lock: the garbage collector may call this."""
        self._leaves = self._leaves or (leaves and not self.error)
        self.error = self.error or reason
        for rounds in list(self.by_key.values()):
            rounds.wake()
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RD)  # wakes the thread

    def join(self, limit: timedelta) -> None:
        """At exit: wait for the thread's end, for a short while."""
        if (thread := self._thread) is not None and thread.ident is not None:  # None: interrupted before it started
            thread.join(limit.total_seconds())
            if thread.is_alive():  # in a request to the store
                self._job_store.outlive_interpreter()

    def forget(self) -> None:
        """In a forked child: its copies would keep the connections open after this rank's death."""
        self.lock, self.error = threading.RLock(), "this process was forked from the rank's own"
        self._close()

    # What follows runs with the lock held.

    def arrive(self, rounds: Rounds, number: int, value: int, source: int) -> None:
        """To a round: a child's value, for all ranks below it, or this rank's own."""
        if number == rounds.done + 1:
            rounds.arrived[source] = max(value, rounds.arrived.get(source, value))
            self._pass_on(rounds)

    def _of(self, key: bytes) -> Rounds:
        return self.by_key.get(key) or self.by_key.setdefault(key, Rounds(self, key))

    def _pass_on(self, rounds: Rounds) -> None:
        if not self._place.is_known or len(rounds.arrived) <= len(self._place.children):
            return
        value = max(rounds.arrived.values())
        if self.rank == 0:
            self._deliver(rounds, value)
        elif self._place.parent in self._connections:
            self._connections[self._place.parent].send(rounds.key, rounds.done + 1, value)

    def _deliver(self, rounds: Rounds, value: int) -> None:
        for connection in self._connections.values():
            if connection is not self._parent:
                connection.send(rounds.key, rounds.done + 1, value)
        rounds.result, rounds.came_at, rounds.arrived, rounds.done = value, time.monotonic(), {}, rounds.done + 1
        rounds.wake()

    def _fail(self, reason: int, rank: int) -> None:
        """No more rounds on any rank: the first reason is passed on."""
        if not self.error:
            for connection in self._connections.values():
                connection.send(bytes(8), reason, rank)
            self.left = rank if reason == _LEFT else -1
            self.stop(f"rank {rank} {_REASONS[reason]}")

    def _hear(self, connection: Connection, key: bytes, number: int, value: int) -> None:
        if number in (_GONE, _LEFT):
            self._fail(number, value)
        elif number == _WELCOME:
            self._connections[connection.rank] = connection
            for rounds in list(self.by_key.values()):
                self._pass_on(rounds)
        elif connection is not self._parent:
            self.arrive(self._of(key), number, value, connection.rank)
        elif (rounds := self._of(key)).issued == number == rounds.done + 1:
            self._deliver(rounds, value)

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._parent = None if connection is self._parent else self._parent
        if self._connections.pop(connection.rank, None) is not None:
            self._fail(_GONE, connection.rank)

    def _close(self) -> None:
        for entry in list((self._selector.get_map() or {}).values()):
            entry.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    # What follows runs in the channel's thread.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self.stop(f"the side channel has ended by an error of its own, please report it: {error!r}")
        with self.lock:
            for connection in {*self._connections.values(), *filter(None, [self._parent])}:
                connection.send(bytes(8), _LEFT if self._leaves else _GONE, self.rank)
            self._close()

    def _serve(self) -> None:
        store, pause, next_look = None, _FIRST_PAUSE_S, 0.0
        while not self.error:
            if self._place.is_known and len(self._connections) == len(self._place.children) + (self.rank > 0):
                store, next_look = None, time.monotonic() + _IDLE_S  # the tree is whole
            elif time.monotonic() >= next_look:
                try:
                    make_room(FAN_OUT + 8)  # for the tree, and for the connection to the store
                    store = store or self._job_store.connect()
                    stepped = self._look(store.join(anew=not self._place.is_known))  # a known tree: of one attempt
                    pause = _FIRST_PAUSE_S if stepped else pause * 1.5
                except Exception as error:  # torch has no common class for what its stores raise
                    store, pause = None, self._longest_pause_s
                    self._tell_trouble(ascii(error))
                next_look = time.monotonic() + (pause := min(pause, self._longest_pause_s))
            for entry, _ in self._selector.select(max(next_look - time.monotonic(), 0.0)):
                if self.error:  # stopped: the connections still carry the reason
                    break
                if entry.data is not None:
                    self._read(entry.data)
                elif self._listener is not None:
                    self._visited(self._listener)

    def _tell_trouble(self, text: str) -> None:
        self._troubles[text] = self._troubles.get(text, 0) + 1
        if self._troubles[text] == 2:  # at the end of a job the store may go first, which is nobody's concern
            self._say(f"the length sync is not connected yet, this rank tries again: {text}")

    def _read(self, connection: Connection) -> None:
        messages = connection.receive()
        with self.lock:
            for message in messages or ():
                self._hear(connection, *message)
            if messages is None:
                self._drop(connection)

    def _look(self, store: Any) -> bool:
        """One step towards a whole tree, by what the store has; False: none to take yet. Waits for no rank."""
        place = self._place
        if not place.is_known:
            if place.find(store, self._job_store.attempt) and place.problem:
                self.stop(place.problem)
            return place.is_known
        if self._listener is None and place.children - self._connections.keys():
            self._listener = place.listen(store, self._token)
            self._selector.register(self._listener, selectors.EVENT_READ)
        if self.rank > 0 and self._parent is None and (parent := place.knock(store)) is not None:
            self._parent = parent
            self._selector.register(parent.socket, selectors.EVENT_READ, parent)
        return False

    def _visited(self, listener: socket.socket) -> None:
        """Let in a child that knows the token; drop everybody else at once."""
        missing = self._place.children - self._connections.keys()
        try:
            if (child := self._place.admit(listener, self._token, missing)) is not None:
                with self.lock:
                    self._connections[child.rank] = child
                    child.send(bytes(8), _WELCOME, self.rank)
                self._selector.register(child.socket, selectors.EVENT_READ, child)
                missing -= {child.rank}
        except OSError as error:  # no more files: the next look listens again
            self._tell_trouble(ascii(error))
            missing = frozenset()
        if not missing:
            self._selector.unregister(listener)
            listener.close()
            self._listener = None


def _at_exit() -> None:
    for channel in list(_channels):
        channel.stop("this process ends", leaves=True)
        channel.join(timedelta(seconds=0.5))


_channels: weakref.WeakSet[SideChannel] = weakref.WeakSet()
atexit.register(_at_exit)
os.register_at_fork(after_in_child=lambda: list(map(SideChannel.forget, list(_channels))))
