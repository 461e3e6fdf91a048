"""Who is missing from a round: asked from the job's store by one rank for all, or from the ranks themselves.

One waiting rank asks the store for all: it reads every rank's heartbeat and leaves what it found for the others, so
that the traffic at the store grows with the number of ranks and not with its square. Where the store fails, each rank
asks the ranks themselves. Each query runs in a short-lived thread.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ..sync import keys
from .heartbeat import Heartbeat
from .missing_rank import DETAILED, MissingRank, described
from .peers import ask
from .rank_text import ELSEWHERE, LATE, LEFT, SILENT, UNANNOUNCED, first_line, named
from .store_client import AskedStore, StoreClient, announced_ranks, read_heartbeats
from .wire import Peer, decode_missing, encode_missing, encode_texts

PATIENCE_S = 2.6  # for a query that is not done when its report is due
END = "end"  # in place of an encoder's key: its group is gone, and so is some rank
PERIODS_TO_SEE = 1.75  # after so many periods, a heart that beats has been seen to
_LOOK_S = 0.2  # between two looks for what another rank is to find out
_DIRECT_PATIENCE_S = 1.2  # for a rank to answer: one whose heart beats looks four times a second


class Introduction(NamedTuple):
    """How to ask the ranks themselves.

    peers: where each is; empty while not all have announced themselves. token: what they want to hear. problem: why
    this rank asks nobody.
    """

    peers: Mapping[int, Peer] = MappingProxyType({})
    token: bytes = b""
    problem: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What a query needs of this rank."""

    rank: int
    size: int
    period_s: float
    client: StoreClient
    introduction: Callable[[], Introduction]


@dataclass(frozen=True)
class Question:
    """Who is missing from this round of this encoder; with END for its key: who has gone.

    left: with END, the rank that has told the others that it leaves; -1: none.

    due_at: time.monotonic() at which a rank that has not come is missing. repeat: how often it was asked before.
    incident: for people, in the line of a rank that was waited for. call: the encoder's title, and the clock before the
    call, as a heartbeat has them; None: not known.
    """

    key: str
    round_number: int
    due_at: float
    repeat: int
    incident: str
    left: int = -1
    call: tuple[str, tuple[int, int]] | None = None

    def came(self, heartbeat: Heartbeat) -> bool:
        """Also where it does not say: nobody is missing for calling more encoders than a heartbeat holds.

        After a wait in vain a call may issue no round. Whose rank has made that call, and waits in a collective itself,
        has come to it: it may well wait for this rank.
        """
        made = self.call is not None and heartbeat.encoder == self.call[0] and heartbeat.clock >= self.call[1]
        return heartbeat.has_come(self.key, self.round_number) is not False or (made and bool(heartbeat.collective))

    def unsaid(self, heartbeats: Iterable[Heartbeat]) -> str:
        """Why it cannot be told that all have come; empty where it can."""
        ranks = [one.rank for one in heartbeats if one.has_come(self.key, self.round_number) is None]
        return f"{named(sorted(ranks))}: more encoders than a heartbeat tells of" if ranks and self.key != END else ""


@dataclass(frozen=True)
class Answer:
    """Who is missing; why (some of) that is not known, or empty; what is odd about how it is known, or empty."""

    missing: tuple[MissingRank, ...] = ()
    unknown: str = ""
    note: str = ""

    def text(self, size: int) -> str:
        """For a log line, of `size` ranks in all."""
        odd = "".join(f" | {text}" for text in (self.unknown, self.note) if text)
        if self.missing:
            return described(self.missing, size) + odd
        return f"cannot be told{odd}" if self.unknown else f"none, every rank has come to this call by now{odd}"


class MissingQuery:
    """One question: to the store and, where that fails, to the ranks."""

    def __init__(self, surroundings: Surroundings, question: Question) -> None:
        self.question = question
        self._surroundings = surroundings
        self._began = time.monotonic()
        self._cancelled = threading.Event()
        self._store_query = StoreQuery(surroundings, question, self._cancelled)
        self._direct_query: DirectQuery | None = None

    @property
    def done(self) -> bool:
        if self._store_query.answer is not None:
            return True
        if not self._store_query.trouble():
            return False
        if self._direct_query is None:
            return not self._surroundings.introduction().peers
        return self._direct_query.done

    def answer(self) -> Answer:
        """What is known by now."""
        answer, left = self._found(), self.question.left
        if left < 0:
            return answer
        # Its heartbeat may have ended with the store, if that was there too; what it said itself is known.
        peer = self._surroundings.introduction().peers.get(left)
        has_left = MissingRank(left, LEFT, peer.host, peer.pid) if peer else MissingRank(left, LEFT)
        others = [one for one in answer.missing if one.rank != left or one.kind == LEFT]
        missing = others if any(one.rank == left for one in others) else [has_left, *others]
        return Answer(tuple(sorted(missing, key=lambda one: one.rank)), note=answer.note)

    def _found(self) -> Answer:
        store, direct, trouble = self._store_query, self._direct_query, self._store_query.trouble()
        if store.answer is not None:
            return store.answer
        if direct is not None and direct.missing is not None:
            return Answer(direct.missing, direct.unknown, f"{trouble or 'slow store'}; the ranks themselves were asked")
        if trouble and (problem := self._surroundings.introduction().problem):
            trouble += f"; the ranks themselves are not asked: {problem}"
        return Answer(store.partly, trouble or ("" if store.partly else "it was not known yet"))

    def look_after_the_store(self) -> None:
        """Called again and again, by the stall monitor: where the store fails, ask the ranks themselves."""
        if self._direct_query is not None or self._cancelled.is_set() or not self._store_query.trouble():
            return
        introduction = self._surroundings.introduction()
        if introduction.peers:
            self._direct_query = DirectQuery(self._surroundings, self.question, introduction, self._cancelled)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began

    def cancel(self) -> None:
        self._cancelled.set()


