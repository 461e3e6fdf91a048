"""Rounds over a tree of sockets: MAX all-reduces of one int64 among all ranks, with a timeout.

One tree per process group, in one daemon thread; all encoders' rounds travel on the same connections. Values go up to
rank 0, each rank's for all ranks below it, and the result comes down. Messages carry key and number, so nothing is
paired by order. A connection that is lost comes back; until then rounds are late. A rank that has left or gone ends the
rounds on every rank. No torch: the job's store is handed in.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import queue
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from . import process_hooks
from .daemon import Daemon
from .keys import GONE
from .links import HAS_GONE, HAS_LEFT, LEFT, VANISHED, WELCOME, Links
from .process_hooks import AtExit, InForkedChild
from .store_client import StoreClient
from .survey import ACK, Subject, Surveys
from .tree import CUT_OFF_S, FORMAT, Connection, Place, Resident

if TYPE_CHECKING:
    from .store import JobStore, StoreConnection

_REASONS = {
    HAS_GONE: "has gone, or the network to it was lost",
    HAS_LEFT: "has left: it ended, or destroyed its process group",
}
CLOSED = "closed"  # this rank needs no more of these rounds
_SIGNAL_S = 0.5
_SETTLED_S = CUT_OFF_S + 5.0  # after this time the children have a result, or their connection is lost


class RoundFailed(Exception):
    """There will be no more rounds: a rank has died or cannot take part, or the network failed."""


class Rounds:
    """One encoder's rounds, at most one outstanding: `issue`, then `wait` or `poll` until it gives the result."""

    def __init__(self, channel: SideChannel, key: bytes) -> None:
        self.key = key
        self.over = ""  # why there are no more: CLOSED, or how a round has failed; empty while there are
        self.issued = self.done = self.result = 0
        self.came_at = 0.0  # time.monotonic() of the last result
        self.arrived: dict[int, int] = {}  # values for the open round, by rank: the children's, and this rank's own
        self.arrived_at = 0.0  # time.monotonic() at which the last of them first came
        self.channel, self._pending = channel, threading.Lock()  # locked from a round's issue until its result

    def issue(self, value: int) -> None:
        """Send a round; raises RoundFailed if there are no more. `value` is an int64."""
        with self.channel.lock:
            self.channel.start()
            self._pending.acquire(blocking=False)
            number = self.done + 1
            try:
                self.issued = number
                self.channel.arrive(self, number, value, self.channel.rank)
            except BaseException:  # a signal handler's: the others still need this value, or the result
                if self.issued == number:
                    self.channel.arrive(self, number, value, self.channel.rank)
                raise
        self.poll()

    def wait(self, limit: timedelta) -> int | None:
        """The outstanding round's result; None if it has not come within `limit`. Signal handlers run meanwhile."""
        end = time.monotonic() + limit.total_seconds()
        while not self.has_come() and not self.channel.error and (left := end - time.monotonic()) > 0:
            self._pending.acquire(timeout=min(left, _SIGNAL_S))  # a signal just before, or to another thread, ends none
        return self.poll()

    def poll(self) -> int | None:
        """The outstanding round's result, or None if there is none yet; raises RoundFailed. Does not block."""
        if not self.has_come() and self.channel.error:
            raise RoundFailed(self.channel.error)
        return self.result if self.has_come() else None

    def has_come(self) -> bool:
        """Whether the outstanding round has a result; any thread may ask."""
        return self.done >= self.issued

    def close(self, why: str = CLOSED) -> None:
        """There will be no more; the first reason stays. Takes no lock: the garbage collector may call this."""
        self.over = self.over or why

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # nobody waits
            self._pending.release()


