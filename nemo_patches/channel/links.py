"""A rank's connections in one tree: made through the store, lost, and restored without it.

A neighbour whose connection was lost is away until it comes back, is known to have gone, or says that it leaves.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import math
import os
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .keys import GONE
from .process import Process
from .tree import FAN_OUT, Connection, Door, Place, is_silence, make_room

# Instead of a round's number; the value is the parent's format and pid, or the rank that has died, or the rank
# that has left.
WELCOME, HAS_GONE, HAS_LEFT = -1, -2, -3
VANISHED, LEFT = "vanished", "left"  # how a rank has ended: its process has died; it has announced that it leaves
_PID_BITS = 32
_PID = (1 << _PID_BITS) - 1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_PER_RANK_S = 0.002, 0.25, 0.002  # many ranks ask the one store less often
IDLE_S = 5.0
# How long a neighbour whose connection was lost may stay away, where nobody can tell that its process has ended. The
# host answered: its kernel tells it of the loss within CUT_OFF_S, and long calls may hold Python's lock. Only silence,
# or the process lives: as long as kernels try to bring TCP's packets through a network that is cut, by default.
GONE_AFTER_S, CUT_AFTER_S = 60.0, 900.0
_SAY_AFTER_S = 2.0  # after this time away, it is logged
_ASK_AFTER_S, _ASK_AGAIN_S = 1.0, 10.0  # the store, about dead ranks; and at least this often
_FAREWELL_S = 0.4  # for a disconnected neighbour to hear that this rank leaves


@dataclass
class Away:
    """A neighbour whose connection was lost. Only the channel's thread writes it."""

    process: Process
    since: float  # time.monotonic()
    is_cut: bool  # nothing at all comes from its host
    is_said: bool = False

    def is_given_up(self, now: float, machine: bytes) -> bool:
        """Whether its process has ended, or has been away for too long to be alive."""
        if self.process.has_ended(machine):
            return True
        lives = self.process.machine == machine
        return now - self.since > (CUT_AFTER_S if lives or self.is_cut else GONE_AFTER_S)


class Owner(Protocol):
    """What the connections need of the side channel that they are part of."""

    rank: int
    size: int
    error: str  # why there are no more rounds
    lock: threading.RLock
    selector: selectors.PollSelector

    def store(self, place: Place) -> Any:
        """The part of the store of the place's attempt; anew, while that is not known. May block, raises its errors."""

    def store_failed(self) -> None:
        """Drop the store's connection: it no longer works."""

    def ask_store(self, place: Place, ask: Callable[[Any], Any], then: Callable[[Any], None] | None = None) -> None:
        """Ask the place's part of the store, without waiting; `then` gets the answer, if one comes."""

    def say(self, text: str) -> None:
        """Log what keeps this rank from connecting."""

    def find(self, place: Place) -> bool:
        """Whether the place is known, by what the store has; False: not yet."""

    def connected(self, links: Links, connection: Connection) -> None:
        """A neighbour is connected (again): repeat what it may have missed. With the lock held."""

    def gone(self, links: Links, rank: int, is_own_finding: bool) -> None:
        """A rank has died."""