class StoreQuery:
    """A question to the job's store. Its thread writes `answer` once it is known, and `partly` before."""

    def __init__(self, surroundings: Surroundings, question: Question, cancelled: threading.Event) -> None:
        self.answer: Answer | None = None
        self.partly: tuple[MissingRank, ...] = ()
        self._surroundings, self._question, self._cancelled = surroundings, question, cancelled
        self._began = time.monotonic()
        self._store = AskedStore(surroundings.client)
        self._announced, self._all_sync = set[int](), question.round_number > 1
        surroundings.client.ask_in_thread(self._run)

    def trouble(self) -> str:
        """What is wrong with the store; empty where it answers."""
        return "" if self.answer is not None else self._store.trouble()

    # What follows runs in its own thread.

    def _run(self) -> None:
        try:
            key, number, repeat = self._question.key, self._question.round_number, self._question.repeat
            attempt = 0
            while not self._cancelled.is_set() and self.answer is None:
                attempt += 1
                self._ask(keys.QUERY.format(encoder=key, round=number, repeat=repeat, attempt=attempt))
        except Exception as error:
            self._store.error = first_line(error)

    def _ask(self, topic: str) -> None:
        """The first to ask under a topic finds out for all; the others wait for that, and not for long."""
        with self._store.asking() as store:
            is_first = store.add(f"{topic}/asked", 1) == 1
        if is_first:
            answer = self._find_out()
            if not self._cancelled.is_set():
                if not answer.unknown:
                    self._publish(topic, answer.missing)
                self.answer = answer
            return
        due_at, period_s = self._question.due_at, self._surroundings.period_s
        patience = max(due_at, time.monotonic() + PERIODS_TO_SEE * period_s) + 3 * _LOOK_S
        self._cancelled.wait(due_at - time.monotonic())  # nobody knows before
        while not self._cancelled.is_set() and time.monotonic() < patience:
            with self._store.asking() as store:
                data = store.get(f"{topic}/missing") if store.check([f"{topic}/missing"]) else None
            if data is not None:
                missing_there = decode_missing(data, self._surroundings.size)
                # One that names this rank is from before it came.
                if missing_there is not None and all(one.rank != self._surroundings.rank for one in missing_there):
                    self.answer = Answer(missing_there)
                return
            self._cancelled.wait(_LOOK_S)

    def _publish(self, topic: str, missing: tuple[MissingRank, ...]) -> None:
        with self._store.asking() as store:
            store.set(f"{topic}/missing", encode_missing(missing).decode())
            for rank in missing:
                texts = encode_texts({"id": topic, "incident": self._question.incident, "where": rank.where})
                store.set(keys.WAITED_FOR.format(rank=rank.rank), texts.decode())

    def _find_out(self) -> Answer:
        """Looks when it begins, when the report is due, and when a heart that beats must have been seen to."""
        began = time.monotonic()
        others = set(range(self._surroundings.size)) - {self._surroundings.rank}
        first, absent = self._look(others)
        self._cancelled.wait(self._question.due_at - time.monotonic())
        due, absent = self._look(absent)
        # Where all have come, and the round has not, some rank has died or was stopped since it came.
        came = self._question.key == END or not absent
        self.partly = () if came else self._described(absent, {}, due, due)
        self._cancelled.wait(began + PERIODS_TO_SEE * self._surroundings.period_s - time.monotonic())
        last, still_absent = self._look(others if came else absent)
        if came:
            gone = self._described(others, first, last, due, (SILENT, LEFT))
            return Answer(gone, "" if gone else self._question.unsaid(last.values()))
        # Heartbeats lag by one period: blame a rank seen just now only if no other suspect remains.
        return Answer(self._described(still_absent or absent, first, last, due))

    def _look(self, ranks: set[int]) -> tuple[dict[int, Heartbeat], set[int]]:
        """The heartbeats of these ranks, and which of them have not come to the round."""
        if not ranks or self._cancelled.is_set():
            return {}, set()
        with self._store.asking() as store:
            if ranks - self._announced:
                self._announced |= announced_ranks(store, self._surroundings.size)
            heartbeats = read_heartbeats(store, self._announced & ranks)
        self._all_sync = self._all_sync or any(one.tells_that_all_sync() for one in heartbeats.values())
        absent = {rank for rank in ranks if rank not in heartbeats or not self._question.came(heartbeats[rank])}
        return heartbeats, absent

    def _described(
        self,
        ranks: set[int],
        first: dict[int, Heartbeat],
        last: dict[int, Heartbeat],
        due: dict[int, Heartbeat],
        only_kinds: tuple[str, ...] = (),
    ) -> tuple[MissingRank, ...]:
        """Filter ranks by kind (none given: all); give details for the first DETAILED only."""
        missing: list[MissingRank] = []
        for rank in sorted(ranks):
            heartbeat = last.get(rank)
            kind = self._kind(first.get(rank), heartbeat, last is due)
            if only_kinds and kind not in only_kinds:
                continue
            if heartbeat is None or len(missing) >= DETAILED:
                missing.append(MissingRank(rank, kind))
                continue
            # One that has come just now does not say any more where it was when the others gave up.
            then = due.get(rank) if self._question.came(heartbeat) else heartbeat
            says = then if kind in (LATE, ELSEWHERE) else None
            if kind == LATE and says is not None and not says.where:
                says = None  # up to a period old, and of a rank that had not been away then
            doing = (says.where, says.workers, says.collective, says.batch) if says is not None else ()
            silent = kind == SILENT and heartbeat.idle >= 0
            idle = heartbeat.idle + (time.monotonic() - self._began if silent else 0.0)
            place = (heartbeat.host, heartbeat.pid, heartbeat.calls)
            missing.append(MissingRank(rank, kind, *place, idle, *doing))
        return tuple(missing)

    def _kind(self, first: Heartbeat | None, last: Heartbeat | None, early: bool) -> str:
        """Of a missing rank, by its heartbeat when it was first looked at and now; early: too soon after to tell."""
        if last is None:
            return LATE if self._all_sync else UNANNOUNCED  # the former has no stall reports
        if last.phase == LEFT:
            return LEFT
        if first is not None and first.number == last.number and not early:
            return SILENT
        return LATE if early or self._question.came(last) else ELSEWHERE


