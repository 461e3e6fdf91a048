"""The result of a look at all ranks: where each is, or why it is not heard. Needs no torch."""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..channel.answers import (
    ENDED,
    LEFT,
    LOST,
    NO_ANSWER,
    NOT_COME,
    NOT_HEARD,
    OTHERS,
    Answers,
    Silence,
    silent_by,
)
from ..facts import RankFacts
from ..text import named
from .kinds import ALL_RANKS_OF, ANSWERS_NOTHING, GONE, SILENT, UNANNOUNCED
from .kinds import LEFT as HAS_LEFT
from .read_facts import read_facts

if TYPE_CHECKING:
    from ..channel.meeting import Member

# Of a rank of which nothing is heard, by why: those that are named for it.
KINDS_OF_SILENT = {
    LEFT: HAS_LEFT,
    ENDED: SILENT,
    NO_ANSWER: SILENT,
    LOST: SILENT,
    NOT_COME: UNANNOUNCED,
}


@dataclass(frozen=True)
class Found:
    """Where the ranks are: each is in `states`, or in `silent`, which says why nothing is heard of
    it.

    members: each rank's host and process, by rank; None where it is not known yet. trouble: why
    this rank is not connected to the others; empty if it is.
    """

    size: int
    states: Mapping[int, RankFacts] = field(default_factory=dict)
    silent: Mapping[int, Silence] = field(default_factory=dict)
    members: Sequence[Member | None] = ()
    trouble: str = ""

    def process_of(self, rank: int) -> tuple[str, int]:
        """Its host and pid; empty and 0 if not known."""
        member = self.members[rank] if rank < len(self.members) else None
        return (member.host, member.pid) if member is not None else ("", 0)

    def evidence(self, rank: int) -> str:
        """Of a silent rank: what shows how it is, if anything does."""
        silence = self.silent[rank]
        if silence.how == ENDED:
            return GONE
        if silence.how == NO_ANSWER:
            return ANSWERS_NOTHING
        return self._lost(rank) if silence.how == LOST else ""

    def _lost(self, rank: int) -> str:
        """The host or the network, if all ranks of its host are lost; the network, if others are
        heard.
        """
        host = self.process_of(rank)[0]
        of_host = {rank}
        if host:
            everyone = range(self.size)
            of_host = {one for one in everyone if self.process_of(one)[0] == host}
        lost = of_host & silent_by(self.silent, LOST).keys()
        if len(lost) < len(of_host):
            return f"its connection was lost: the network; {host} answers otherwise"
        whose = "its connection was" if len(lost) == 1 else "their connections were"
        ranks = named(lost).removeprefix("ranks ").removeprefix("rank ")
        who = f"{ALL_RANKS_OF}{host or '?'} ({ranks})"
        return f"{who}: {whose} lost: the host or the network"


def found_of(
    answers: Answers, size: int, members: Sequence[Member | None], trouble: str
) -> Found:
    """What a question's answers say of `size` ranks in all; malformed states are left out."""
    states: dict[int, RankFacts] = {}
    for key, group in answers.groups.items():
        state = read_facts(group.state) if key != OTHERS else None
        if state is None:
            continue
        state = replace(state, still=max(group.still, -1.0))
        # As far as it applies to other ranks with the same key.
        other = replace(state, host="", pid=0, workers=(), worker_states=(), batch="")
        if " " not in key:  # their places differ
            state = other = replace(other, where="", caller="", hook="")
        for rank in group.ranks:
            if rank < size:
                is_own = rank == state.rank
                states[rank] = state if is_own else replace(other, rank=rank)
    silent = {
        rank: answers.silent.get(rank, Silence(NOT_HEARD))
        for rank in range(size)
        if rank not in states
    }
    found = Found(size, states, silent, tuple(members), trouble)
    for rank, state in states.items():
        if not state.pid:
            host, pid = found.process_of(rank)
            states[rank] = replace(state, host=host, pid=pid)
    return found
