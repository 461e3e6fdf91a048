"""Asks where every rank is, over the exchange, and answers the others' questions."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..channel.answers import LOST, Answers, Silence
from ..channel.exchange import Exchange
from ..channel.meeting import Member
from ..facts import RankFacts

if TYPE_CHECKING:
    from ..judging.found import Found

_LIMIT_S = 5.0  # a look takes no longer
_LIMIT_PER_RANK_S = 0.002
_QUESTIONS_KEPT = 32


@dataclass(frozen=True)
class Heard:
    """What a question has found, not judged yet.

    members: each rank's host and process. trouble: why this rank is not connected to the others.
    """

    answers: Answers
    size: int
    members: Sequence[Member | None] = ()
    trouble: str = ""

    @property
    def says_that_ranks_waited(self) -> bool:
        """Whether some rank has given up a round."""
        states = (group.state for group in self.answers.groups.values())
        return any(
            isinstance(state, dict) and state.get("given_up") for state in states
        )

    def found(self) -> Found:
        """After LateModules.run()."""
        from ..judging.found import found_of

        return found_of(self.answers, self.size, self.members, self.trouble)


@dataclass(eq=False)
class Look:
    """One request for all ranks' places. Only the stall monitor's thread uses it."""

    began: float
    ends_at: float
    heard: Heard
    is_done: bool = False

    @property
    def found(self) -> Found:
        """After LateModules.run()."""
        return self.heard.found()


class Looks:
    """The stall monitor's thread writes the fields; the exchange's thread calls `asked`, `judge`
    and `told`.
    """

    def __init__(
        self,
        exchange: Exchange,
        make_state: Callable[[], RankFacts],
        wake: Callable[[], None],
        heard: Callable[[Heard], None],
    ) -> None:
        """heard: gets what every question has found, including those that other ranks asked."""
        self._exchange = exchange
        self._make_state = make_state
        self._wake = wake
        self._heard = heard
        self._replies = queue.SimpleQueue[
            tuple[str, Callable[[str, Any, float], None]]
        ]()
        self._verdicts = queue.SimpleQueue[tuple[str, Any]]()
        self._asked_at = deque[tuple[str, float]](maxlen=_QUESTIONS_KEPT)
        self._looks: list[Look] = []  # unfinished ones
        self._lost_at: dict[int, float] = {}  # by rank
        self._limit_s = _LIMIT_S + exchange.size * _LIMIT_PER_RANK_S

    # The exchange's thread.

    def asked(self, id_: str, reply: Callable[[str, Any, float], None]) -> None:
        self._replies.put((id_, reply))
        self._wake()

    def judge(self, found: dict[str, Any], reply: Callable[[Any], None]) -> None:
        """Each rank judges for itself, from the same answers."""
        reply(found)

    def told(self, id_: str, verdict: Any) -> None:
        self._verdicts.put((id_, verdict))
        self._wake()

    # The stall monitor's.

    @property
    def is_busy(self) -> bool:
        """Whether a look is under way."""
        return bool(self._looks)

    def ranks_here(self) -> frozenset[int] | None:
        """The processes of this host's other ranks; None: not all are known."""
        members = list(self._exchange.members)
        own = members[self._exchange.rank]
        here = frozenset(
            member.pid
            for member in members
            if member is not None and own is not None and member.host == own.host
        )
        return here - {os.getpid()} if None not in members else None

    def begin(self) -> Look:
        """Begin a look."""
        now = time.monotonic()
        look = Look(now, now + self._limit_s, self._heard_of(Answers()))
        if self._exchange.is_closed:
            look.is_done = True
            return look
        self._looks.append(look)
        self._exchange.ask()
        return look

    def cancel(self) -> None:
        """Drop all looks: nobody waits for their results."""
        self._looks = []

    def tick(self, now: float) -> None:
        """Answer questions, and take the results that have come."""
        self._answer(now)
        while not self._verdicts.empty():
            self._take(*self._verdicts.get())
        for look in self._looks:
            look.is_done = look.is_done or now >= look.ends_at
        self._looks = [look for look in self._looks if not look.is_done]

    def _answer(self, now: float) -> None:
        """All that were asked until now get one answer, which is newer than each question."""
        replies = []
        while not self._replies.empty():
            replies.append(self._replies.get())
        if not replies:
            return
        state = self._make_state()
        for id_, reply in replies:
            self._asked_at.append((id_, now))
            reply(state.key(), state.to_json(), state.still)

    def _take(self, id_: str, verdict: Any) -> None:
        answers = Answers()
        try:
            answers.add_json(verdict.get("not judged", verdict))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            return  # no rank of this format sends it
        self._keep_since_when(answers)
        heard = self._heard_of(answers)
        asked_at = dict(self._asked_at).get(id_, 0.0)
        is_old = False
        for look in self._looks:
            if asked_at >= look.began:
                look.heard = heard
                look.is_done = True
            else:
                is_old = True
        self._heard(heard)
        if is_old:  # its answers may be older than the look
            self._exchange.ask()

    def _keep_since_when(self, answers: Answers) -> None:
        """A connection is lost anew whenever it could not be made, and each rank that is asked has
        its own: the first time counts, until the rank is heard.
        """
        now = time.monotonic()
        for rank in self._lost_at.keys() & answers.heard:
            del self._lost_at[rank]
        for rank, silence in list(answers.silent.items()):
            if silence.how == LOST:
                since = now - silence.seconds if silence.seconds >= 0 else math.inf
                since = min(self._lost_at.get(rank, math.inf), since)
                if since < math.inf:
                    self._lost_at[rank] = since
                    answers.silent[rank] = Silence(LOST, now - since)

    def _heard_of(self, answers: Answers) -> Heard:
        exchange = self._exchange
        if exchange.rank not in answers.heard:
            state = self._make_state()
            answers.add(state.key(), {exchange.rank}, state.to_json(), state.still)
        return Heard(answers, exchange.size, tuple(exchange.members), exchange.trouble)