class SideChannel:
    """This rank's part of the tree. Its thread begins with the first round or with surveys, and ends with the process
    group.

    Connections outlive the rounds: where a rank has gone, the others have none any more, and stay connected.
    """

    def __init__(self, job_store: JobStore, rank: int, size: int, say: Callable[[str], None]) -> None:
        """say: logs why this rank cannot connect."""
        self.rank, self.size = rank, size
        self.by_key = dict[bytes, Rounds]()
        self.error = ""  # why there are no more rounds
        self.ended_by: tuple[int, str] | None = None  # the rank that ended them, and how: LEFT or VANISHED
        self.lock = threading.RLock()  # held for arithmetic, and for sends that do not block
        self.say = say
        self.selector = selectors.PollSelector()  # needs no file: this process may have none left
        self.links = Links(self, Place(job_store.server, rank, size))  # which the rounds travel on
        self._trees = [self.links]  # of surveys, also one upside down: no rank hides others in both
        self._surveys: dict[Links, Surveys] = {}
        self._wakes = -1  # a file that wakes the thread
        self._leaves = False  # this rank or its process group ends, and tells the others
        self._is_over = False  # and its thread is to end
        self._end: tuple[int, int] | None = None  # HAS_GONE or HAS_LEFT, and the rank: what ended the rounds
        self._job_store = job_store
        self._store: StoreConnection | None = None  # while this rank needs it
        self._client = StoreClient(job_store, say)
        self._store_answers = queue.SimpleQueue[Callable[[], None]]()
        self._thread: threading.Thread | None = None
        _channels.add(self)

    def take_surveys(self, subject: Subject) -> bool:
        """Begin surveys about this subject; False if it is too late: the other ranks know that this rank has none.

        Raises OSError where there is no file left.
        """
        with self.lock:
            if self._thread is None and not self.error and not self._surveys:
                self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self.selector.register(self._wakes, selectors.EVENT_READ)
                self.links.place.format = FORMAT
                self._trees.append(Links(self, Place(self._job_store.server, self.rank, self.size)))
                self._surveys = {links: Surveys(self, links, subject) for links in self._trees}
                self.start()
            return self.has_surveys

    @property
    def has_surveys(self) -> bool:
        """Whether this rank can ask and answer; any thread may call this."""
        return bool(self._surveys) and not self._is_over

    @property
    def is_joined(self) -> bool:
        """Whether all ranks have registered, and this rank knows it."""
        return self.links.place.is_known

    @property
    def is_whole(self) -> bool:
        """Whether this rank is connected to all its neighbours that have not ended."""
        return all(links.is_whole() for links in self._trees)

    @property
    def residents(self) -> list[Resident]:
        """The ranks' hosts and processes, by rank; empty until all have registered."""
        return self.links.place.residents

    def rounds(self, name: str) -> Rounds:
        """The rounds of this name, which is the same on all ranks. Also forgets closed rounds."""
        with self.lock:
            if not self.links.away:  # a neighbour may still need a last result
                settled = time.monotonic() - _SETTLED_S
                of_no_use = {one for one in self.by_key.values() if one.over and one.has_come()}
                forgotten = {one for one in of_no_use if one.came_at < settled}
                self.by_key = {key: one for key, one in self.by_key.items() if one not in forgotten}
            return self._of(hashlib.blake2b(name.encode(), digest_size=8).digest())

    def start(self) -> None:
        """Start the thread, if there is none. With the lock held."""
        if self._thread is None and not self.error:
            self._thread = Daemon("side channel", self._run)
            if why := self._thread.begin():
                self.stop(f"this rank cannot take part: {why}")

    def stop(self, reason: str, leaves: bool = False) -> None:
        """End this rank's rounds at once, and the thread soon. Takes no lock: the garbage collector may call this."""
        self._leaves = self._leaves or (leaves and not self._is_over)
        self._end_rounds(reason)
        self._is_over = True
        for links in self._trees:
            for connection in list(links.connections.values()):
                with contextlib.suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_RD)  # wakes the thread

    def join(self, limit: timedelta) -> None:
        """At exit: wait for the thread's end, for a short while."""
        if (thread := self._thread) is not None and thread.ident is not None:  # None: interrupted before it started
            self._client.join([thread], limit)

    def forget(self) -> None:
        """In a forked child: close its copies, which would keep the connections open after this rank's death."""
        self.lock, self.error = threading.RLock(), "this process was forked from the rank's own"
        self._close()

    def ask(self) -> None:
        """Any thread: ask every rank; all get the verdicts of both trees."""
        for surveys in list(self._surveys.values()):
            surveys.ask()

    def wake(self) -> None:
        """Make the thread look at once, if there are surveys."""
        with self.lock:
            if self._wakes >= 0:
                os.eventfd_write(self._wakes, 1)

    def _end_rounds(self, reason: str) -> None:
        self.error = self.error or reason
        for rounds in list(self.by_key.values()):
            rounds.wake()

    # What follows runs with the lock held.

    def arrive(self, rounds: Rounds, number: int, value: int, source: int) -> None:
        """Add a value to a round: a child's, for all ranks below it, or this rank's own. It may come twice."""
        if number == rounds.done + 1:
            if source not in rounds.arrived:
                rounds.arrived_at = time.monotonic()
            rounds.arrived[source] = max(value, rounds.arrived.get(source, value))
            self._pass_on(rounds)

    def connected(self, links: Links, connection: Connection) -> None:
        """Repeat the messages of the current rounds.

        A child is at most one round of a key behind: this rank cannot complete another one without it. All go in the
        order in which they were complete here: no rank's encoders may overtake each other.
        """
        if links is not self.links:
            return
        if connection is not links.parent:
            for rounds in sorted(self.by_key.values(), key=lambda one: one.came_at):
                if rounds.done:
                    connection.send(rounds.key, rounds.done, rounds.result)
        else:
            for rounds in sorted(self.by_key.values(), key=lambda one: one.arrived_at):
                if self._is_complete(rounds):
                    connection.send(rounds.key, rounds.done + 1, max(rounds.arrived.values()))
        if self._end is not None:
            connection.send(bytes(8), *self._end)

    def _of(self, key: bytes) -> Rounds:
        return self.by_key.get(key) or self.by_key.setdefault(key, Rounds(self, key))

    def _is_complete(self, rounds: Rounds) -> bool:
        """Whether the values of this rank and of all below it have come."""
        return self.links.place.is_known and len(rounds.arrived) > len(self.links.place.children)

    def _pass_on(self, rounds: Rounds) -> None:
        if not self._is_complete(rounds):
            return
        value = max(rounds.arrived.values())
        if self.rank == 0:
            self._deliver(rounds, value)
        elif (parent := self.links.connections.get(self.links.place.parent)) is not None:
            parent.send(rounds.key, rounds.done + 1, value)

    def _deliver(self, rounds: Rounds, value: int) -> None:
        for connection in self.links.connections.values():
            if connection is not self.links.parent:
                connection.send(rounds.key, rounds.done + 1, value)
        rounds.result, rounds.came_at, rounds.arrived, rounds.done = value, time.monotonic(), {}, rounds.done + 1
        rounds.wake()

    def _fail(self, reason: int, rank: int) -> bool:
        """End the rounds on all ranks: the first reason is passed on. Returns whether it was the first."""
        if self.error:
            return False
        self._end = (reason, rank)
        for connection in self.links.connections.values():
            connection.send(bytes(8), reason, rank)
        self.ended_by = (rank, LEFT if reason == HAS_LEFT else VANISHED)
        self._end_rounds(f"rank {rank} {_REASONS[reason]}")
        return True

    def _hear(self, links: Links, connection: Connection, key: bytes, number: int, value: int) -> None:
        if number == ACK:
            self._of_surveys(links, lambda surveys: surveys.acknowledged(connection))
        elif number in (HAS_GONE, HAS_LEFT):
            if value == connection.rank:  # about itself
                links.ended[value] = LEFT if number == HAS_LEFT else VANISHED
            self._fail(number, value)
        elif number == WELCOME and connection is links.parent:
            links.welcomed(connection, key, value)
        elif links is not self.links:
            return
        elif connection is not links.parent:
            if number == 1 or key in self.by_key:
                self.arrive(self._of(key), number, value, connection.rank)
        elif (known := self.by_key.get(key)) is not None and known.issued == number == known.done + 1:
            self._deliver(known, value)

    def _close(self) -> None:
        for entry in list((self.selector.get_map() or {}).values()):
            if not isinstance(entry.fileobj, int):
                entry.fileobj.close()  # type: ignore[attr-defined]
        self.selector.close()
        if self._wakes >= 0:
            os.close(self._wakes)
            self._wakes = -1

    # What follows runs in the channel's thread.

    def gone(self, links: Links, rank: int, is_own_finding: bool) -> None:
        """A rank has died: if this rank found out, and cannot tell all others, it writes that to the store."""
        with self.lock:
            is_news = self._fail(HAS_GONE, rank)
        if is_news and is_own_finding and (rank == self.links.place.parent or self.links.away):
            self.ask_store(links.place, lambda store: store.set(GONE, str(rank)))  # otherwise they find out later

    def store(self, place: Place) -> Any:
        """The part of the store of the place's attempt; of the present one, while the place is not known."""
        self._store = self._store or self._job_store.connect()
        return self._store.part_of(place.attempt) if place.is_known else self._store.join(anew=True)

    def store_failed(self) -> None:
        """Connect it again when it is needed."""
        self._store = None

    def ask_store(self, place: Place, ask: Callable[[Any], Any], then: Callable[[Any], None] | None = None) -> None:
        """A store that does not answer holds up nothing that goes over the connections. `then` is called by the
        channel's thread; not where the store owes too many answers."""

        def run(store: Any) -> None:
            answer = ask(store)
            if then is not None:
                self._store_answers.put(functools.partial(then, answer))
                self.wake()

        self._client.ask(run, place.attempt)

    def find(self, place: Place) -> bool:
        """Whether the place is known, by what the store has; False: not yet."""
        if place is not self.links.place:
            if self.links.place.is_known:
                place.find_mirrored(self.links.place)
        elif place.find(self.store(place), self._job_store.attempt) and place.problem:
            self.stop(place.problem)
        return place.is_known

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self.stop(f"the side channel has ended by an error of its own, please report it: {error!r}")
        for links in self._trees:
            links.leave((HAS_LEFT if self._leaves else HAS_GONE, self.rank))
        with self.lock:
            self._close()

    def _serve(self) -> None:
        while not self._is_over and (self._surveys or not all(links.is_over() for links in self._trees)):
            while not self._store_answers.empty():
                self._store_answers.get()()
            until, now, is_whole = math.inf, time.monotonic(), True
            for links in self._trees:
                if links.is_whole():
                    links.rest(now)
                else:
                    is_whole = False
                    if now >= links.next_look:
                        links.step()
                until = min(until, links.next_look, self._of_surveys(links, _tick))
            if is_whole:
                self._store = None
            self._attend(until)

    def _attend(self, until: float) -> None:
        """Handle messages and new connections; return at this time.monotonic() if none come."""
        waiting = [(links, one) for links in self._trees for one in links.connections.values() if one.waits]
        for links, connection in waiting:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            self.selector.modify(connection.socket, events, (links, connection))
        for entry, _ in self.selector.select(max(until - time.monotonic(), 0.0)):
            if self._is_over:  # the connections still carry the reason
                break
            if entry.data is None:
                os.eventfd_read(self._wakes)
                continue
            links, connection = entry.data
            if connection is None:
                links.visited()
            elif connection.socket.fileno() >= 0:  # else it was just replaced
                self._read(links, connection)
        for links, connection in waiting:
            with self.lock:
                connection.flush()
                if connection.socket.fileno() >= 0:
                    self.selector.modify(connection.socket, selectors.EVENT_READ, (links, connection))

    def _read(self, links: Links, connection: Connection) -> None:
        messages = connection.receive()
        with self.lock:
            for message in messages or ():
                if not isinstance(message, bytes):
                    self._hear(links, connection, *message)
            if messages is None:
                links.drop(connection)
        # Without the lock: the training thread may issue a round meanwhile.
        for message in messages or ():
            if isinstance(message, bytes):
                self._of_surveys(links, functools.partial(_note, connection=connection, note=message))
        if messages is None:
            self._of_surveys(links, lambda surveys: surveys.lost(connection.rank))

    def send(self, connection: Connection, number: int) -> None:
        """A message that is none of a round's."""
        with self.lock:
            connection.send(bytes(8), number, self.rank)

    def send_note(self, connection: Connection, note: bytes) -> bool:
        """Whether it is on its way."""
        with self.lock:
            return connection.send_note(note)

    def _of_surveys(self, links: Links, step: Callable[[Surveys], float | None]) -> float:
        """What `step` gives. An error ends the surveys, and never the rounds."""
        if (surveys := self._surveys.get(links)) is None or not links.place.is_known:
            return math.inf
        try:
            due = step(surveys)
        except Exception as error:
            self._surveys.clear()
            self.say(f"surveys have ended by an error of their own, please report it: {error!r}")
            due = None
        return math.inf if due is None else due


def _tick(surveys: Surveys) -> float:
    return surveys.tick(time.monotonic())


def _note(surveys: Surveys, connection: Connection, note: bytes) -> None:
    surveys.note(connection, note)


def _at_exit() -> None:
    for channel in list(_channels):
        channel.stop("this process ends", leaves=True)
        channel.join(timedelta(seconds=0.5))


_channels: weakref.WeakSet[SideChannel] = weakref.WeakSet()


def _in_forked_child() -> None:
    for channel in list(_channels):
        channel.forget()


process_hooks.run(AtExit.SIDE_CHANNELS, _at_exit)
process_hooks.run(InForkedChild.SIDE_CHANNELS, _in_forked_child)
