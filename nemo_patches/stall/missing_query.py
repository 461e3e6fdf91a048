"""Who is missing from a round: asked from the job's store by one rank for all, or from the ranks themselves.

One waiting rank asks the store for all: it reads every rank's heartbeat and leaves what it found for the others, so
that the traffic at the store grows with the number of ranks and not with its square. A heartbeat from before the round
is no evidence that its rank has not come, nor is one that stands still that its rank is silent: such ranks are asked
themselves. Where the store fails, each rank asks all of them. Each query runs in a short-lived thread.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ..channel import keys
from ..sync.protocol import APART
from .heartbeat import Heartbeat
from .missing_rank import DETAILED, MissingRank, described
from .occupation import PERHAPS
from .peers import ask
from .rank_text import ELSEWHERE, EVALUATED, LATE, LEFT, SILENT, UNANNOUNCED, first_line, named
from .store_client import AskedStore, StoreClient, announced_ranks, read_heartbeats
from .training_notes import LENGTH_SYNC, ROUNDS_OF
from .wire import Peer, decode_missing, encode_missing, encode_texts

PATIENCE_S = 2.6  # for a query that is not done when its report is due
END = "end"  # in place of an encoder's key: its group is gone, and so is some rank
PERIODS_TO_SEE = 1.75  # after so many periods, a heart that beats has been seen to
_LOOK_S = 0.2  # between two looks for what another rank is to find out
_DIRECT_PATIENCE_S = 1.2  # for a rank to answer: one whose heart beats looks four times a second
_ASKED_BEFORE_S = _DIRECT_PATIENCE_S + 0.2  # a report is due, the ranks that have not come are asked themselves


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
    may_be_uneven: Callable[[], bool] = lambda: False  # whether the user allows ranks fewer batches of an evaluation

    def ask_themselves(self, ranks: Iterable[int], cancelled: threading.Event) -> dict[int, Heartbeat | None]:
        """The present heartbeats of those of these ranks that have a port; None: asked in vain."""
        introduction = self.introduction()
        peers = {rank: peer for rank in ranks if (peer := introduction.peers.get(rank)) is not None and peer.address}
        try:
            heard = ask(peers, introduction.token, _DIRECT_PATIENCE_S, cancelled.is_set) if peers else {}
        except OSError:  # this process has no files left: nobody is asked
            return {}
        return {} if cancelled.is_set() else {rank: heard.get(rank) for rank in peers}


@dataclass(frozen=True)
class Question:
    """Who is missing from this round of this encoder; with END for its key: who has gone.

    left: with END, the rank that has told the others that it leaves; -1: none.

    due_at: time.monotonic() at which a rank that has not come is missing. repeat: how often it was asked before.
    incident: for people, in the line of a rank that was waited for. call: the encoder's title, and the clock before the
    call, as a heartbeat has them; None: not known. evaluation: the encoder's title and its training calls so far, where
    the round is an evaluation's of which ranks may have fewer batches; else None.
    """

    key: str
    round_number: int
    due_at: float
    repeat: int
    incident: str
    left: int = -1
    call: tuple[str, tuple[int, int]] | None = None
    evaluation: tuple[str, int] | None = None

    def came(self, heartbeat: Heartbeat) -> bool:
        """Also where it does not say: nobody is missing for calling more encoders than a heartbeat holds.

        After a wait in vain a call may issue no round. Whose rank has made that call, and waits in a collective itself,
        has come to it: it may well wait for this rank.
        """
        made = self.call is not None and heartbeat.encoder == self.call[0] and heartbeat.clock >= self.call[1]
        return heartbeat.has_come(self.key, self.round_number) is not False or (made and bool(heartbeat.collective))

    def kind_of(self, heartbeat: Heartbeat) -> str:
        """Of a rank that has not come, by what it says of itself since the round was issued."""
        if (apart := heartbeat.apart.get(self.key, "")) in APART:
            return apart
        return EVALUATED if self._has_ended_evaluation(heartbeat) else ELSEWHERE

    def _has_ended_evaluation(self, heartbeat: Heartbeat) -> bool:
        """Whether its last call was of the same evaluation, and it waits for the others in a collective after that."""
        if heartbeat.training or (heartbeat.encoder, *heartbeat.clock[:1]) != self.evaluation:
            return False
        own_rounds = heartbeat.collective.startswith((LENGTH_SYNC, ROUNDS_OF))
        return bool(heartbeat.collective) and not own_rounds and not heartbeat.collective.startswith(PERHAPS)

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

    @property
    def is_allowed(self) -> bool:
        """Whether all that are missing have ended an evaluation, of which the user allows them fewer batches."""
        return bool(self.missing) and not self.unknown and all(rank.kind == EVALUATED for rank in self.missing)

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
        partly = store.partly
        return Answer(partly.missing, trouble or partly.unknown or ("" if partly.missing else "it was not known yet"))

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
        self.partly = Answer()
        self._surroundings, self._question, self._cancelled = surroundings, question, cancelled
        self._began = time.monotonic()
        self._store = AskedStore(surroundings.client)
        self._announced, self._all_sync = set[int](), question.round_number > 1
        self._first: dict[int, int] = {}  # the number of each rank's heartbeat in the store when it was looked at first
        self._still: set[int] = set()  # ranks whose heartbeat in the store is that one still
        self._latest: dict[int, Heartbeat] = {}  # of each rank, from the store or from itself
        self._replied: dict[int, bool] = {}  # ranks that were asked themselves, when they were asked last
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
            is_old = not is_first and store.check([f"{topic}/missing"])  # found out before this rank came to the round
        if is_old:
            return
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
                if rank.kind != EVALUATED:
                    texts = encode_texts({"id": topic, "incident": self._question.incident, "where": rank.where})
                    store.set(keys.WAITED_FOR.format(rank=rank.rank), texts.decode())

    def _find_out(self) -> Answer:
        """Looks when it begins, when the report is due, and when a heart that beats must have been seen to."""
        began, is_end = time.monotonic(), self._question.key == END
        others = set(range(self._surroundings.size)) - {self._surroundings.rank}
        self._look(others)
        if not is_end:
            self._cancelled.wait(
                self._question.due_at - _ASKED_BEFORE_S - time.monotonic()
            )  # who waits has little time
            self._look(self._absent(others))
            self._ask_themselves(self._absent(others))
        self._cancelled.wait(self._question.due_at - time.monotonic())
        absent = set() if is_end else self._absent(others)
        self._look(absent)
        self.partly = self._described(self._absent(absent), {}, began)  # while those that have not come are asked
        nothing_new = {
            rank for rank in self._absent(absent) & self._latest.keys() if not self._is_new(self._latest[rank])
        }
        self._ask_themselves(nothing_new - self._asked_in_vain())
        absent, due = self._absent(absent), dict(self._latest)
        self.partly = self._described(absent, due, began)
        self._cancelled.wait(began + PERIODS_TO_SEE * self._surroundings.period_s - time.monotonic())
        looked_at = absent or others
        self._look(looked_at)
        self._ask_themselves((looked_at & self._still) - self._asked_in_vain())
        if not absent:
            # Where all have come, and the round has not, some rank has died or was stopped since it came.
            gone = self._described(others, due, began, (SILENT, LEFT)).missing
            return Answer(gone, "" if gone else self._question.unsaid(self._latest.values()))
        # Heartbeats lag by one period: blame a rank seen just now only if no other suspect remains.
        return self._described(self._absent(absent) or absent, due, began)

    def _absent(self, ranks: set[int]) -> set[int]:
        """Those that have not come to the round, as far as is known."""
        latest = self._latest
        return {rank for rank in ranks if rank not in latest or not self._question.came(latest[rank])}

    def _look(self, ranks: set[int]) -> None:
        """At the heartbeats of these ranks in the store."""
        if not ranks or self._cancelled.is_set():
            return
        with self._store.asking() as store:
            if ranks - self._announced:
                self._announced |= announced_ranks(store, self._surroundings.size)
            heartbeats = read_heartbeats(store, self._announced & ranks)
        self._all_sync = self._all_sync or any(one.tells_that_all_sync() for one in heartbeats.values())
        for rank, heartbeat in heartbeats.items():
            if self._first.setdefault(rank, heartbeat.number) == heartbeat.number:
                self._still.add(rank)
            else:
                self._still.discard(rank)
        self._take(heartbeats)

    def _asked_in_vain(self) -> set[int]:
        """Ranks that have shown no sign of life since they were asked themselves."""
        return {rank for rank in self._still if self._replied.get(rank) is False}

    def _ask_themselves(self, ranks: set[int]) -> None:
        if ranks and not self._cancelled.is_set():
            asked = self._surroundings.ask_themselves(ranks, self._cancelled)
            self._replied |= {rank: heartbeat is not None for rank, heartbeat in asked.items()}
            self._take({rank: heartbeat for rank, heartbeat in asked.items() if heartbeat is not None})

    def _take(self, heartbeats: Mapping[int, Heartbeat]) -> None:
        for rank, heartbeat in heartbeats.items():
            if rank not in self._latest or heartbeat.number > self._latest[rank].number:
                self._latest[rank] = heartbeat

    def _described(
        self, ranks: set[int], due: Mapping[int, Heartbeat], began: float, only_kinds: tuple[str, ...] = ()
    ) -> Answer:
        """These ranks as missing, as far as that is known. due: the heartbeats when the report was due, or none yet.

        Filter ranks by kind (none given: all); give details for the first DETAILED only.
        """
        missing: list[MissingRank] = []
        unknown: list[int] = []
        for rank in sorted(ranks):
            heartbeat = self._latest.get(rank)
            kind = self._kind(rank, heartbeat, began)
            # One that has come just now does not say any more where it was when the others gave up.
            then = due.get(rank, heartbeat) if heartbeat is None or self._question.came(heartbeat) else heartbeat
            if only_kinds and kind not in only_kinds:
                continue
            if heartbeat is None or then is None:
                missing.append(MissingRank(rank, kind))
                continue
            is_new = self._is_new(then) and not self._question.came(then)
            if kind == LATE and not is_new and self._surroundings.size > 2:  # of two it is the other one
                unknown += [] if self._question.came(heartbeat) else [rank]
                continue
            if len(missing) >= DETAILED:
                missing.append(MissingRank(rank, kind))
                continue
            says = then if is_new and kind not in (SILENT, LEFT) else None
            if kind == LATE and says is not None and not says.where:
                says = None  # of a rank that had not been away then
            doing = (says.where, says.workers, says.collective, says.batch) if says is not None else ()
            silent = kind == SILENT and heartbeat.idle >= 0
            idle = heartbeat.idle + (time.monotonic() - self._began if silent else 0.0)
            place = (heartbeat.host, heartbeat.pid, heartbeat.calls)
            missing.append(MissingRank(rank, kind, *place, idle, *doing))
        return Answer(tuple(missing), f"of {named(unknown)} nothing is known since this call began" if unknown else "")

    def _kind(self, rank: int, heartbeat: Heartbeat | None, began: float) -> str:
        """Of a missing rank, by its latest heartbeat."""
        if heartbeat is None:
            return LATE if self._all_sync else UNANNOUNCED  # the former has no stall reports
        if heartbeat.phase == LEFT:
            return LEFT
        if self._is_silent(rank, began):
            return SILENT
        if self._question.came(heartbeat) or not self._is_new(heartbeat):
            return LATE
        return self._question.kind_of(heartbeat)

    def _is_new(self, heartbeat: Heartbeat) -> bool:
        """Whether it was made since the question began, and so since this rank came to the round."""
        return heartbeat.number > self._first.get(heartbeat.rank, heartbeat.number)

    def _is_silent(self, rank: int, began: float) -> bool:
        """Whether its heart stands still, long enough to be seen, and it does not answer itself, if it has a port."""
        has_port = any(peer.address for peer in [self._surroundings.introduction().peers.get(rank)] if peer is not None)
        seen_long = time.monotonic() - began >= PERIODS_TO_SEE * self._surroundings.period_s
        return rank in self._still and seen_long and not self._replied.get(rank, has_port)


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
                yield MissingRank(rank, self._question.kind_of(heartbeat), *place, *doing)
