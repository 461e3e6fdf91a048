"""Asks for a verdict on all ranks, over the exchange.

Answers the others' questions, and judges where that is this rank's to do.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..channel.answers import (
    ENDED,
    LEFT,
    NO_WATCH,
    NOT_HEARD,
    OTHERS,
    Answers,
    RanksAlike,
    Silence,
    silent_by,
)
from ..channel.exchange import Exchange
from ..facts import RankFacts
from ..limits import LOOK_S, REPORT_PER_RANK_S
from ..text import named, safe
from .late_modules import LateModules

if TYPE_CHECKING:
    from ..judging.judgement import Judge, Judgement

_QUESTIONS_KEPT = 32
_MOST_DIFFERENCES = 8  # of each kind
_LONGEST_DIFFERENCE = 8192  # characters


@dataclass(frozen=True)
class Told:
    """What a question has found, for all ranks. silent: of which ranks nothing is heard.

    differences: between the ranks; None: not all have called an encoder yet. judgement: None where
    no rank asked for one.
    """

    silent: Mapping[int, Silence]
    differences: tuple[str, ...] | None
    judgement: Judgement | None


@dataclass(eq=False)
class Look:
    """One request for a verdict. told: None until it has come. Only the stall monitor's thread uses
    it.
    """

    ends_at: float
    began: float = field(default_factory=time.monotonic)
    told: Told | None = None
    is_done: bool = False


class Looks:
    """The stall monitor's thread writes the fields; the exchange's thread calls `asked`, `judge`
    and `told`.
    """

    def __init__(
        self,
        exchange: Exchange,
        late: LateModules,
        own_facts: Callable[[], RankFacts],
        wake: Callable[[], object],
        heard: Callable[[Told, RankFacts], object],
    ) -> None:
        """heard: gets what every question has found that this rank was asked, too, and what it had
        said of itself.
        """
        self._exchange = exchange
        self._late = late
        self._own_facts = own_facts
        self._wake = wake
        self._heard = heard
        self._inbox = queue.SimpleQueue[Callable[[], object]]()
        self._answered = deque[tuple[str, float, RankFacts]](maxlen=_QUESTIONS_KEPT)
        self._looks: list[Look] = []  # unfinished ones
        self._judge: Judge | None = None
        self.latest: Told | None = None  # that knows of this rank
        self._limit_s = LOOK_S + exchange.size * REPORT_PER_RANK_S

    # The exchange's thread, which is not to wait.

    def asked(self, id_: str, reply: Callable[[str, Any, float], None]) -> None:
        """Reply to a question: the key of equal states, this one as JSON data, and for how many
        seconds this rank has stood still (-1: not known).
        """
        self._have(lambda: self._answer(id_, reply))

    def judge(self, found: dict[str, Any], reply: Callable[[Any], None]) -> None:
        """Reply with the verdict as JSON data."""
        self._have(lambda: reply(self._judged(found)))

    def told(self, id_: str, verdict: Any) -> None:
        """The verdict on a question; another rank may have asked it."""
        self._have(lambda: self._take(id_, verdict))

    def _have(self, call: Callable[[], object]) -> None:
        self._inbox.put(call)
        self._wake()

    # The stall monitor's.

    @property
    def is_busy(self) -> bool:
        """Whether a look is under way."""
        return bool(self._looks)

    def ranks_here(self) -> frozenset[int] | None:
        """The processes of this host's other ranks; None: not all are known."""
        members = list(filter(None, self._exchange.members))
        if len(members) < self._exchange.size:
            return None
        host = members[self._exchange.rank].host
        return frozenset(one.pid for one in members if one.host == host) - {os.getpid()}

    def begin(self) -> Look:
        """Begin a look."""
        look = Look(ends_at=time.monotonic() + self._limit_s)
        if self._exchange.is_closed:
            look.is_done = True
            return look
        self._looks.append(look)
        self._exchange.ask()
        return look

    def tick(self, now: float) -> None:
        """Answer questions, judge, and take the verdicts that have come."""
        while not self._inbox.empty():
            self._inbox.get()()
        for look in self._looks:
            look.is_done = look.is_done or now >= look.ends_at
        self._looks = [look for look in self._looks if not look.is_done]

    def alone(self) -> Told:
        """By this rank's own facts: the others are not heard."""
        own = self._own_facts()
        answers = Answers()
        answers.add(own.key(), {own.rank}, own.to_json(), own.still)
        answers.add_silent(range(self._exchange.size), Silence(NOT_HEARD))
        return self._read(self._judged(answers.to_json()))

    def _answer(self, id_: str, reply: Callable[[str, Any, float], None]) -> None:
        now = time.monotonic()
        own = self._own_facts()
        self._answered.append((id_, now, own))
        reply(own.key(), own.to_json(), own.still)

    def _judged(self, found: dict[str, Any]) -> dict[str, Any]:
        """The verdict for all ranks, as JSON data."""
        answers = Answers()
        answers.add_json(found)
        size = self._exchange.size
        groups = [
            group
            for key, group in answers.groups.items()
            if key != OTHERS and isinstance(group.state, dict)
        ]
        verdict = {
            "silent": found["silent"],
            "differences": _differences(groups, answers.silent, size),
        }
        if any(group.state.get("asks") for group in groups):
            self._late.run()
            from ..judging.found import found_of
            from ..judging.judgement import Judge

            if self._judge is None:
                self._judge = Judge()
            members = tuple(self._exchange.members)
            seen = found_of(answers, size, members, self._exchange.trouble)
            verdict["judgement"] = asdict(self._judge.judgement(seen))
        return verdict

    def _take(self, id_: str, verdict: Any) -> None:
        answered = {one: (at, facts) for one, at, facts in self._answered}
        answered_at, facts = answered.get(id_, (0.0, None))
        try:
            if "not judged" in verdict:  # the one that judges could not in time
                verdict = self._judged(verdict["not judged"])
            told = self._read(verdict)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            return  # no rank of this format sends it
        is_asked = facts is not None and facts.asks
        if self._exchange.rank in told.silent or (is_asked and told.judgement is None):
            answered_at = -math.inf  # it knows nothing of this rank
        else:
            self.latest = told
        is_old = False
        for look in self._looks:
            if answered_at >= look.began:
                look.told = told
                look.is_done = True
            else:  # its answers may be older than the look
                is_old = True
        if facts is not None:
            self._heard(told, facts)
        if is_old:
            self._exchange.ask()

    def _read(self, verdict: Mapping[str, Any]) -> Told:
        """Raises what `_take` takes if no rank of this format sends it."""
        answers = Answers()
        answers.add_json({"groups": [], "silent": verdict["silent"]})
        texts = verdict["differences"]
        if texts is not None:
            texts = tuple(safe(one, _LONGEST_DIFFERENCE) for one in texts)
        judgement = None
        if "judgement" in verdict:
            self._late.run()
            from ..judging.judgement import Judgement
            from ..judging.read_facts import read

            judgement = read(Judgement, verdict["judgement"])
        return Told(answers.silent, texts, judgement)


