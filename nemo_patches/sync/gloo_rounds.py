"""The rounds of one encoder on a Gloo group of its own: connected off the training thread, waited for in bounded time.

docs/design.md, "Facts about Gloo", has what Gloo does with a late, dead or exiting rank, and how that was measured.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import array
import atexit
import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import store as keys
from .protocol import SHORTEST_WAIT
from .rank_log import first_line, raised_by_signal_handler
from .store import JobStore, leak

# Gloo closes a group for good once an operation is older than the group's timeout, so this must outlast any straggler.
_GROUP_TIMEOUT = timedelta(days=7)
# c10d does not look at signals while it waits. In slices, Ctrl-C and a SIGTERM handler act between two of them.
_SLICE = timedelta(seconds=0.1)
# Seconds between two looks of the helper thread; many ranks look less often, for the sake of the one store server.
_FIRST_PAUSE, _LONGEST_PAUSE, _PAUSE_PER_RANK = 0.002, 0.1, 0.0005
_LONGEST_PAUSE_DROPPED = 60.0
_FAILED = -(1 << 40)  # a rank that cannot take part pushes the count of arrived ranks below zero


class RoundFailed(Exception):
    """The group is gone: a peer died, the network failed, or Gloo could not connect. The text says which."""


class Rounds:
    """At most one outstanding round: `issue`, then `wait` or `poll` until it gives the round's result."""

    def __init__(self, helper: Helper, key: str) -> None:
        self._helper = helper
        self._key = key
        self._lock = threading.Lock()  # held for an enqueue, never for a wait or a store call
        self._settled = threading.Event()  # connected, or failed
        self._cell = array.array("q", [0])
        self._tensor: torch.Tensor | None = None
        self._group: Any = None
        self._work: Any = None
        self._queued = False
        self.closed = False  # nobody wants these rounds any more
        self._error = ""
        self._came = False  # the training thread has taken the last round's result
        _live.add(self)

    def issue(self, value: int) -> None:
        """Enqueue a round; raises RoundFailed where the group is gone. `value` is an int64."""
        with self._lock:
            self._came = False
            self._cell[0] = value
            if self._group is not None:
                self._start()
            elif not self._queued:
                self._queued = True  # it runs as soon as every rank has come
                self._helper.connect(self)
        if self._error:
            raise RoundFailed(self._error)

    def wait(self, limit: timedelta) -> int | None:
        """The outstanding round's result; None if it has not come within `limit` (at least a millisecond)."""
        deadline = time.monotonic() + limit.total_seconds()
        left = limit
        if not self._settled.is_set():
            self._settled.wait(limit.total_seconds())
            left = timedelta(seconds=deadline - time.monotonic())
        while self._settled.is_set() and left > timedelta(0):
            if self._error:
                raise RoundFailed(self._error)
            try:
                self._work.wait(max(min(left, _SLICE), SHORTEST_WAIT))
            except RuntimeError as error:
                if raised_by_signal_handler(error):
                    raise
                if self._work.is_completed():  # it failed, or it came just now
                    break
            else:
                return self._take()
            left = timedelta(seconds=deadline - time.monotonic())
        return self.poll()

    def poll(self) -> int | None:
        """The outstanding round's result, or None while it has not come; raises RoundFailed. Does not block."""
        if self._error:
            raise RoundFailed(self._error)
        if self._work is None or not self._work.is_completed():
            return None
        try:
            self._work.wait(SHORTEST_WAIT)  # completed: returns at once, or raises what the round failed with
        except RuntimeError as error:
            if raised_by_signal_handler(error):
                raise
            self._error = first_line(error)
            raise RoundFailed(self._error) from None
        return self._take()

    def _take(self) -> int:
        self._came, self._work = True, None
        return self._cell[0]

    def has_come(self) -> bool:
        """Whether the outstanding round has come; any thread may ask."""
        return self._came or _came(self._work) is True

    def has_failed(self) -> bool:
        """Whether a round has failed, so that there will be no more; any thread may ask."""
        return not self.closed and (bool(self._error) or _came(self._work) is False)

    def close(self) -> None:
        """Let the group go, with its threads and sockets; with a round pending it stays: the destructor would block."""
        # Takes no lock: the garbage collector may call this in a thread that holds it.
        self.closed = True
        self._error = self._error or "closed"
        group, work, self._group, self._work = self._group, self._work, None, None
        if work is not None and not work.is_completed():
            _abandoned[id(work)] = (group, work)
        for key, (_, pending) in list(_abandoned.items()):
            if pending.is_completed():
                _abandoned.pop(key, None)

    # What follows runs in the helper's thread.

    def announce(self, store: dist.Store) -> dist.Store:
        """Tell the other ranks that this one has come, or that it cannot take part."""
        mine = dist.PrefixStore(self._key, store)
        try:
            _require_gloo()
        except Exception as error:
            mine.set(keys.FAILED, f"rank {self._helper.rank}: {first_line(error)}")
            mine.add(keys.ARRIVED, _FAILED)
            raise
        mine.add(keys.ARRIVED, 1)
        return mine

    def connect(self, store: dist.Store) -> bool:
        """Connect if every rank has come; False: not yet."""
        arrived = store.add(keys.ARRIVED, 0)
        if arrived < 0:
            raise RoundFailed(store.get(keys.FAILED).decode(errors="replace"))
        if arrived < self._helper.size:
            return False
        # Two threads, as Gloo has: with one, rounds were faster on an idle machine, at times far slower on a busy one.
        group = dist.ProcessGroupGloo(store, self._helper.rank, self._helper.size, _GROUP_TIMEOUT)
        with self._lock:
            if not self.closed:
                self._group = group
                self._tensor = torch.frombuffer(self._cell, dtype=torch.int64)
                if self._queued:
                    self._start()
        if self.closed:  # meanwhile
            self.close()
        self._settled.set()
        return True

    def fail(self, reason: str) -> None:
        self._error = self._error or reason
        self._settled.set()

    def _start(self) -> None:
        self._queued = False
        try:
            self._work = self._group.allreduce([self._tensor], _MAX)
        except RuntimeError as error:
            self._error = first_line(error)


