"""Which ranks are missing from a round of an encoder, from the result of a look at all ranks.

Needs no torch.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

# No `from __future__ import annotations`: read_facts.py reads the fields' types.

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..channel.answers import NOT_COME, silent_by
from ..facts import LENGTH_SYNC, ROUNDS_OF, RankFacts
from ..text import named
from .found import KINDS_OF_SILENT, Found
from .kinds import (
    APART,
    ELSEWHERE,
    EVALUATED,
    LATE,
    UNANNOUNCED,
    UNREACHED,
    is_guess,
)
from .missing_rank import MissingRank, described


@dataclass(frozen=True)
class RoundQuestion:
    """The ranks missing from this round of this encoder.

    clock: before the call, as a rank says it; None: not known. evaluation: the training calls so
    far, where the round is an evaluation's of which ranks may have fewer batches; else None.
    """

    key: str
    round_number: int
    clock: tuple[int, ...] | None
    evaluation: int | None = None

    def came(self, state: RankFacts) -> bool:
        """Also if its state does not say: a rank is not missing because it has more encoders than
        its state lists.

        After a wait in vain a call may issue no round. Whose rank has made that call, and waits in
        a collective itself, has come to it: it may well wait for this rank.
        """
        if state.has_come(self.key, self.round_number) is not False:
            return True
        if state.apart.get(self.key):
            return False  # it makes the call, and issues no round
        made = self.clock is not None and state.calls > 0 and state.clock >= self.clock
        return made and bool(state.collective)

    def kind_of(self, state: RankFacts) -> str:
        """The kind of a rank that has not come, by its own state."""
        if (apart := state.apart.get(self.key, "")) in APART:
            return apart
        return EVALUATED if self._has_ended_evaluation(state) else ELSEWHERE

    def _has_ended_evaluation(self, state: RankFacts) -> bool:
        """Whether its last call was of the same evaluation, and it waits for the others in a
        collective after that.
        """
        if state.training or not state.calls or state.clock[:1] != (self.evaluation,):
            return False
        own_rounds = state.collective.startswith((LENGTH_SYNC, ROUNDS_OF))
        return (
            bool(state.collective) and not own_rounds and not is_guess(state.collective)
        )

    def unsaid(self, states: Iterable[RankFacts]) -> str:
        """Why it is not known that all have come; empty if it is known."""
        ranks = [
            one.rank
            for one in states
            if one.has_come(self.key, self.round_number) is None
        ]
        return f"{named(ranks)}: more encoders than a rank tells of" if ranks else ""


@dataclass(frozen=True)
class Answer:
    """The missing ranks; why (some of) them are not known, or empty."""

    missing: tuple[MissingRank, ...] = ()
    unknown: str = ""

    @property
    def is_allowed(self) -> bool:
        """Whether all missing ranks have ended an evaluation in which the user allows them fewer
        batches.
        """
        return (
            bool(self.missing)
            and not self.unknown
            and all(rank.kind == EVALUATED for rank in self.missing)
        )

    def text(self, size: int) -> str:
        """For a log line, of `size` ranks in all."""
        odd = f" | {self.unknown}" if self.unknown else ""
        if self.missing:
            return described(self.missing, size) + odd
        return f"cannot be told{odd}"


def answered(question: RoundQuestion, found: Found, before: Found | None) -> Answer:
    """before: what an earlier look has found, at half the timeout.

    A rank of which nothing is known is named where all others have come: the round waits for
    somebody. One that waits in a collective itself is named only where there is no other.
    """
    states = found.states
    has_come = {rank for rank, state in states.items() if question.came(state)}
    earlier = before.states if before is not None else {}
    had_come = {rank for rank, state in earlier.items() if question.came(state)}
    missing = {
        rank: _of_state(states[rank], question.kind_of(states[rank]))
        for rank in states.keys() - has_come
    }
    missing |= {
        rank: MissingRank(rank, UNANNOUNCED)
        for rank in silent_by(found.silent, NOT_COME)
    }
    missing |= {
        rank: MissingRank(rank, UNREACHED, where=note)
        for rank, note in silent_by(found.silent, UNREACHED).items()
    }
    silent = ended(found)
    unheard = set(range(found.size)) - has_come - missing.keys() - silent.keys()
    waited_for = {rank: one for rank, one in silent.items() if rank not in had_come}
    missing |= waited_for or ({} if missing or unheard else silent)
    if not missing and len(unheard) == 1:
        return Answer(tuple(_late(rank, found, earlier) for rank in unheard))
    idle = {rank: one for rank, one in missing.items() if not _waits_itself(one)}
    if idle or unheard:
        missing = idle
    if missing or unheard:
        unknown = f"of {named(unheard)} nothing is heard" if unheard else ""
        if unheard and found.trouble:
            unknown += f": {found.trouble}"
        return Answer(tuple(missing[rank] for rank in sorted(missing)), unknown)
    # A rank that has just come no longer says where it was when the others gave up; it did at the
    # earlier look.
    late = sorted(has_come & earlier.keys() - had_come)
    came_late = tuple(_late(rank, found, earlier) for rank in late)
    return Answer(came_late, "" if came_late else question.unsaid(states.values()))


def ended(found: Found) -> dict[int, MissingRank]:
    """By rank: the ranks that have ended, or do not answer."""
    return {
        rank: MissingRank(
            rank, kind, *found.process_of(rank), where=found.evidence(rank)
        )
        for rank, silence in found.silent.items()
        if (kind := KINDS_OF_SILENT.get(silence.how)) and kind != UNANNOUNCED
    }


def _waits_itself(one: MissingRank) -> bool:
    is_sure = bool(one.collective) and not is_guess(one.collective)
    return one.kind == ELSEWHERE and is_sure


def _of_state(state: RankFacts, kind: str) -> MissingRank:
    place = (state.host, state.pid, state.calls, state.idle)
    return MissingRank(
        state.rank,
        kind,
        *place,
        state.where,
        state.workers,
        state.collective,
        state.batch,
    )


def _late(rank: int, found: Found, earlier: Mapping[int, RankFacts]) -> MissingRank:
    then = earlier.get(rank)
    if then is not None and then.where:
        return _of_state(then, LATE)
    state = found.states.get(rank)
    calls, idle = (state.calls, state.idle) if state is not None else (0, -1.0)
    return MissingRank(rank, LATE, *found.process_of(rank), calls, idle)
