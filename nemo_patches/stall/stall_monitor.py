"""Sees that this rank waits, or is waited for, and says who is missing and what it does: one daemon thread per process.

The thread never asks for anything: a question may stay unanswered for minutes where a network is cut, so each is asked
in a short-lived thread of its own (inquiry.py), and what is not answered in time is reported without it.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from ..sync import __version__
from ..sync import events as activity
from ..sync.gloo_rounds import leak, stop_helpers
from ..sync.rank_log import report
from ..sync.settings import Settings
from . import stacks
from .heartbeats import Beat, MissingRank, innermost, own_connection, send, told
from .missing_query import END, Answer, Census, Inquiry, LateCheck
from .peers import Listener, Peer
from .rank_text import LATE, LEFT, named
from .roll_call import RollCall

# Seconds. Many ranks beat less often, for the sake of the one store server; a file that only grows, much less often.
_PERIOD, _PERIOD_PER_RANK, _PERIOD_OF_A_FILE = 1.0, 1 / 400, 30.0
_TICK, _TICK_IN_A_STALL, _SHORTEST_TICK = 0.25, 0.05, 0.02
_PATIENCE = 2.6  # for an inquiry that is not done when its report is due
_RAISE_PATIENCE = 0.35  # the training thread waits for this one
_FIRST_REPEAT = 60.0
_BRIEFLY = 0.05


class OpenRound:
    """One round of an encoder on this rank, as the training thread notes it. A time of 0.0 (monotonic) is: not yet."""

    __slots__ = (
        "call",
        "came_at",
        "gave_up_at",
        "issued_at",
        "length",
        "missing",
        "number",
        "text",
        "told",
        "training",
    )

    def __init__(self, number: int, call: int, training: bool, length: int) -> None:
        self.number, self.call, self.training, self.length = number, call, training, length
        self.issued_at = time.monotonic()
        self.gave_up_at = self.came_at = 0.0
        # For on_timeout="raise": set when the report is there, in `text` and `missing`.
        self.told: threading.Event | None = None
        self.text = ""
        self.missing: tuple[MissingRank, ...] = ()


class Watched(Protocol):
    """What the monitor looks at of an encoder's sync."""

    title: str
    key: str
    open_round: OpenRound | None
    gave_up: OpenRound | None  # set where a wait ran out of time while calm; the monitor takes it
    calm: bool  # no stall since the last wait that came in time
    fallbacks: int
    waited: timedelta

    @property
    def rounds(self) -> int: ...

    def late(self, one: OpenRound, waited: float) -> str: ...

    def has_come(self, one: OpenRound) -> bool: ...

    def has_failed(self) -> bool: ...

    @property
    def closed(self) -> bool: ...


@dataclass(frozen=True)
class Stall:
    """Ranks that this one waits, or has stopped waiting, for: `status().stalls` has those that last."""

    encoder: str
    call: int  # 0 where the encoder's length sync has ended, because the missing ranks have gone
    since: timedelta  # since this rank came to the round
    missing: tuple[MissingRank, ...]
    size: int  # ranks in all
    unknown: str  # why `missing` cannot be told; empty where it can


@dataclass(eq=False)
class _Stall:
    """A round that is late, from half the timeout on."""

    round: OpenRound
    heeds_wait: bool  # whether a wait that gave up makes it one to report, or only the whole timeout
    inquiry: Inquiry | None = None  # None at exit, when nobody is asked any more
    answer: Answer = Answer()  # noqa: RUF009  # frozen; replaced as a whole, other threads read it
    said_at: float = 0.0
    repeats: int = 0

    def due_at(self, timeout: float) -> float:
        end = self.round.issued_at + timeout
        return min(self.round.gave_up_at, end) if self.heeds_wait and self.round.gave_up_at else end