class Helper:
    """Connects encoders' groups, in a daemon thread per process group that runs while there is something to connect."""

    def __init__(self, store: JobStore, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._job_store = store
        self._store: dist.Store | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._connecting: list[_Connecting] = []
        self._stopped = False
        _helpers.add(self)

    def connect(self, rounds: Rounds) -> None:
        with self._lock:
            self._connecting.append(_Connecting(weakref.ref(rounds)))
            if self._thread is None and not self._stopped:  # stopped: at exit, or in a forked child
                self._thread = threading.Thread(target=self._loop, name="nemo_patches", daemon=True)
                self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        """End the thread at its next look. Takes no lock: the garbage collector may call this anywhere."""
        self._stopped = True
        self._store = None  # and its connection, unless the thread is using it
        self._connecting = []

    def join(self, limit: timedelta) -> None:
        """At exit: wait for the thread's end, for a short while. One that is in Gloo's constructor then stays there."""
        self._wake.set()
        if (thread := self._thread) is not None:
            thread.join(limit.total_seconds())
            if thread.is_alive():
                self._job_store.outlive_interpreter()

    def _loop(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stopped:
            self._wake.clear()
            with self._lock:
                connecting = list(self._connecting)
                if not connecting:
                    self._thread = None
                    return
            done = [entry for entry in connecting if self._advance(entry)]
            with self._lock:
                self._connecting = [entry for entry in self._connecting if entry not in done]
            pause = _FIRST_PAUSE if done else min(pause * 1.5, max(_LONGEST_PAUSE, self.size * _PAUSE_PER_RANK))
            self._wake.wait(pause)

    def _advance(self, entry: _Connecting) -> bool:
        """One look at a group that is being connected; True when it is settled, one way or the other."""
        rounds = entry.promised or entry.rounds()
        if rounds is None or (rounds.closed and entry.promised is None):
            return True
        if rounds.closed and not entry.is_due():
            return False
        try:
            if entry.store is None:
                self._store = self._store or self._job_store.connect()
                entry.store, entry.promised = rounds.announce(self._store), rounds
            return rounds.connect(entry.store)
        except Exception as error:
            rounds.fail(first_line(error))
            return True


@dataclass(eq=False)
class _Connecting:
    """An encoder's group that waits for the other ranks; `store` is set once this rank has announced itself."""

    rounds: weakref.ref[Rounds]
    store: dist.Store | None = None
    promised: Rounds | None = None  # from then on, also if the encoder is dropped: others may be in Gloo's constructor
    began: float = field(default_factory=time.monotonic)
    next_look: float = 0.0

    def is_due(self) -> bool:
        """Back off polling for encoders that were closed: there may be thousands."""
        now = time.monotonic()
        if now < self.next_look:
            return False
        self.next_look = now + min((now - self.began) / 2, _LONGEST_PAUSE_DROPPED)
        return True


if dist.is_available():
    _MAX = dist.AllreduceOptions()
    _MAX.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]  # torch's stub calls it RedOpType

_live: weakref.WeakSet[Rounds] = weakref.WeakSet()
_helpers: weakref.WeakSet[Helper] = weakref.WeakSet()
_abandoned: dict[int, tuple[Any, Any]] = {}  # (group, work) of rounds that were pending when their encoder went


def _require_gloo() -> None:
    """Raise where Gloo cannot listen here, before any other rank waits for this one."""
    if not dist.is_gloo_available():
        raise RuntimeError("this torch was built without Gloo")
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces:
        dist.ProcessGroupGloo.create_default_device()
    for interface in filter(None, interfaces.split(",")):
        dist.ProcessGroupGloo.create_device(interface=interface)


def _came(work: Any) -> bool | None:
    """Whether a round has come, or else failed; None while it is pending."""
    if work is None or not work.is_completed():
        return None
    try:
        work.wait(SHORTEST_WAIT)
        return True
    except RuntimeError:
        return False


def _stop(join: bool) -> None:
    """At exit; and in a forked child, where a group's threads do not exist: its destructor would wait for them."""
    for helper in list(_helpers):
        helper.stop()
    for helper in list(_helpers) if join else ():
        helper.join(timedelta(seconds=0.5))
    for pair in (*((rounds._group, rounds._work) for rounds in list(_live)), *_abandoned.values()):
        leak(pair)


atexit.register(_stop, join=True)
os.register_at_fork(after_in_child=lambda: _stop(join=False))