def _differences(
    groups: Iterable[RanksAlike], silent: Mapping[int, Silence], size: int
) -> list[str] | None:
    """From rank 0's point of view. A rank that has not called its first encoder yet may still be
    about to choose its settings.
    """
    without = silent_by(silent, NO_WATCH)
    told = {rank: _texts(group.state) for group in groups for rank in group.ranks}
    is_whole = len({*told, *without, *silent_by(silent, LEFT, ENDED)}) >= size and all(
        told.values()
    )
    if not is_whole or 0 not in told:
        return None
    found = list[str]()
    if without:
        why = "there are no stall reports there; stderr there says why"
        found.append(f"{named(without)} of {size}: {why}")
    for name, here in told[0].items():
        others: dict[str, list[int]] = {}
        for rank in sorted(told):
            if (there := told[rank].get(name, here)) != here:
                others.setdefault(there, []).append(rank)
        if others:
            texts = [f"{named(ranks)}: {value}" for value, ranks in others.items()]
            all_there = "; ".join(texts[:_MOST_DIFFERENCES])
            found.append(f"ranks differ in their {name}: here {here}; {all_there}")
    return found


def _texts(state: dict[str, Any]) -> dict[str, str]:
    """What should be the same; empty before its first encoder call.

    Ranks may call another encoder first: its own flag is compared where both have that.
    """
    if not state.get("calls"):
        return {}
    texts = {name: safe(str(state.get(name, ""))) for name in ("versions", "settings")}
    encoder, _, flag = safe(str(state.get("flag", ""))).partition(": ")
    return {**texts, f"settings of {encoder}": flag}