class StallMonitor:
    """The monitor of one process group on this rank; `start` at the first distributed encoder call."""

    def __init__(self, store: dist.Store, rank: int, size: int, prefix: str, settings: Callable[[], Settings]) -> None:
        self.rank, self.size = rank, size
        # Weak: a strong reference would keep rank 0's server, and its port, after destroy_process_group.
        self._default_store = weakref.ref(store)
        self._prefix, self._settings = prefix, settings
        inner = innermost(store)
        self.period = _PERIOD_OF_A_FILE if isinstance(inner, dist.FileStore) else period_for(size)
        self._server = (inner.host, inner.port) if isinstance(inner, dist.TCPStore) else None
        self._roll_call: RollCall | None = None
        self._listener: Listener | None = None
        self._syncs: list[weakref.ref[Watched]] = []
        self._stalls: dict[Watched, _Stall] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._broken = False  # the store takes no heartbeats any more; what that means, an inquiry tells
        self._number = 0
        self._next_beat = 0.0
        self._latest: Beat | None = None
        self._inquiries: list[Inquiry] = []  # of which threads run
        self._end: Inquiry | None = None
        self._end_title = ""
        self._end_told = threading.Event()
        self._end_missing: tuple[MissingRank, ...] = ()
        self._seen_calls, self._seen_since = 0, 0.0
        self._late: LateCheck | None = None
        self._census: Census | None = None
        self._census_wanted = False
        self._beats: dict[int, Beat] = {}
        self._late_said: set[str] = set()
        self.lock = threading.Lock()  # of the connection: held for a request by whoever waits for its answer
        self._store: dist.Store | None = None
        self._call_said = 0.0
        _monitors.add(self)

    # The training thread's side: assignments, and two waits that on_timeout="raise" asks for.

    def start(self, roll_call: RollCall) -> None:
        self._roll_call = roll_call
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._loop, name="nemo_patches stall monitor", daemon=True)
            self._thread.start()

    def watch(self, sync: Watched) -> None:
        self._syncs.append(weakref.ref(sync))

    def wait_for_report(self, one: OpenRound) -> None:
        """Until the report on a round that timed out is there, for a short time."""
        assert one.told is not None
        one.told.wait(_RAISE_PATIENCE + 0.1)

    def wait_for_end(self, limit: timedelta) -> tuple[MissingRank, ...]:
        """The ranks that have gone, after a round failed; what is known of them after `limit`."""
        self._end_told.wait(max(limit.total_seconds(), 0.0))
        return self._end_missing

    def stop(self) -> None:
        """End the thread at its next look. Takes no lock: the garbage collector may call this anywhere."""
        self._stopped = True

    def stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def join(self, limit: timedelta) -> None:
        """At exit: wait for the threads' ends, for a short while; c10d must not return into a dying interpreter.

        A thread that the store still has not answered then stays there. The store's server, where this process has it,
        must not end before the process does, or the call would fail and return.
        """
        end = time.monotonic() + limit.total_seconds()
        asked = [thread for one in self._inquiries for thread in one.alive()]
        asked += [one.thread for one in (self._late, self._census) if one is not None]
        for thread in (self._thread, *asked):
            if thread is not None:
                thread.join(max(end - time.monotonic(), 0.0))
                if thread.is_alive():
                    leak(self._default_store())

    # Any thread's.

    def beats(self) -> dict[int, Beat]:
        """What length_sync.beats returns."""
        self._census_wanted = True
        return self._beats

    def stalls(self) -> tuple[Stall, ...]:
        """The rounds that were reported and have not come; and, where a round has failed, who has gone."""
        now = time.monotonic()
        gone = self._end
        ended = (
            ()
            if gone is None or not self._end_missing
            else (Stall(self._end_title, 0, timedelta(seconds=gone.age), self._end_missing, self.size, ""),)
        )
        return ended + tuple(
            Stall(
                sync.title,
                one.round.call,
                timedelta(seconds=now - one.round.issued_at),
                one.answer.missing,
                self.size,
                one.answer.unknown,
            )
            for sync, one in list(self._stalls.items())
            if one.said_at
        )

    def connection(self) -> dist.Store:
        """The one connection of this process's heartbeats and inquiries; to be called, and used, with the lock held."""
        if self._store is None:
            default_store = self._default_store()
            if default_store is None:
                raise RuntimeError("the process group was destroyed")
            self._store = dist.PrefixStore(self._prefix, own_connection(default_store))
        return self._store

    def peers(self) -> Mapping[int, Peer]:
        if self._roll_call is None or self._listener is None:
            return {}
        return {rank: self._listener.from_here(peer) for rank, peer in self._roll_call.peers.items()}

    def has_stall(self) -> bool:
        """Whether a round is late enough to be looked into."""
        return bool(self._stalls)

    def first_beat(self) -> Beat:
        """The heartbeat with which this rank announces itself: from now on it can be asked directly."""
        if self._server is not None:
            with contextlib.suppress(OSError):  # then it cannot be: whom that concerns says so
                self._listener = Listener(self._server)
        if self._stopped:
            self.stop_listening()
        return self.beat()

    def beat(self, phase: str = "") -> Beat:
        """This rank's next heartbeat."""
        now, settings, last = time.monotonic(), self._settings(), activity.current.last
        idle = now - last.since if last.since else -1.0
        if not phase:
            phase = activity.current.phase
            if phase == activity.FORWARD and not stacks.runs(last.thread, last.place):
                phase = "between encoder calls"
        far = idle >= settings.timeout.total_seconds() / 2 and phase != LEFT
        syncs = self._watched()
        opened = [(one.issued_at, sync.key, one.number) for sync in syncs if (one := sync.open_round)]
        self._number += 1
        return Beat(
            rank=self.rank,
            number=self._number,
            host=socket.gethostname(),
            pid=os.getpid(),
            versions=_versions(),
            settings=str(settings),
            phase=phase,
            encoder=last.encoder,
            calls=last.calls,
            clock=last.clock,
            idle=idle,
            rounds={key: number for _, key, number in sorted(opened)},
            fallbacks=sum(sync.fallbacks for sync in syncs),
            waited=sum((sync.waited for sync in syncs), timedelta(0)).total_seconds(),
            issued=sum(sync.rounds for sync in syncs),
            address=self._listener.address if self._listener is not None else "",
            port=self._listener.port if self._listener is not None else 0,
            where=stacks.where(last.thread) if far else "",
            workers=stacks.loader_workers() if far else (),
        )

    # What follows runs in the monitor's thread.

    def _loop(self) -> None:
        try:
            while not self._stopped:
                self._tick()
                time.sleep(self._pause())
            self._tick(last=True)
            self._beat(LEFT)
        except Exception as error:
            report(logging.ERROR, f"the stall monitor has ended by an error of its own, please report it: {error!r}")
        finally:
            for asked in (self._late, self._census, *self._inquiries):
                if asked is not None:
                    asked.cancel()
            self.stop_listening()
            self._store = None

    def _pause(self) -> float:
        settings = self._settings()
        shortest = min(settings.timeout, settings.call_timeout or settings.timeout).total_seconds()
        return max(min(_TICK_IN_A_STALL if self._stalls else _TICK, shortest / 8), _SHORTEST_TICK)

    def _tick(self, last: bool = False) -> None:
        now, settings = time.monotonic(), self._settings()
        timeout = settings.timeout.total_seconds()
        came_back = self._calls_again(timeout)
        for inquiry in self._inquiries:
            inquiry.look_after_the_store()
        if now >= self._next_beat or came_back:
            self._beat()
        for sync in self._watched():
            if sync.has_failed():
                self._look_at_end(sync, now, last)
            self._look(sync, now, timeout, last)
        self._say_end(now, last)
        self._take_census(last)
        if self._listener is not None:
            self._listener.answer(self.beat)
        self._watch_call(now, settings.call_timeout)

    def _watched(self) -> list[Watched]:
        found = []
        for ref in list(self._syncs):
            if (sync := ref()) is not None:
                found.append(sync)
            else:
                with contextlib.suppress(ValueError):  # the helper's thread has been here
                    self._syncs.remove(ref)
        return found

    def _beat(self, phase: str = "") -> None:
        if self._broken or self._store is None or not self.lock.acquire(timeout=_BRIEFLY):
            return  # at the next look again; a store that owes an answer would block this thread, too
        try:
            self._next_beat = time.monotonic() + self.period
            self._latest = self.beat(phase)
            send(self._store, self._latest)
        except Exception:
            self._broken = True
        finally:
            self.lock.release()

    def _look(self, sync: Watched, now: float, timeout: float, last: bool) -> None:
        stall = self._stalls.get(sync)
        if stall is None:
            given_up, sync.gave_up = sync.gave_up, None
            one = given_up or sync.open_round
            if one is None:
                return
            if not given_up and (
                sync.has_failed() or sync.closed or sync.has_come(one) or now - one.issued_at < timeout / 2
            ):
                return
            self._beat()  # with this round, before anybody is asked
            stall = self._stalls[sync] = _Stall(one, heeds_wait=sync.calm)
            if not last:
                stall.inquiry = self._inquire(sync, stall, timeout, 0)
        elif sync.gave_up is stall.round:
            sync.gave_up = None
        self._step(sync, stall, now, timeout, last)

    def _inquire(self, sync: Watched, stall: _Stall, timeout: float, repeat: int) -> Inquiry:
        one = stall.round
        text = f"{sync.title}: {_kind(one)} call {one.call}"
        return self._asked_now(Inquiry(self, sync.key, one.number, stall.due_at(timeout), repeat, text))

    def _asked_now(self, inquiry: Inquiry) -> Inquiry:
        self._inquiries = [one for one in self._inquiries if one.alive()] + [inquiry]
        return inquiry

    def _step(self, sync: Watched, stall: _Stall, now: float, timeout: float, last: bool) -> None:
        one = stall.round
        came = sync.has_come(one)
        over = came or sync.has_failed() or sync.closed
        due_at = stall.due_at(timeout)
        due = due_at <= (one.came_at or now)
        if over and not due:
            self._drop(sync, stall)
            return
        if due and not stall.said_at:
            patience = _RAISE_PATIENCE if one.told is not None else _PATIENCE
            if stall.inquiry is None or stall.inquiry.done or now >= due_at + patience or last:
                self._say(sync, stall, now)
        if stall.said_at and over:
            if came:
                self._say_recovered(sync, stall)
            self._drop(sync, stall)
        elif stall.said_at and now >= stall.said_at + _FIRST_REPEAT * 2**stall.repeats:
            if stall.inquiry is None or stall.inquiry.repeat <= stall.repeats:
                stall.inquiry = self._inquire(sync, stall, timeout, stall.repeats + 1)
            elif stall.inquiry.done or stall.inquiry.age > _PATIENCE + self.period * 2:
                stall.repeats += 1
                self._say(sync, stall, now)

    def _drop(self, sync: Watched, stall: _Stall) -> None:
        if stall.inquiry is not None:
            stall.inquiry.cancel()
        self._stalls.pop(sync, None)

    def _say(self, sync: Watched, stall: _Stall, now: float) -> None:
        one = stall.round
        sync.calm = False
        answer = stall.inquiry.answer() if stall.inquiry is not None else Answer(unknown="this process ends")
        if answer.unknown and not answer.missing and self.size == 2:
            answer = replace(answer, missing=(MissingRank(1 - self.rank, LATE),))  # whatever else cannot be told
        stall.answer = answer
        stall.said_at = now  # only now: `stalls` may be looking
        waited = (one.gave_up_at or one.came_at or now) - one.issued_at
        still = f"still (after {timedelta(seconds=round(now - one.issued_at))}) " if stall.repeats else ""
        call = f"{sync.title}: {_kind(one)} call {one.call}"
        text = f"{call}: {still}{sync.late(one, waited)}. Missing: {self._told(answer)}"
        one.missing, one.text = answer.missing, text
        if one.told is not None:
            one.told.set()
        activity.tell(lambda observer: observer.stalled(sync.title, one.call, answer.missing, answer.unknown))
        report(logging.WARNING, text)

    def _told(self, answer: Answer) -> str:
        odd = "".join(f" | {text}" for text in (answer.unknown, answer.note) if text)
        if answer.missing:
            return told(answer.missing, self.size) + odd
        return f"cannot be told{odd}" if answer.unknown else f"none, every rank has come to this call by now{odd}"

    def _say_recovered(self, sync: Watched, stall: _Stall) -> None:
        one = stall.round
        who = named(missing.rank for missing in stall.answer.missing) if stall.answer.missing else "the missing length"
        been = "".join(
            f"; rank {missing.rank} had been in {missing.where}" for missing in stall.answer.missing if missing.where
        )
        late = (one.came_at or time.monotonic()) - one.issued_at
        report(logging.WARNING, f"{sync.title}: recovered: {who} came {late:.2f} s late{been}")

    def _look_at_end(self, sync: Watched, now: float, last: bool) -> None:
        if self._end is None and not last:
            self._end_title = sync.title
            self._end = self._asked_now(Inquiry(self, END, 0, now, 0, f"{sync.title}: its length sync has ended"))

    def _say_end(self, now: float, last: bool) -> None:
        end = self._end
        if end is None or self._end_told.is_set() or not (end.done or last or end.age > _PATIENCE + 2 * self.period):
            return
        answer = end.answer()
        self._end_missing = answer.missing
        self._end_told.set()
        if answer.missing or (answer.unknown and not last):
            activity.tell(lambda observer: observer.stalled(self._end_title, 0, answer.missing, answer.unknown))
        if answer.missing:
            report(logging.WARNING, f"{self._end_title}: gone: {self._told(answer)}")
        elif answer.unknown and not last:
            report(logging.WARNING, f"{self._end_title}: which rank is gone {self._told(answer)}")

    def _calls_again(self, timeout: float) -> bool:
        """Whether this rank makes an encoder call after a long time without one: others may have waited for it."""
        last = activity.current.last
        if last.calls == self._seen_calls:
            return False
        away = last.since - self._seen_since
        self._seen_calls, self._seen_since = last.calls, last.since
        if away < timeout / 2:
            return False
        if self._late is not None:
            self._late.cancel()
        if not self._stopped:
            self._late = LateCheck(self, self._latest.where if self._latest else "", self._late_said)
        return True

    def _take_census(self, last: bool) -> None:
        census = self._census
        if census is not None and census.beats:
            self._beats = census.beats
        if self._census_wanted and not last and (census is None or not census.thread.is_alive()):
            self._census_wanted = False
            self._census = Census(self)

    def _watch_call(self, now: float, limit: timedelta) -> None:
        last, phase = activity.current.last, activity.current.phase
        if not limit or not last.since or self._call_said == last.since or now - last.since < limit.total_seconds():
            return
        if phase == activity.FORWARD and not stacks.runs(last.thread, last.place):
            return
        self._call_said = last.since
        report(
            logging.WARNING,
            f"{last.encoder}: call {last.call} has lasted {now - last.since:.1f} s, more than call_timeout; it is in: "
            f"{phase}. Nothing is interrupted. | " + " | ".join(stacks.all_threads()),
        )


def period_for(size: int) -> float:
    """Seconds from one heartbeat of a rank to the next, of so many ranks."""
    return max(_PERIOD, size * _PERIOD_PER_RANK)


def _kind(one: OpenRound) -> str:
    return "training" if one.training else "evaluation"


def _versions() -> str:
    nemo = getattr(sys.modules.get("nemo"), "__version__", "?")
    return f"nemo_patches {__version__}, nemo {nemo}"


_monitors: weakref.WeakSet[StallMonitor] = weakref.WeakSet()


def _at_exit() -> None:
    stop_helpers()  # what they would say now is of no use to anybody
    for monitor in list(_monitors):
        monitor.stop()
    for monitor in list(_monitors):
        monitor.join(timedelta(seconds=0.6))


def _in_forked_child() -> None:
    for monitor in list(_monitors):
        monitor.stop()
        monitor.stop_listening()  # the parent's port


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_forked_child)