class Links:
    """Belongs to the channel's thread, except where `lock` is held; other threads only read `connections`."""

    def __init__(self, owner: Owner, place: Place) -> None:
        self.place = place
        self.connections: dict[int, Connection] = {}  # by rank: the children, and the parent
        self.parent: Connection | None = None  # also before it has accepted this rank
        self.away: dict[int, Away] = {}  # by rank: neighbours that were connected
        self.ended: dict[int, str] = {}  # by rank: neighbours that are no longer waited for: VANISHED or LEFT
        self.next_look = 0.0
        self._owner = owner
        self._longest_pause_s = _LONGEST_PAUSE_S + owner.size * _PAUSE_PER_RANK_S
        self._pause_s = _FIRST_PAUSE_S
        self._next_question = 0.0
        self._listener: socket.socket | None = None
        self._troubles: dict[str, float] = {}  # since when this rank cannot connect, by reason; inf: logged
        self._return_is_said = False
        self._chance = (
            random.Random()
        )  # not Python's own: training's augmentation must draw the same numbers as in stock

    def is_whole(self) -> bool:
        """Whether all neighbours that have not ended are connected."""
        if len(self.connections) == len(self.place.neighbours):
            return self.place.is_known
        return self.place.is_known and not self._missing()

    def is_over(self) -> bool:
        """Whether all neighbours have ended."""
        return self.place.is_known and self.place.neighbours <= self.ended.keys()

    def rest(self, now: float) -> None:
        """Nothing to do until something comes."""
        self._pause_s, self.next_look = _FIRST_PAUSE_S, now + IDLE_S

    def step(self) -> None:
        """Take a step towards a complete tree; return when to take the next one. Never waits for a rank."""
        longest_s = self._longest_pause_s
        try:
            self._judge_those_away(time.monotonic())
            make_room(FAN_OUT + 8)  # for the tree, and for the connection to the store
            self._pause_s = _FIRST_PAUSE_S if self._look() else self._pause_s * 1.5
            if self.place.is_known and not self._missing() - self.away.keys():
                longest_s = _LONGEST_PAUSE_S  # only neighbours that reconnect: hardly any requests to the store
        except Exception as error:  # torch has no common class for what its stores raise
            self._owner.store_failed()
            self._pause_s = self._longest_pause_s
            self._tell_trouble(ascii(error))
        self._pause_s = min(self._pause_s, longest_s)
        # Not all at the same time: after an outage of a switch, many reconnect.
        self.next_look = time.monotonic() + self._pause_s * self._chance.uniform(0.5, 1.0)

    def visited(self) -> None:
        """Accept a child that knows the token; drop any other client at once."""
        if (listener := self._listener) is None:
            return
        try:
            if (child := self.place.admit(listener)) is not None:
                with self._owner.lock:
                    self._let_in(child)
                self._owner.selector.register(child.socket, selectors.EVENT_READ, (self, child))
        except OSError as error:  # no more files: the next look listens again
            self._tell_trouble(ascii(error))
            self._stop_listening()
        if not self.place.children & self._missing():
            self._stop_listening()

    # With the lock held.

    def welcomed(self, connection: Connection, machine: bytes, value: int) -> None:
        """The parent has accepted this rank."""
        connection.process, connection.format = Process(value & _PID, machine), value >> _PID_BITS
        self._connected(connection)

    def drop(self, connection: Connection) -> None:
        """A connection is lost."""
        self._owner.selector.unregister(connection.socket)
        connection.socket.close()
        self.parent = None if connection is self.parent else self.parent
        if self.connections.pop(connection.rank, None) is None or connection.process is None:
            return
        if connection.rank not in self.ended:
            now = time.monotonic()
            self.away[connection.rank] = Away(connection.process, now, connection.is_cut)
            self._pause_s, self.next_look = _FIRST_PAUSE_S, 0.0
            self._next_question = max(self._next_question, now + _ASK_AFTER_S)

    def _let_in(self, child: Connection) -> None:
        if (before := self.connections.get(child.rank)) is not None:
            self.drop(before)
        child.send(self.place.machine, WELCOME, self.place.format << _PID_BITS | os.getpid())
        self._connected(child)

    def _connected(self, connection: Connection) -> None:
        self._owner.connected(self, connection)
        self.connections[connection.rank] = connection
        away = self.away.pop(connection.rank, None)
        if away is not None and (away.is_said or not self._return_is_said) and not self._owner.error:
            self._return_is_said = True
            away_s = time.monotonic() - away.since
            self._owner.say(
                f"the length sync's connection to rank {connection.rank} was lost, and is back after {away_s:.2f} s; "
                "no round is lost. Said once, unless it takes long"
            )

    # What follows runs in the channel's thread.

    def leave(self, farewell: tuple[int, int]) -> None:
        """Tell the neighbours that this rank ends; wait a moment for those whose connection is lost."""
        told = set[int]()
        with self._owner.lock:
            for connection in {*self.connections.values(), *filter(None, [self.parent])}:
                connection.send(bytes(8), *farewell)
                if not connection.is_lost:
                    told.add(connection.rank)
                elif connection.process is not None:  # just now
                    self.away[connection.rank] = Away(connection.process, time.monotonic(), is_cut=False)
        with contextlib.suppress(Exception):  # best effort
            self._tell_those_away(told, farewell)

    def _tell_those_away(self, told: set[int], farewell: tuple[int, int]) -> None:
        machine, place = self.place.machine, self.place
        untold = {rank for rank, away in self.away.items() if not away.process.has_ended(machine)} - told
        end = time.monotonic() + _FAREWELL_S
        while untold and time.monotonic() < end:
            if self._listener is None and untold & place.children:
                self._listen()
            came = place.admit(self._listener) if self._listener is not None else None
            if came is None and place.parent in untold:
                with contextlib.suppress(OSError):
                    came = place.knock()
            if came is not None:
                came.send(bytes(8), *farewell)
                came.socket.close()
                untold.discard(came.rank)
            else:
                time.sleep(_FIRST_PAUSE_S)

    def _missing(self) -> frozenset[int]:
        return self.place.neighbours - self.connections.keys() - self.ended.keys()

    def _look(self) -> bool:
        """Take the next step that the store's keys and the lost neighbours allow; False if none."""
        place = self.place
        if not place.is_known:
            return self._owner.find(place)
        if self._listener is None and place.children & self._missing():
            self._listen()
        if self.away and time.monotonic() >= self._next_question:
            self._ask_the_store()
        if self.parent is None and place.parent in self._missing():
            self._knock()
        return False

    def _listen(self) -> None:
        self._listener = self.place.listen(lambda: self._owner.store(self.place))
        self._owner.selector.register(self._listener, selectors.EVENT_READ, (self, None))

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._owner.selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _knock(self) -> None:
        away = self.away.get(self.place.parent)
        if away is None:
            self.place.take_door(self.place.find_door(self._owner.store(self.place)))
        try:
            self.parent = self.place.knock()
        except OSError as error:
            if away is None:
                raise
            away.is_cut = away.is_cut or is_silence(error)
        if self.parent is not None:
            self._owner.selector.register(self.parent.socket, selectors.EVENT_READ, (self, self.parent))

    def _judge_those_away(self, now: float) -> None:
        for rank, away in list(self.away.items()):
            if away.is_given_up(now, self.place.machine):
                del self.away[rank]
                self.ended[rank] = VANISHED
                self._owner.gone(self, rank, is_own_finding=True)
            elif now - away.since > _SAY_AFTER_S and not away.is_said and not self._owner.error:
                away.is_said = True
                self._owner.say(
                    f"the length sync's connection to rank {rank} is lost: calls wait in vain, and use their own "
                    "lengths, until it is back; both ranks try to connect again"
                )

    def _ask_the_store(self) -> None:
        """Check, less and less often, whether a rank is known to have died, or the parent listens elsewhere now."""
        now = time.monotonic()
        longest_away_s = max(now - away.since for away in self.away.values())
        pause_s = min(max(_ASK_AFTER_S, longest_away_s / 4), _ASK_AGAIN_S)
        self._next_question = now + max(pause_s, self._longest_pause_s) * self._chance.uniform(0.5, 1.0)
        place = self.place

        def ask(store: Any) -> tuple[int, Door | None]:
            gone = int(store.get(GONE)) if store.check([GONE]) else -1
            return gone, place.find_door(store) if place.parent >= 0 else None

        self._owner.ask_store(place, ask, lambda told: self._heard_of_those_away(*told))

    def _heard_of_those_away(self, gone: int, door: Door | None) -> None:
        has_moved = self.place.parent in self.away and self.place.take_door(door)
        if gone >= 0:
            if self.away.pop(gone, None) is not None:
                self.ended[gone] = VANISHED
            self._owner.gone(self, gone, is_own_finding=False)
        elif has_moved and self.parent is not None:
            with self._owner.lock:
                self.drop(self.parent)  # another process listens at the old port

    def _tell_trouble(self, text: str) -> None:
        now = time.monotonic()
        # At the end of a job the store may end first, which does not matter.
        if now - self._troubles.setdefault(text, now) > _SAY_AFTER_S:
            self._troubles[text] = math.inf
            self._owner.say(f"the length sync is not connected yet, this rank tries again: {text}")
