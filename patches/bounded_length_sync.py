"""A time limit for the all-reduce of the input length in NeMo's encoders.

Stock NeMo reduces one number over all ranks in every forward, without a limit: a rank that is late
or dead, or has one batch fewer, leaves the others waiting. Here a rank waits at most
NEMO_LENGTH_SYNC_TIMEOUT seconds (default 10; 0: it asks nobody), goes on with its own length, and
logs which ranks are missing. That is safe: the tables that grow with the length are plain
attributes, which DDP does not broadcast. Without an encoder call for NEMO_ENCODER_WATCH_S seconds
(default 60; 0: never), each rank logs which ranks made fewer, and its own line of code.

How: one Gloo group for all encoders, made in a thread, reduces one int64 a call by MAX:
`clock << 22 | length`. Gloo pairs operations by their order. So after a skipped call, or one more,
a rank would answer older rounds from then on; the clock, which a rank adopts where another's is
higher, says which call a result is for. A round that timed out stays in flight, and a later call
collects it. Another thread keeps every rank's clock in the job's store. Needs torch only.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import logging
import math
import os
import socket
import sys
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LENGTH_BITS = 22  # of 63; 18 are for evaluation calls, 23 for training calls
CALL = 1 << 18  # a clock is training calls * CALL + evaluation calls since the last of them
NEVER = timedelta(days=20)  # at a group's own timeout Gloo would close all its connections
STILL, LEFT = "still", "left"  # on the board: made no call since it was last looked at, or ended
LIBRARIES = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "nemo"}

# Not NeMo's logger, which is silent on all ranks but one. Without a handler this prints to stderr.
logger = logging.getLogger("nemo.length_sync")
_say_once = functools.cache(logger.error)
_lock = threading.Lock()
_current: list[_Ranks] = []  # of the present process group, from the first encoder call on
_parents: list[Any] = []  # a process group of before a fork: the child is no rank of it
os.register_at_fork(after_in_child=lambda: _parents.append(dist.group.WORLD))


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
    if torch.compiler.is_compiling():  # a graph takes part, but cannot branch on what comes
        made = torch.empty(0, device="cpu")
        torch.ops.nemo_length_sync.call(made, length, encoder.training, sync)
        return length
    return _max_length_of_ranks(int(length), encoder.training, sync)


def _max_length_of_ranks(length: int, training: bool, sync: bool) -> int:
    sync = sync and TIMEOUT_S > 0
    world = dist.group.WORLD
    if not (sync or WATCH_S) or world in _parents:
        return length
    try:
        with _lock:
            if not _current or _current[0].world() is not world:
                _current[:] = [_Ranks(world)]
        return _current[0].call(length, training, sync)
    except Exception as error:
        _say_once(f"each rank uses its own length, by an error of the length sync: {error!r}")
        return length


if not hasattr(torch.ops.nemo_length_sync, "call"):  # a reload cannot define it again
    _library = torch.library.Library("nemo_length_sync", "FRAGMENT")
    # It says that it changes its first argument: compilers drop what changes nothing.
    _library.define("call(Tensor(a!) made, SymInt length, bool training, bool sync) -> ()")
    _library.impl("call", lambda made, *call: _max_length_of_ranks(*call) and None, "CPU")
    _library.impl("call", lambda *call: None, "Meta")


@atexit.register
def _leave() -> None:
    for ranks in _current:
        ranks.leave()


class _Ranks:
    """This rank in a process group: its calls, the round in flight, and what is said of all ranks."""

    def __init__(self, world: Any) -> None:
        self.world = weakref.ref(world)  # a strong reference would keep NCCL's communicators
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.turn = threading.Lock()  # one call at a time
        self.clock = 0
        self.last_call = 0.0
        self.agreed_clock = 0
        self.agreed_length = 0
        self.lock = threading.Lock()  # of these three, which the thread that connects uses, too
        self.group: Any = None
        self.tensor: Any = None  # of the round in flight
        self.work: Any = None
        self.connected: Any = None  # an event, from the first call that asks for lengths
        self.sync_ended = False
        self.began_at = time.monotonic()
        self.lost_s = 0.0  # in waits that timed out
        self.said_at = -math.inf
        self.asked = 0  # a clock: which ranks have not come to it?
        self.missing = ""  # the answer
        self.leaving = False
        self.wake = threading.Event()  # the board's thread
        self.told = threading.Event()  # the board has a clock of this rank
        self.thread = self.start_thread(self._keep_board)

    def call(self, length: int, training: bool, sync: bool) -> int:
        if not self.turn.acquire(timeout=TIMEOUT_S or 1.0):
            return length  # another thread's call takes long
        try:
            is_first = self.clock == 0
            self.clock = _next(self.clock, training)
            self.last_call = time.monotonic()
            self.wake.set()
            if is_first:
                self.told.wait(0.5)  # so that a rank without a clock on the board has made no call
            if not sync or self.sync_ended:
                return length
            if self.connected is None:
                self.connected = threading.Event()
                self.start_thread(self._connect)
            if self.work is not None and self.work.is_completed():
                self._collect(training)
            if self.agreed_clock < self.clock and self.tensor is None:
                self._round(length, training)
        except RuntimeError as error:  # a rank has died: Gloo closes its connections
            self._end_sync(error)
        finally:
            self.turn.release()
        return max(length, self.agreed_length) if self.agreed_clock >= self.clock else length

    def _round(self, length: int, training: bool) -> None:
        value = self.clock << LENGTH_BITS | min(length, (1 << LENGTH_BITS) - 1)
        with self.lock:
            self.tensor = torch.tensor([value], dtype=torch.int64, device="cpu")
            if self.group is not None:
                self.work = self.group.allreduce(self.tensor, dist.ReduceOp.MAX)
        started = time.monotonic()
        if self.lost_s > 3 * TIMEOUT_S + (started - self.began_at) / 100:
            return  # beyond three, waits in vain take no more than a hundredth of the time
        until = started + max(TIMEOUT_S, 0.002)  # below 1 ms c10d has no limit
        completed = self._completes(until - TIMEOUT_S / 8)
        if not completed:  # the answer comes before the end: this process may end right after it
            self.missing = "the job's store does not answer"
            self.asked = self.clock
            self.wake.set()
            completed = self._completes(until)
        if completed:
            self._collect(training)
        elif not self.sync_ended:
            self.lost_s += TIMEOUT_S
            if started > self.said_at + 60:
                self.said_at = started
                text = f"not every rank's length came within {TIMEOUT_S:g} s"
                self.say(f"{text}, using this rank's own, {length}; {self.missing}")

    def _completes(self, until: float) -> bool:
        """Whether the round in flight does so in time. Raises what has failed."""
        self.connected.wait(until - time.monotonic())
        try:
            left = max(until - time.monotonic(), 0.002)
            return self.work is not None and self.work.wait(timedelta(seconds=left))
        except RuntimeError:
            if not self.work.is_completed():
                return False  # out of time, and still in flight
            return self.work.wait()

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
            self.told.wait()
            store = dist.PrefixStore(f"{self.board.prefix}/gloo", _client(stores))
            store.set(str(self.rank), "")
            everyone = [str(rank) for rank in range(self.size)]
            while not store.check(everyone):
                time.sleep(0.05)
                if self.has_ended() or not self.board.is_open():
                    return
            # Not dist.new_group(): it is a collective of the default group. As in torch 2.6 to 2.14.
            group: Any = dist.ProcessGroupGloo(store, self.rank, self.size, NEVER)
            # A reference too many, which no torch takes: at exit the destructor would wait for a
            # round in flight.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            with self.lock:
                self.group = group
                if self.tensor is not None:  # a call has come meanwhile
                    self.work = group.allreduce(self.tensor, dist.ReduceOp.MAX)
        except Exception as error:
            self._end_sync(error)
        self.connected.set()

    def _end_sync(self, error: Exception) -> None:
        self.sync_ended = True
        self.say(f"the length sync has ended, each rank uses its own: {_first_line(error)}")

    def has_ended(self) -> bool:
        return self.world() is None or self.world() is not dist.group.WORLD

    def say(self, text: str) -> None:
        if not self.has_ended():
            logger.warning(f"[rank {self.rank} of {self.size}] {text}")

    def start_thread(self, target: Any) -> threading.Thread:
        # Private: torch has no other way to the store of init_process_group(). As in 2.6 to 2.14.
        store = dist.distributed_c10d._get_default_store()
        # In a list, which the thread empties: rank 0's store is the server, and must be able to end.
        thread = threading.Thread(target=target, args=[[store]], daemon=True, name="length sync")
        thread.start()
        return thread

    def leave(self) -> None:
        """At the interpreter's end: the board gets this rank's last clock, if that takes no time."""
        self.leaving = True
        self.wake.set()
        self.thread.join(0.5)

    def _keep_board(self, stores: list[dist.Store]) -> None:
        try:
            self.board = _Board(self.rank, self.size, stores)
            while not self.leaving and not self.has_ended():
                self._look(self.board)
            self.board.tell(self.clock, LEFT)
        except Exception as error:
            self.say(f"the encoder watch has ended: {_first_line(error)}")
        self.told.set()
        with self.lock:
            if self.group is not None and self.tensor is None and self.has_ended():
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(self.group))
                self.group = None

    def _look(self, board: _Board) -> None:
        has_called = self.wake.wait(min(s / 4 for s in (TIMEOUT_S, WATCH_S, 4.0) if s))
        self.wake.clear()
        board.tell(self.clock, "" if has_called else STILL)
        self.told.set()
        if self.asked:
            self.missing = board.behind(self.asked) or "all have made it by now"
            self.asked = 0
        called = self.last_call
        if WATCH_S and board.said_of != called and time.monotonic() - called > WATCH_S:
            board.said_of = called
            equal = f"all ranks made {_count(self.clock)}: they wait outside the encoder"
            text = f"no encoder call for {WATCH_S:g} s; {board.behind() or equal}; this rank is"
            self.say(f"{text} {_place()}")


class _Board:
    """The clocks of all ranks, in the job's store; of one thread."""

    def __init__(self, rank: int, size: int, stores: list[dist.Store]) -> None:
        self.rank = rank
        self.size = size
        self.told = ""
        self.said_of = 0.0
        self.server = _idle_connection(stores[0])
        store = _client(stores)
        # Numbered: process groups may share a store.
        self.prefix = f"length_sync/{store.add(f'length_sync/{rank}', 1)}"
        self.store = dist.PrefixStore(self.prefix, store)

    def is_open(self) -> bool:
        """Whether its server lives: for a request to a dead one c10d prints its C++ stack."""
        try:
            return self.server is None or self.server.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def tell(self, clock: int, state: str) -> None:
        entry = f"{clock} {state}"
        if entry != self.told and self.is_open():
            self.told = entry
            self.store.set(str(self.rank), entry)

    def behind(self, clock: int = 0) -> str:
        """Which ranks have left, or made fewer calls than this clock, or than the highest one."""
        if not self.is_open():
            return "the job's store has ended"
        told = []
        for key in map(str, range(self.size)):
            entry = self.store.get(key).decode() if self.store.check([key]) else f"0 {STILL}"
            told.append((int(entry.split()[0]), entry.partition(" ")[2]))
        clock = clock or max(told)[0]
        behind = []
        for rank, (own, state) in enumerate(told):
            if own < clock or state == LEFT:
                count = _count(own) if state else f"at least {_count(own)}"
                behind.append(f"rank {rank} made {count}" + " and left" * (state == LEFT))
        if len(behind) > 8:
            behind[8:] = [f"and {len(behind) - 8} more ranks"]
        return f"of {_count(clock)} calls {', '.join(behind)}" if behind else ""


