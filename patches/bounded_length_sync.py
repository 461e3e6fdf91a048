"""A time limit for the all-reduce of the input length in NeMo's encoders.

Stock NeMo reduces one number over all ranks in every forward, without a limit: a rank that is late
or dead, or has one batch fewer, leaves the others waiting. Here a rank waits at most
NEMO_LENGTH_SYNC_TIMEOUT seconds (default 10; 0: it asks nobody), goes on with its own length, and
logs which ranks are missing. That is safe, because the tables that grow with the length are plain
attributes, which DDP does not broadcast. When no encoder was called for NEMO_ENCODER_WATCH_S
seconds (default 60; 0: never), each rank logs which ranks made fewer calls. Needs torch only.

How: each encoder has a Gloo group of its own, made in a thread after its first call, for one int64
that is reduced by MAX: `clock << 24 | length`. Gloo pairs operations by their order. So after a
skipped call, or one more, a rank would answer older rounds from then on; the clock, which a rank
adopts where another's is higher, says which call a result is for. A round that timed out stays in
flight, and a later call collects it. Another thread keeps every rank's clocks in the job's store.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LENGTH_BITS = 24
CALL = 1 << 15  # a clock is training calls * CALL + evaluation calls since the last of them
CALM = 100  # rounds in time, in a row, after which timeouts are forgotten
NEVER = timedelta(days=20)  # at a group's own timeout Gloo would close all its connections

# Not NeMo's logger, which is silent on all ranks but one. Without a handler this prints to stderr.
logger = logging.getLogger("nemo.length_sync")
_say_once = functools.cache(logger.error)
_lock = threading.Lock()
_current: list[_Ranks] = []  # of the present process group, from the first encoder call on
_numbers = itertools.count()  # of process groups, which may share a store


def _seconds(variable: str, default: str) -> float:
    text = os.environ.get(variable) or default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise ValueError(f"{variable}={text!r} is not allowed; allowed: 0 (off) to 86400 seconds")
    return seconds


TIMEOUT_S = _seconds("NEMO_LENGTH_SYNC_TIMEOUT", "10")
WATCH_S = _seconds("NEMO_ENCODER_WATCH_S", "60")


def max_length_in_time(encoder: torch.nn.Module, length: int, sync: bool = True) -> int:
    """The longest input of all ranks at this call; out of time, at least this rank's own `length`.

    sync: without it nobody is asked for a length, and the call counts for the watch alone.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return length  # as it is: in torch.export it may be a symbol
    return _max_length_of_ranks(encoder, length, sync and TIMEOUT_S > 0)


@torch.compiler.disable
def _max_length_of_ranks(encoder: torch.nn.Module, length: int, sync: bool) -> int:
    if not (sync or WATCH_S) or (_current and _current[0].pid != os.getpid()):
        return length  # a forked child is no rank
    try:
        with _lock:
            if not _current or _current[0].has_ended():
                _current[:] = [_Ranks(dist.group.WORLD)]
            encoder_sync = _current[0].sync_of(encoder)
        return encoder_sync.call(int(length), encoder.training, sync)
    except Exception as error:
        _say_once(f"each rank uses its own length, by an error of the length sync: {error!r}")
        return length


class _Ranks:
    """The ranks of one process group, and their clocks: a thread writes this rank's, and reads all."""

    def __init__(self, world: Any) -> None:
        self.world = weakref.ref(world)  # a strong reference would keep NCCL's communicators
        self.prefix = f"length_sync/{next(_numbers)}"
        self.pid = os.getpid()
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.syncs: Any = weakref.WeakKeyDictionary()  # by encoder
        self.seen: Counter[str] = Counter()
        self.last_call = time.monotonic()
        self.late: list[tuple[str, int, str]] = []  # encoder, clock and text, for the thread to say
        self.start_thread(self._watch)

    def sync_of(self, encoder: torch.nn.Module) -> _EncoderSync:
        self.last_call = time.monotonic()
        if encoder not in self.syncs:
            name = type(encoder).__name__
            self.seen[name] += 1  # ranks must make the first calls of equal encoders in one order
            self.syncs[encoder] = _EncoderSync(f"{name} #{self.seen[name]}", self)
        return self.syncs[encoder]

    def has_ended(self) -> bool:
        return self.world() is not dist.group.WORLD

    def say(self, text: str) -> None:
        if not self.has_ended():
            logger.warning(f"[rank {self.rank} of {self.size}] {text}")

    def start_thread(self, target: Callable[[list[dist.Store]], None]) -> None:
        store = dist.distributed_c10d._get_default_store()
        # In a list, which the thread empties: rank 0's store is the server, and must be able to end.
        threading.Thread(target=target, args=[[store]], daemon=True, name="length sync").start()

    def client(self, stores: list[dist.Store]) -> dist.Store:
        """Of one's own: a request that waits holds its client's lock, and c10d needs the default's."""
        store = stores.pop()
        return dist.PrefixStore(self.prefix, store.clone() if hasattr(store, "clone") else store)

    def _watch(self, stores: list[dist.Store]) -> None:
        pause = min(seconds / 4 for seconds in (TIMEOUT_S, WATCH_S, 4.0) if seconds)
        written: dict[str, int] = {}
        said_of = 0.0
        try:
            board = self.client(stores)
            while not self.has_ended():
                count = len(self.late)
                time.sleep(pause)  # until the clocks of all ranks that came in time are there
                with _lock:
                    clocks = {sync.name: sync.clock for sync in self.syncs.values()}
                for name, clock in clocks.items():
                    if written.get(name) != clock:
                        board.set(f"{name}/{self.rank}", str(clock))
                written = clocks
                for name, clock, text in self.late[:count]:
                    self.say(text + (self._behind(board, name, clock) or "all have made it by now"))
                del self.late[:count]
                called = self.last_call
                if WATCH_S and said_of != called and time.monotonic() - called > WATCH_S:
                    said_of = called
                    for name in clocks:
                        if behind := self._behind(board, name):
                            self.say(f"no encoder call for {WATCH_S:g} s; {name}: {behind}")
        except Exception as error:
            self.say(f"the encoder watch has ended: {error}")

    def _behind(self, board: dist.Store, name: str, clock: int = 0) -> str:
        """Which ranks have not made the call of this clock, or the last one that any rank made."""
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        clocks = [int(board.get(key)) if board.check([key]) else 0 for key in keys]
        clock = clock or max(clocks)
        behind = [f"rank {rank} made {_count(own)}" for rank, own in enumerate(clocks) if own < clock]
        if len(behind) > 8:
            behind[8:] = [f"and {len(behind) - 8} more ranks fewer"]
        return f"of {_count(clock)} calls {', '.join(behind)}" if behind else ""


