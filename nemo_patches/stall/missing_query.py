"""Questions, each in a short-lived thread: who is missing from a round; was this rank waited for.

One waiting rank asks the job's store for all: it reads every rank's heartbeat and leaves what it found for the others,
so that the traffic at the store grows with the number of ranks and not with its square. Where the store fails, each
asks the ranks themselves.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from ..sync.rank_log import first_line, report
from .heartbeats import (
    DETAILED,
    Beat,
    MissingRank,
    announced,
    decode_missing,
    decode_texts,
    encode_missing,
    encode_texts,
    present,
    read,
)
from .peers import Peer, ask
from .rank_text import ELSEWHERE, LATE, LEFT, SILENT, UNANNOUNCED, named

END = "end"  # in place of an encoder's key: its group is gone, and so is some rank
_BEATS_TO_SEE = 1.75  # periods after which a heart that beats has been seen to
_LOOK = 0.2  # seconds between two looks for what another rank is to find out
_ODD = 0.5  # seconds for an answer of the store's
_DIRECTLY = 1.2  # seconds for a rank to answer: one whose heart beats looks four times a second
_SLICE = 0.05  # between two looks whether the answer is still wanted
_LATE_LOOKS = (0.0, 1.0, 3.0)  # seconds after it came back: the others may still be finding out


class Asker(Protocol):
    """What a question needs of the stall monitor."""

    rank: int
    size: int
    period: float
    lock: threading.Lock

    def peers(self) -> Mapping[int, Peer]:
        """Where each rank is; empty while not all have announced themselves."""

    def connection(self) -> dist.Store:
        """To be called, and used, with the lock held. May block."""


@dataclass(frozen=True)
class Answer:
    """Who is missing; why (some of) that is not known, or empty; what is odd about how it is known, or empty."""

    missing: tuple[MissingRank, ...] = ()
    unknown: str = ""
    note: str = ""


class Inquiry:
    """Who is missing from round `number` of the encoder `key`; for END: who has gone.

    due_at is the time (time.monotonic()) at which who has not come is missing.
    """

    def __init__(self, asker: Asker, key: str, number: int, due_at: float, repeat: int, incident: str) -> None:
        self.repeat = repeat
        self._asker, self._key, self._number, self._due_at = asker, key, number, due_at
        self._incident = incident
        self._began = time.monotonic()
        self._asked_at = 0.0
        self._present: set[int] = set()  # ranks that have announced themselves
        self._missing: tuple[MissingRank, ...] | None = None  # once it is known
        self._partly: tuple[MissingRank, ...] = ()  # what is known before
        self._error = ""  # the store's
        self._direct: DirectInquiry | None = None
        self._cancelled = False
        self._thread = _started(self._run)

    @property
    def done(self) -> bool:
        if self._missing is not None or not self._trouble():
            return self._missing is not None
        direct = self._direct
        return direct.done if direct is not None else not self._asker.peers()

    def answer(self) -> Answer:
        """What is known by now."""
        direct, trouble = self._direct, self._trouble()
        if self._missing is not None:
            return Answer(self._missing)
        if direct is not None and direct.missing is not None:
            return Answer(direct.missing, direct.unknown, f"{trouble or 'slow store'}; the ranks themselves were asked")
        return Answer(self._partly, trouble or ("" if self._partly else "it was not known yet"))

    def look_after_the_store(self) -> None:
        """Called again and again: where the store fails, ask the ranks themselves."""
        if self._direct is None and not self._cancelled and self._trouble() and (peers := self._asker.peers()):
            self._direct = DirectInquiry(self._asker, peers, self._key, self._number, self._due_at)

    def alive(self) -> list[threading.Thread]:
        """Its threads, while they run."""
        threads = [self._thread, *([self._direct.thread] if self._direct is not None else [])]
        return [thread for thread in threads if thread.is_alive()]

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def cancel(self) -> None:
        self._cancelled = True
        if self._direct is not None:
            self._direct.cancel()

    def _trouble(self) -> str:
        """What is wrong with the store; empty where it answers."""
        if self._missing is not None:
            return ""
        if self._error:
            return f"the job's store, which all ranks meet at, is gone: {self._error}"
        asked_at = self._asked_at
        owed = time.monotonic() - asked_at if asked_at else 0.0
        return f"the job's store has not answered for {owed:.1f} s" if owed >= _ODD else ""

    # What follows runs in its own thread.

    def _run(self) -> None:
        try:
            with self._asking():
                store = self._asker.connection()
            attempt = 0
            while not self._cancelled and self._missing is None:
                attempt += 1
                self._ask(store, f"stall/{self._key}/{self._number}/{self.repeat}.{attempt}")
        except Exception as error:
            self._error = first_line(error)

    def _ask(self, store: dist.Store, topic: str) -> None:
        """The first to ask under a topic finds out for all; the others wait for that, and not for long."""
        with self._asking():
            is_first = store.add(f"{topic}/asked", 1) == 1
        if is_first:
            missing = self._find_out(store)
            if not self._cancelled:
                with self._asking():
                    self._publish(store, topic, missing)
                self._missing = missing
            return
        patience = max(self._due_at, time.monotonic() + _BEATS_TO_SEE * self._asker.period) + 3 * _LOOK
        self._sleep_until(self._due_at)  # nobody knows before
        while not self._cancelled and time.monotonic() < patience:
            with self._asking():
                found = store.get(f"{topic}/missing") if store.check([f"{topic}/missing"]) else None
            if found is not None:
                missing_there = decode_missing(found, self._asker.size)
                # One that names this rank is from before it came.
                if missing_there is not None and all(one.rank != self._asker.rank for one in missing_there):
                    self._missing = missing_there
                return
            self._sleep_until(time.monotonic() + _LOOK)

    def _publish(self, store: dist.Store, topic: str, missing: tuple[MissingRank, ...]) -> None:
        store.set(f"{topic}/missing", encode_missing(missing).decode())
        for one in missing:
            told = encode_texts({"id": topic, "incident": self._incident, "where": one.where})
            store.set(_waited_for(one.rank), told.decode())

    def _find_out(self, store: dist.Store) -> tuple[MissingRank, ...]:
        """Looks when it begins, when the report is due, and when a heart that beats must have been seen to."""
        began = time.monotonic()
        others = set(range(self._asker.size)) - {self._asker.rank}
        first, absent = self._look(store, others)
        self._sleep_until(self._due_at)
        due, absent = self._look(store, absent)
        # Where all have come, and the round has not, some rank has died or was stopped since it came.
        came = self._key == END or not absent
        self._partly = () if came else self._described(absent, {}, due, due)
        self._sleep_until(began + _BEATS_TO_SEE * self._asker.period)
        last, still_absent = self._look(store, others if came else absent)
        # A heartbeat may be a period old: who has come by now may have been there in time. Unless nobody else is left.
        if came:
            return self._described(others, first, last, due, (SILENT, LEFT))
        return self._described(still_absent or absent, first, last, due)

    def _look(self, store: dist.Store, ranks: set[int]) -> tuple[dict[int, Beat], set[int]]:
        """The heartbeats of these ranks, and which of them have not come to the round."""
        if not ranks or self._cancelled:
            return {}, set()
        with self._asking():
            if ranks - self._present:
                self._present |= present(store, self._asker.size)
            beats = read(store, self._present & ranks)
        return beats, {rank for rank in ranks if rank not in beats or not self._has_come(beats[rank])}

    def _has_come(self, beat: Beat) -> bool:
        return has_come(beat, self._key, self._number)

    def _described(
        self,
        ranks: set[int],
        first: dict[int, Beat],
        last: dict[int, Beat],
        due: dict[int, Beat],
        only: tuple[str, ...] = (),
    ) -> tuple[MissingRank, ...]:
        """Of the ranks, those of these kinds (of all, if empty); of the first few with what they told."""
        found: list[MissingRank] = []
        for rank in sorted(ranks):
            beat = last.get(rank)
            kind = self._kind(first.get(rank), beat, last is due)
            if only and kind not in only:
                continue
            if beat is None or len(found) >= DETAILED:
                found.append(MissingRank(rank, kind))
                continue
            # One that has come just now tells nothing any more of where it was when the others gave up.
            told = due.get(rank) if self._has_come(beat) else beat
            where, workers = (told.where, told.workers) if told and kind in (LATE, ELSEWHERE) else ("", ())
            silence = self.age if kind == SILENT and beat.idle >= 0 else 0.0  # since it was first looked at
            found.append(MissingRank(rank, kind, beat.host, beat.pid, beat.calls, beat.idle + silence, where, workers))
        return tuple(found)

    def _kind(self, first: Beat | None, last: Beat | None, early: bool) -> str:
        """Of a missing rank, by its heartbeat when it was first looked at and now; early: too soon after to tell."""
        if last is None:
            return UNANNOUNCED
        if last.phase == LEFT:
            return LEFT
        if first is not None and first.number == last.number and not early:
            return SILENT
        return LATE if early or self._has_come(last) else ELSEWHERE

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """While the store owes an answer."""
        self._asked_at = time.monotonic()
        try:
            with self._asker.lock:
                yield
        finally:
            self._asked_at = 0.0

    def _sleep_until(self, end: float) -> None:
        _sleep_until(end, lambda: self._cancelled)


class DirectInquiry:
    """The same, asked from the ranks themselves. missing: what was found so far, None before. unknown: why not more."""

    def __init__(self, asker: Asker, peers: Mapping[int, Peer], key: str, number: int, due_at: float) -> None:
        self.missing: tuple[MissingRank, ...] | None = None
        self.done = False
        self._peers = {rank: peer for rank, peer in peers.items() if rank != asker.rank and peer.address}
        unasked = sorted(set(range(asker.size)) - {asker.rank, *self._peers})
        self.unknown = f"{named(unasked)} cannot be asked" if unasked else ""
        self._key, self._number, self._due_at = key, number, due_at
        self._cancelled = False
        self.thread = _started(self._run)

    def cancel(self) -> None:
        self._cancelled = True

    def _run(self) -> None:
        """Asks when it begins and, where that is before, when the report is due."""
        try:
            early = time.monotonic() < self._due_at
            self._ask()
            if early:
                _sleep_until(self._due_at, lambda: self._cancelled)
                self._ask()
        except Exception as error:
            self.unknown = f"the ranks cannot be asked: {first_line(error)}"
        self.done = True

    def _ask(self) -> None:
        beats = ask(self._peers, _DIRECTLY, lambda: self._cancelled)
        if not self._cancelled:
            self.missing = tuple(self._described(beats))

    def _described(self, beats: dict[int, Beat]) -> Iterator[MissingRank]:
        silent = self._peers.keys() - beats.keys()
        absent = {rank for rank, beat in beats.items() if not has_come(beat, self._key, self._number)}
        for rank in sorted(silent | (absent if self._key != END else set())):
            peer, beat = self._peers[rank], beats.get(rank)
            if beat is None:
                yield MissingRank(rank, SILENT, peer.host, peer.pid)
            else:
                told = (beat.calls, beat.idle, beat.where, beat.workers)
                yield MissingRank(rank, ELSEWHERE, beat.host, beat.pid, *told)


class LateCheck:
    """Whether other ranks have waited for this one, asked when it comes back from a long time without encoder calls."""

    def __init__(self, asker: Asker, where: str, said: set[str]) -> None:
        self._asker, self._where, self._said = asker, where, said
        self._cancelled = False
        self._began = time.monotonic()
        self.thread = _started(self._run)

    def cancel(self) -> None:
        self._cancelled = True

    def _run(self) -> None:
        # Errors are nobody's concern: a store that is gone is the waiting ranks' to report.
        with contextlib.suppress(Exception):
            key = _waited_for(self._asker.rank)
            for seconds in _LATE_LOOKS:
                _sleep_until(self._began + seconds, lambda: self._cancelled)
                with self._asker.lock:
                    store = self._asker.connection()
                    told = store.get(key) if not self._cancelled and store.check([key]) else b""
                if self._cancelled or (told and self._say(decode_texts(told))):
                    break

    def _say(self, told: dict[str, str]) -> bool:
        if told.get("id", "") in self._said:
            return False
        self._said.add(told.get("id", ""))
        where = told.get("where") or self._where
        been = f"; it had been in {where}" if where else ""
        report(logging.WARNING, f"other ranks waited for this one, and gave up ({told.get('incident', '')}){been}")
        return True


class Census:
    """All ranks' heartbeats, asked for once. `beats` is empty until they are there, and where the store fails."""

    def __init__(self, asker: Asker) -> None:
        self.beats: dict[int, Beat] = {}
        self._asker = asker
        self._cancelled = False
        self.thread = _started(self._run)

    def cancel(self) -> None:
        self._cancelled = True

    def _run(self) -> None:
        with contextlib.suppress(Exception), self._asker.lock:  # a store that has gone is a stall report's to tell
            store = self._asker.connection()
            if not self._cancelled and announced(store) == self._asker.size:
                self.beats = read(store, range(self._asker.size))


def has_come(beat: Beat, key: str, number: int) -> bool:
    """Whether its rank has come to round `number` of the encoder `key`."""
    return beat.rounds.get(key, 0) >= number > 0


def _started(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name="nemo_patches inquiry", daemon=True)
    thread.start()
    return thread


def _sleep_until(end: float, cancelled: Callable[[], bool]) -> None:
    while not cancelled() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _SLICE))


def _waited_for(rank: int) -> str:
    return f"waited_for/{rank}"