def _client(stores: list[dist.Store]) -> dist.Store:
    """Of one's own: a request that waits holds its client's lock, and c10d needs the default's."""
    store = stores.pop()
    return store.clone() if hasattr(store, "clone") else store  # torch 2.6 has none


def _idle_connection(store: Any) -> socket.socket | None:
    """To the store's server, if it has one: it closes when that ends."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "port"):
        return None
    connection = socket.create_connection((store.host, store.port), 60)
    connection.setblocking(False)
    return connection


def _place() -> str:
    """The main thread's innermost line that is neither Python's, torch's, Lightning's nor NeMo's."""
    libraries = LIBRARIES | sys.stdlib_module_names
    collects = gc.isenabled()
    # On Python 3.11 a collection lets it run on, which ends the process if its frames are being read.
    gc.disable()
    try:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in libraries:
            frame = frame.f_back
    finally:
        if collects:
            gc.enable()
    if frame is None:
        return "in no line of its user's"
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _next(clock: int, training: bool) -> int:
    if training:
        return (clock // CALL + 1) * CALL
    return clock + 1 if (clock + 1) % CALL else clock + 2  # a training call's has no remainder


def _count(clock: int) -> str:
    """Training calls, and evaluation calls since the last of them."""
    return f"{clock // CALL}+{clock % CALL}" if clock % CALL else f"{clock // CALL}"


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0][:200]
