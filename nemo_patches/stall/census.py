"""A census: where every rank of the job is. One rank asks the store for all; where it fails, each asks the ranks."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..channel import keys
from .heartbeat import Heartbeat
from .missing_query import PERIODS_TO_SEE, Introduction, Surroundings
from .peers import ask
from .rank_groups import RankGroup, grouped
from .rank_text import first_line
from .store_client import AskedStore, announced_ranks, read_heartbeats
from .wire import Peer, decode_groups, encode_groups

_LOOK_S, _LOOK_PER_RANK_S = 0.2, 0.001  # between two looks for what another rank finds out
_LONGEST_LOOK_S = 10.0  # a rank on a file store beats too seldom to be seen to
_MAKER_PATIENCE_S = 2.2  # for the rank that takes the census, once it must have looked: it asks the silent ones
_DIRECT_PATIENCE_S = 1.5
_HELD_UP_S = 2.0  # so much later than asked, a thread has been held up: stopped, or without Python's lock


class Counted(NamedTuple):
    """What a census has found. trouble: why the ranks themselves were asked; taken_here: by this rank, and no other."""

    groups: tuple[RankGroup, ...]
    taken_here: bool
    trouble: str = ""


class CensusQuestion(NamedTuple):
    """due_at: time.monotonic() from which the ranks' places count. calling_within_s: as of rank_groups.grouped."""

    surroundings: Surroundings
    own: Callable[[], Heartbeat]  # makes this rank's heartbeat
    due_at: float
    calling_within_s: float

    def grouped(self, heartbeats: Mapping[int, Heartbeat], silent: set[int]) -> tuple[RankGroup, ...]:
        rank, size = self.surroundings.rank, self.surroundings.size
        return grouped(size, {**heartbeats, rank: self.own()}, silent - {rank}, self.calling_within_s)


class Census:
    """Begun before it is due: only who is looked at twice is seen to have no heartbeat."""

    def __init__(self, question: CensusQuestion) -> None:
        self.began = time.monotonic()
        self._question, self._cancelled = question, threading.Event()
        self._of_store = StoreCensus(question, self._cancelled)
        self._of_ranks: DirectCensus | None = None

    @property
    def counted(self) -> Counted | None:
        """None until it is known."""
        return self._of_store.counted or (self._of_ranks.counted if self._of_ranks is not None else None)

    def look_after_the_store(self) -> None:
        """Called again and again, by the stall monitor: where the store fails, ask the ranks themselves."""
        trouble = "" if self._of_ranks is not None else self._of_store.trouble()
        introduction = self._question.surroundings.introduction()
        if trouble and introduction.peers:
            self._of_ranks = DirectCensus(self._question, introduction, trouble, self._cancelled)

    def trouble(self) -> str:
        """With the store, and why the ranks are not asked; empty where the store answers."""
        trouble = self._of_store.trouble()
        unasked = self._of_ranks.error if self._of_ranks is not None else ""
        problem = unasked or self._question.surroundings.introduction().problem
        return f"{trouble}; the ranks themselves are not asked: {problem}" if trouble and problem else trouble

    def cancel(self) -> None:
        self._cancelled.set()


