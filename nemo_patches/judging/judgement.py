"""One verdict on all ranks: the rank that judges makes it of what they say, and each rank reads it.

It is sent as JSON. Needs no torch.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

# No `from __future__ import annotations`: read_facts.py reads the fields' types.

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..facts import HAS_PAGED, HAS_WARNED, NO_PAGE, RankFacts
from ..text import ranges
from .answer import Answer, RoundQuestion, answered
from .found import Found
from .missing_rank import MissingRank
from .rank_groups import grouped
from .verdict import Verdict, judged

_MOST_DESCRIBED = 32  # missing ranks of a round; of more only the kind is told
_MOST_KEPT = 16  # rounds

Runs = tuple[tuple[int, int], ...]  # of ranks: the first and the last of each


@dataclass(frozen=True)
class LateRound:
    """A round that a rank asks about. answer: with the first missing ranks. others: by kind.

    given_up: seconds since the first rank no longer waits for it; -1: all that have come do.
    """

    key: str
    number: int
    given_up: float
    answer: Answer
    others: dict[str, Runs]


@dataclass(frozen=True)
class Pagers:
    """Ranks that may run on_stall; -1: none.

    has_paged: it has in this stall. first: it is to, at a rank's first line: it reports the stall,
    too, and no thread of it is in os.wait(), for any child. later: at a later line. lowest: of all
    that report the stall.
    """

    has_paged: int
    first: int
    later: int
    lowest: int


@dataclass(frozen=True)
class Judgement:
    """still: ranks that have not moved for so many seconds; -1: not known."""

    job: Verdict
    late: tuple[LateRound, ...]
    still: tuple[tuple[float, Runs], ...]
    pagers: Pagers

    def still_s(self) -> dict[int, float]:
        """By rank."""
        return {rank: s for s, runs in self.still for rank in ranks_in(runs)}

    def answer(self, key: str, number: int) -> Answer:
        """Which ranks are missing from this round."""
        for late in self.late:
            if late.key == key and late.number == number:
                missing = list(late.answer.missing)
                for kind, runs in late.others.items():
                    missing += [MissingRank(rank, kind) for rank in ranks_in(runs)]
                missing.sort(key=lambda one: one.rank)
                return replace(late.answer, missing=tuple(missing))
        if any(late.key == key and late.number > number for late in self.late):
            return Answer()  # else there would be no later round
        return Answer(unknown="the rank that judges has not heard of this call")


class Judge:
    """On the rank that judges. One thread uses it."""

    def __init__(self) -> None:
        # By a round's key and number: what was last known of each rank while some were missing.
        self._before: dict[tuple[str, int], Found] = {}

    def judgement(self, found: Found) -> Judgement:
        states = found.states
        still: dict[float, list[int]] = {}
        for rank in sorted(states):
            still.setdefault(states[rank].still, []).append(rank)
        return Judgement(
            judged(grouped(found)),
            tuple(self._late(one, found) for one in _questions(states.values())),
            tuple((seconds, tuple(ranges(ranks))) for seconds, ranks in still.items()),
            _pagers(list(states.values())),
        )

    def _late(self, question: RoundQuestion, found: Found) -> LateRound:
        of = question.key, question.round_number
        before = self._before.get(of)
        if any(not question.came(state) for state in found.states.values()):
            known = {**before.states, **found.states} if before else found.states
            self._before[of] = replace(found, states=known)
            if len(self._before) > _MOST_KEPT:
                del self._before[next(iter(self._before))]
        answer = answered(question, found, before)
        others: dict[str, list[int]] = {}
        for one in answer.missing[_MOST_DESCRIBED:]:
            others.setdefault(one.kind, []).append(one.rank)
        key, number = of
        given_up = [
            state.given_up.get(key, -1.0)
            for state in found.states.values()
            if state.rounds.get(key) == number
        ]
        return LateRound(
            *of,
            max(given_up, default=-1.0),
            replace(answer, missing=answer.missing[:_MOST_DESCRIBED]),
            {kind: tuple(ranges(ranks)) for kind, ranks in others.items()},
        )


def ranks_in(runs: Runs) -> list[int]:
    return [rank for first, last in runs for rank in range(first, last + 1)]


def _questions(states: Iterable[RankFacts]) -> list[RoundQuestion]:
    """What the ranks ask: each round once."""
    asked: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for state in states:
        for key, (number, *call) in state.late.items():
            asked.setdefault((key, number), []).append(tuple(call))
    questions = list[RoundQuestion]()
    for (key, number), calls in asked.items():
        clock = min((call[:2] for call in calls if call[0] >= 0), default=None)
        evaluation = min((call[2] for call in calls if call[2] >= 0), default=None)
        questions.append(RoundQuestion(key, number, clock, evaluation))
    return questions


def _pagers(states: list[RankFacts]) -> Pagers:
    tell = [one for one in states if one.page != NO_PAGE and not one.goes_on]
    can = [one for one in tell if not one.waits_for_child]
    return Pagers(
        has_paged=_lowest(one for one in states if one.page == HAS_PAGED),
        first=_lowest(can),
        later=_lowest(one for one in can if one.page == HAS_WARNED),
        lowest=_lowest(tell),
    )


def _lowest(states: Iterable[RankFacts]) -> int:
    return min((state.rank for state in states), default=-1)