def _count(clock: int) -> str:
    """Training calls, and evaluation calls since the last of them."""
    return f"{clock // CALL}+{clock % CALL}" if clock % CALL else f"{clock // CALL}"


class _EncoderSync:
    """One encoder's rounds on this rank."""

    def __init__(self, name: str, ranks: _Ranks) -> None:
        self.name = name
        self.ranks = ranks
        self.clock = 0
        self.agreed_clock = 0
        self.agreed_length = 0
        self.lock = threading.Lock()  # of these three, which the thread that connects uses, too
        self.group: Any = None
        self.tensor: Any = None  # of the round in flight
        self.work: Any = None
        self.connecting = False
        self.connected = threading.Event()
        self.ended = False
        self.timeouts = 0  # that are not forgotten
        self.unwaited = 0  # so many rounds more are waited for by no call
        self.in_time = 0

    def call(self, length: int, training: bool, sync: bool) -> int:
        self.clock = (self.clock // CALL + 1) * CALL if training else self.clock + 1
        if not sync or self.ended:
            return length
        if not self.connecting:
            self.connecting = True
            self.ranks.start_thread(self._connect)
        try:
            if self.work is not None and self.work.is_completed():
                self._collect(training)
            if self.agreed_clock < self.clock and self.tensor is None:
                self._round(length, training)
        except Exception as error:  # a rank has died: Gloo closes its connections
            self._end(error)
        return max(length, self.agreed_length) if self.agreed_clock >= self.clock else length

    def _round(self, length: int, training: bool) -> None:
        started = time.monotonic()
        value = self.clock << LENGTH_BITS | min(length, (1 << LENGTH_BITS) - 1)
        with self.lock:
            self.tensor = torch.tensor([value], dtype=torch.int64, device="cpu")
            if self.group is not None:
                self.work = self.group.allreduce(self.tensor, dist.ReduceOp.MAX)
        if self.unwaited > 0:
            self.unwaited -= 1
            return
        # A straggler that stays costs little after the first times. Below 1 ms c10d has no limit.
        limit = max(TIMEOUT_S / 8 ** min(self.timeouts, 2), 0.002)
        self.connected.wait(limit)
        left = max(limit - (time.monotonic() - started), 0.002)
        if self.work is not None and _has_completed(self.work, left):
            self._collect(training)
            self.in_time += 1
            if self.in_time >= CALM:
                self.timeouts = 0
            return
        self.in_time = 0
        self.timeouts += 1
        self.unwaited = 2 ** min(self.timeouts, 20) - 2
        if self.timeouts == 1:
            text = f"{self.name}: not every rank's length came within {limit:g} s, using this rank's"
            self.ranks.late.append((self.name, self.clock, f"{text} own, {length}; "))

    def _collect(self, training: bool) -> None:
        self.work.wait()  # raises what has failed
        value = int(self.tensor)
        self.tensor = None
        self.work = None
        self.agreed_clock = value >> LENGTH_BITS
        self.agreed_length = value & (1 << LENGTH_BITS) - 1
        known = self.agreed_clock
        if not training and known % CALL == 0:
            known -= CALL  # another rank is at a training call, which is still to come on this one
        self.clock = max(self.clock, known)

    def _connect(self, stores: list[dist.Store]) -> None:
        try:
            store = dist.PrefixStore(f"{self.name}/gloo", self.ranks.client(stores))
            store.set(str(self.ranks.rank), "")
            everyone = [str(rank) for rank in range(self.ranks.size)]
            while not store.check(everyone):
                time.sleep(0.05)
            group: Any = dist.ProcessGroupGloo(store, self.ranks.rank, self.ranks.size, NEVER)
            # Its destructor, at exit, too, would wait for a round in flight: it never runs.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            with self.lock:
                self.group = group
                if self.tensor is not None:  # a call has come meanwhile
                    self.work = group.allreduce(self.tensor, dist.ReduceOp.MAX)
        except Exception as error:
            self._end(error)
        self.connected.set()

    def _end(self, error: Exception) -> None:
        self.ended = True
        text = str(error).splitlines()[0][:200]
        self.ranks.say(f"{self.name}: the length sync has ended, each rank uses its own: {text}")


def _has_completed(work: dist.Work, seconds: float) -> bool:
    """Whether it completes in time. Raises what has failed."""
    try:
        return work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False  # out of time, and still in flight
        return work.wait()