class DirectQuery:
    """A question to the ranks themselves. Its thread writes `missing`: None before the first answer."""

    def __init__(
        self, surroundings: Surroundings, question: Question, introduction: Introduction, cancelled: threading.Event
    ) -> None:
        self.missing: tuple[MissingRank, ...] | None = None
        self.done = False
        self._question, self._token, self._cancelled = question, introduction.token, cancelled
        others = ((rank, peer) for rank, peer in introduction.peers.items() if rank != surroundings.rank)
        self._peers = {rank: peer for rank, peer in others if peer.address}
        unasked = sorted(set(range(surroundings.size)) - {surroundings.rank, *self._peers})
        self._unasked = f"{named(unasked)} cannot be asked" if unasked else ""
        self.unknown = self._unasked  # why `missing` may not be all
        surroundings.client.ask_in_thread(self._run)

    def _run(self) -> None:
        """Asks when it begins and, where that is before, when the report is due."""
        try:
            early = time.monotonic() < self._question.due_at
            self._ask()
            if early:
                self._cancelled.wait(self._question.due_at - time.monotonic())
                self._ask()
        except Exception as error:
            self.unknown = f"the ranks cannot be asked: {first_line(error)}"
        self.done = True

    def _ask(self) -> None:
        heartbeats = ask(self._peers, self._token, _DIRECT_PATIENCE_S, self._cancelled.is_set)
        if not self._cancelled.is_set():
            missing = tuple(self._described(heartbeats))
            self.unknown = self._unasked or ("" if missing else self._question.unsaid(heartbeats.values()))
            self.missing = missing

    def _described(self, heartbeats: dict[int, Heartbeat]) -> Iterator[MissingRank]:
        silent = self._peers.keys() - heartbeats.keys()
        absent = {rank for rank, heartbeat in heartbeats.items() if not self._question.came(heartbeat)}
        for rank in sorted(silent | (absent if self._question.key != END else set())):
            peer, heartbeat = self._peers[rank], heartbeats.get(rank)
            if heartbeat is None:
                yield MissingRank(rank, SILENT, peer.host, peer.pid)
            else:
                place = (heartbeat.host, heartbeat.pid, heartbeat.calls, heartbeat.idle)
                doing = (heartbeat.where, heartbeat.workers, heartbeat.collective, heartbeat.batch)
                yield MissingRank(rank, ELSEWHERE, *place, *doing)
