"""Questions: where is every rank? Any rank may ask, one judges, and all are told.

Nothing is sent while nobody asks.

A rank that wants to know asks its parent, which says at once that it is there, and asks its own.
Rank 0 judges. It asks the ranks below it, they ask those below them, and each answers for all that
it has asked. If a rank does not say at once that it is there, the ranks below it are asked
directly: it hides nobody. A rank whose parent is silent asks the grandparent; where rank 0 is
silent, the next in succession judges.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import math
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ..limits import (
    ANSWERS_PER_RANK_S,
    ANSWERS_S,
    HERE_PER_RANK_S,
    HERE_S,
    OWN_STATE_S,
    VERDICT_S,
)
from .answers import (
    HELD_UP,
    NO_WATCH,
    NOT_HEARD,
    NOT_THROUGH,
    Answers,
    Silence,
    ranks_of,
    runs_of,
    state_of,
    text_of,
)
from .link import ANSWER, ASK, HERE, QUESTION, VERDICT, Link, Message

# Of ANSWERS_S, each level of the tree has so much less than that above it.
_LEVEL_S = 0.1
# Between two questions of a judge: ranks that ask meanwhile share the next one.
_GAP_S = 0.3


@dataclass
class Question:
    """A question at this rank. origin: the connection for the answer; None: this rank judges."""

    id: str
    origin: Link | None
    ends_at: float
    is_alone: bool  # asked for this rank only
    # Ranks that have not answered, and until when each is to say that it is there.
    pending: dict[int, float] = field(default_factory=dict)
    # Ranks that get the verdict, and the connection over which each was asked.
    asked: dict[int, Link] = field(default_factory=dict)
    passed_over: set[int] = field(default_factory=set)  # those below them are asked too
    found: Answers = field(default_factory=Answers)
    is_done: bool = False  # answered, or given to the judge


class Questions:
    """This rank's part in all questions. Only the exchange's thread uses it."""

    def __init__(self, owner: Any) -> None:
        """owner: the Exchange, which imports this module."""
        self._owner = owner
        self._open: list[Question] = []
        self._told: deque[str] = deque(maxlen=16)  # the questions of the last verdicts
        self._wants = False  # this rank, or one that has asked it, waits for a verdict
        self._asks = -1  # the rank that it has asked
        self._asks_until = math.inf
        self._suspects: set[int] = set()  # ranks that have not answered lately
        self._next_at = 0.0
        self._here_s = HERE_S + owner.size * HERE_PER_RANK_S
        self._limit_s = ANSWERS_S + owner.size * ANSWERS_PER_RANK_S

    def want(self) -> None:
        """Ask, unless a question is under way."""
        self._wants = True
        if self._asks < 0 and not self._open:
            self._ask_next(time.monotonic())

    def tick(self) -> float:
        """Do what is due; return when to look again."""
        if not self._open and self._asks_until == math.inf:
            return math.inf
        now = time.monotonic()
        if now >= self._asks_until:
            self._asks_until = math.inf
            if self._asks >= 0:
                self._suspects.add(self._asks)
            self._asks = -1
            if self._wants and not self._open:
                self._ask_next(now)
        for question in list(self._open):
            self._look(question, now)
        due = [self._asks_until]
        for question in self._open:
            due.append(question.ends_at)
            due.extend(question.pending.values())
        return min(due)

    def heard(self, link: Link, message: Message) -> None:
        """Raises ValueError, TypeError or KeyError if no rank of this format sends it."""
        now = time.monotonic()
        self._suspects.discard(link.rank)
        content = message.content()
        id_ = text_of(content["id"])
        if message.kind == ASK:
            link.tell(HERE, {"id": ""})
            self._suspects |= ranks_of(content["without"]) - {self._owner.rank}
            self.want()
        elif message.kind == HERE and id_:
            for question in self._of(id_, link.rank):
                question.pending[link.rank] = math.inf
        elif message.kind == HERE and link.rank == self._asks:
            # It may have to find out which ranks are silent.
            self._asks_until = now + 3 * self._here_s
        elif message.kind == QUESTION:
            link.tell(HERE, {"id": id_})
            if id_ in self._told:  # this rank was silent, and the verdict says so
                return
            limit_s = min(float(content["limit_s"]), 60.0)
            self._begin(Question(id_, link, now + limit_s, bool(content["alone"])), now)
        elif message.kind == ANSWER:
            for question in self._of(id_, link.rank):
                del question.pending[link.rank]
                question.found.add_json(content)
                self._look(question, now)
        elif message.kind == VERDICT:
            self._publish(id_, content)

    def lost(self, link: Link) -> None:
        """A connection has ended. If it had been made, another one shows if the rank lives."""
        now = time.monotonic()
        if link.rank == self._asks:
            self._asks_until = now
        for question in self._open:
            if link.rank in question.pending and question.asked.get(link.rank) is link:
                del question.pending[link.rank]
                if link.is_ready:
                    self._ask(question, link.rank, now)
                else:
                    self._cannot_ask(question, link.rank, now, link)

    def _of(self, id_: str, rank: int) -> list[Question]:
        return [
            one
            for one in self._open
            if one.id == id_ and rank in one.pending and not one.is_done
        ]

    def _ask_next(self, now: float) -> None:
        """Ask the first of those who can be asked; judge, where that is this rank."""
        for rank in self._owner.ranks_to_ask:
            if rank == self._owner.rank:
                break
            if rank in self._suspects:
                continue
            link = self._owner.link_to(rank)
            if link is not None:
                link.tell(ASK, {"id": "", "without": runs_of(self._suspects)})
                link.is_suspect = True  # until something comes
                self._asks = rank
                self._asks_until = now + self._here_s
                return
            self._suspects.add(rank)
        if now < self._next_at:
            self._asks_until = self._next_at
            return
        id_ = f"{self._owner.rank} {os.urandom(8).hex()}"
        self._begin(Question(id_, None, now + self._limit_s, is_alone=False), now)

    def _begin(self, question: Question, now: float) -> None:
        self._open.append(question)
        self._asks = -1
        self._asks_until = math.inf
        own = self._owner.rank
        watch = self._owner.watch
        if watch is None:
            question.found.add_silent([own], Silence(NO_WATCH))
        else:
            question.pending[own] = now + OWN_STATE_S
            reply = functools.partial(self._owner.post_question, self._reply, question)
            watch.asked(question.id, reply)
        if question.origin is None:
            self._next_at = question.ends_at + _GAP_S
            self._ask(question, 0, now)
        elif not question.is_alone:
            self._ask_below(question, own, now)
        self._look(question, now)

    def _reply(self, question: Question, key: str, state: Any, still: float) -> None:
        """This rank's own state."""
        if not question.is_done:
            question.pending.pop(self._owner.rank, None)
            question.found.add(text_of(key), {self._owner.rank}, state_of(state), still)
            self._look(question, time.monotonic())

    def _ask(self, question: Question, rank: int, now: float) -> None:
        if rank == self._owner.rank:
            self._ask_below(question, rank, now)
            return
        link = self._owner.link_to(rank)
        if link is None:
            self._cannot_ask(question, rank, now)
            return
        is_suspect = rank in self._suspects
        limit_s = round(question.ends_at - now - _LEVEL_S, 3)
        link.tell(
            QUESTION, {"id": question.id, "limit_s": limit_s, "alone": is_suspect}
        )
        question.asked[rank] = link
        question.pending[rank] = now + self._here_s
        if is_suspect:  # at the same time: this costs no time where it still is silent
            self._ask_below(question, rank, now)

    def _cannot_ask(
        self, question: Question, rank: int, now: float, link: Link | None = None
    ) -> None:
        silence = self._owner.why_unreachable(rank) or self._owner.silence_of(
            rank, link
        )
        question.found.add_silent([rank], silence)
        self._ask_below(question, rank, now)

    def _ask_below(self, question: Question, rank: int, now: float) -> None:
        if rank in question.passed_over:
            return
        question.passed_over.add(rank)
        for child in self._owner.children_of(rank):
            self._ask(question, child, now)

    def _look(self, question: Question, now: float) -> None:
        """Whether the answer is complete, or somebody does not answer."""
        if question.is_done:
            if now >= question.ends_at:  # its verdict does not come
                if question.origin is None:
                    self._judged(question, {"not judged": question.found.to_json()})
                else:
                    self._open.remove(question)
                if self._wants and not self._open:
                    self._ask_next(now)
            return
        is_late = now >= question.ends_at
        for rank, until in list(question.pending.items()):
            if now < until and not is_late:
                continue
            if rank != self._owner.rank and question.asked[rank].has_unread:
                continue  # the next step reads it
            del question.pending[rank]
            if rank == self._owner.rank:
                question.found.add_silent([rank], Silence(HELD_UP))
                continue
            link = question.asked[rank]
            link.is_suspect = True
            if until == math.inf:  # it has said that it is there
                silence = Silence(NOT_THROUGH)
            else:
                silence = self._owner.silence_of(rank, link)
            question.found.add_silent([rank], silence)
            if not is_late:
                self._suspects.add(rank)
                self._ask_below(question, rank, now)
        if not question.pending:
            self._conclude(question, now)

    def _conclude(self, question: Question, now: float) -> None:
        question.is_done = True
        if question.origin is not None:
            # The verdict may take so long, and is to be passed on.
            question.ends_at = now + self._limit_s + 2 * VERDICT_S
            self._tell(
                question.origin, ANSWER, {"id": question.id, **question.found.to_json()}
            )
            return
        question.ends_at = now + VERDICT_S
        self._next_at = now + _GAP_S
        for rank in range(self._owner.size):
            question.found.add_silent(
                [rank], self._owner.why_unreachable(rank) or Silence(NOT_HEARD)
            )
        watch = self._owner.watch
        if watch is None:
            self._judged(question, {"not judged": question.found.to_json()})
            return
        reply = functools.partial(self._owner.post_question, self._judged, question)
        watch.judge(question.found.to_json(), reply)

    def _judged(self, question: Question, verdict: Any) -> None:
        self._publish(question.id, {"id": question.id, "verdict": verdict})

    def _publish(self, id_: str, content: dict[str, Any]) -> None:
        """To all that this rank has asked, also those that were silent."""
        for question in [one for one in self._open if one.id == id_]:
            self._open.remove(question)
            for link in question.asked.values():
                self._tell(link, VERDICT, content)
        if id_ in self._told:
            return
        self._told.append(id_)
        self._wants = False
        self._suspects.clear()
        watch = self._owner.watch
        if watch is not None:
            watch.told(id_, content.get("verdict"))

    def _tell(self, link: Link, kind: int, content: dict[str, Any]) -> None:
        """Over this connection, or over another one if it is lost."""
        other = self._owner.link_to(link.rank) if link.is_lost else link
        if other is not None:
            other.tell(kind, content)