class StoreCensus:
    """Of the job's store. Its thread writes `counted`."""

    def __init__(self, question: CensusQuestion, cancelled: threading.Event) -> None:
        self.counted: Counted | None = None
        self._question, self._surroundings, self._cancelled = question, question.surroundings, cancelled
        self._store = AskedStore(self._surroundings.client)
        self._pause_s = max(_LOOK_S, self._surroundings.size * _LOOK_PER_RANK_S)  # between looks for others' results
        self._look_s = min(PERIODS_TO_SEE * self._surroundings.period_s, _LONGEST_LOOK_S)
        self._surroundings.client.ask_in_thread(self._run)

    def trouble(self) -> str:
        return "" if self.counted is not None else self._store.trouble()

    def _run(self) -> None:
        attempt, began = 0, time.monotonic()
        try:
            with self._store.asking() as store:
                number = int(store.add(keys.CENSUS_NUMBER, 0)) + 1
            while self.counted is None and not self._cancelled.is_set():
                attempt += 1
                topic = keys.CENSUS.format(number=number, attempt=attempt)
                with self._store.asking() as store:
                    is_first = store.add(f"{topic}/asked", 1) == 1
                if is_first:
                    self._take(topic, number)
                else:
                    self._await(topic, began)
        except Exception as error:
            self._store.error = first_line(error)

    def _take(self, topic: str, number: int) -> None:
        """For all that have begun one since the last."""
        is_over = False
        while not is_over:  # a process that was stopped meanwhile has seen nobody's heart
            began, first = time.monotonic(), self._look()
            ends_at = max(self._question.due_at, began + self._look_s)
            self._cancelled.wait(ends_at - time.monotonic())
            is_over = self._cancelled.is_set() or time.monotonic() < ends_at + _HELD_UP_S
        last = {} if self._cancelled.is_set() else self._look()
        seen_long = time.monotonic() - began >= PERIODS_TO_SEE * self._surroundings.period_s
        silent = {rank for rank, heart in last.items() if rank in first and first[rank].number == heart.number}
        asked = self._surroundings.ask_themselves(silent if seen_long else set(), self._cancelled)
        last |= {rank: heartbeat for rank, heartbeat in asked.items() if heartbeat is not None}
        silent = {rank for rank in silent if seen_long and asked.get(rank) is None}
        groups = self._question.grouped(last, silent)
        with self._store.asking() as store:  # the number first: nobody may take these groups for a later census's
            if (behind := number - int(store.add(keys.CENSUS_NUMBER, 0))) > 0:  # else others have taken it meanwhile
                store.add(keys.CENSUS_NUMBER, behind)
            if not self._cancelled.is_set():
                store.set(f"{topic}/groups", encode_groups(groups).decode())
        if not self._cancelled.wait(2 * self._pause_s):  # the others first: stall_exit may end this rank, and the store
            self.counted = Counted(groups, taken_here=True)

    def _await(self, topic: str, began: float) -> None:
        """What another rank finds out: some time after it is due, that rank is taken for gone."""
        known_at = max(self._question.due_at, began + self._look_s)
        gone_at = known_at + _MAKER_PATIENCE_S
        while self.counted is None and not self._cancelled.is_set() and time.monotonic() < gone_at:
            self._cancelled.wait(max(self._pause_s, self._question.due_at - time.monotonic()))
            with self._store.asking() as store:
                data = store.get(f"{topic}/groups") if store.check([f"{topic}/groups"]) else b""
            if groups := decode_groups(data, self._surroundings.size):
                self.counted = Counted(groups, taken_here=False)

    def _look(self) -> dict[int, Heartbeat]:
        with self._store.asking() as store:
            return read_heartbeats(store, announced_ranks(store, self._surroundings.size))


class DirectCensus:
    """Of the ranks themselves. Its thread writes `counted`."""

    def __init__(
        self, question: CensusQuestion, introduction: Introduction, trouble: str, cancelled: threading.Event
    ) -> None:
        self.counted: Counted | None = None
        self.error = ""  # why it never will be
        self._question, self._trouble, self._token, self._cancelled = question, trouble, introduction.token, cancelled
        own = question.surroundings.rank
        self._peers = {rank: peer for rank, peer in introduction.peers.items() if peer.address and rank != own}
        question.surroundings.client.ask_in_thread(self._run)

    def _run(self) -> None:
        self._cancelled.wait(self._question.due_at - time.monotonic())
        try:
            self._ask()
        except Exception as error:
            self.error = first_line(error)

    def _ask(self) -> None:
        answers = ask(self._peers, self._token, _DIRECT_PATIENCE_S, self._cancelled.is_set)
        silent = self._peers.keys() - answers.keys()
        unheard = {rank: _unheard(rank, self._peers[rank]) for rank in silent}
        is_first = all(self._question.surroundings.rank < rank for rank in answers)
        self.counted = Counted(self._question.grouped({**answers, **unheard}, silent), is_first, self._trouble)


def _unheard(rank: int, peer: Peer) -> Heartbeat:
    return Heartbeat(rank, 0, peer.host, peer.pid, "", "", "", "", 0, (), -1.0, {})
