"""The result of a look at all ranks: where each is, or why it is not heard. Needs no torch."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..channel.links import LEFT, VANISHED
from ..channel.survey import LOST, Silent
from ..channel.survey import SILENT as NO_ANSWER
from ..channel.tree import Resident
from .rank_kinds import LEFT as HAS_LEFT
from .rank_kinds import SILENT
from .rank_state import RankState, StateGroup

# Of a rank of which nothing is heard, by why: those that are named for it.
KINDS_OF_SILENT = {LEFT: HAS_LEFT, VANISHED: SILENT, NO_ANSWER: SILENT, LOST: SILENT}


@dataclass(frozen=True)
class Found:
    """Where the ranks are. Each rank is in a group, or in one of the other fields.

    silent: by rank, why nothing is heard of it. behind: ranks that could not be asked. absent: without a sign of
    nemo_patches in the store. residents: each rank's process, by rank; empty while not all have joined. trouble: what
    is wrong with the store, where it was asked. store_is_unreachable: its server refuses, or has closed the connection.
    """

    size: int
    groups: tuple[StateGroup, ...] = ()
    silent: Mapping[int, Silent] = field(default_factory=dict)
    behind: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()
    residents: tuple[Resident, ...] = ()
    trouble: str = ""
    store_is_unreachable: bool = False

    @cached_property
    def states(self) -> dict[int, RankState]:
        """The states of the ranks that are heard, by rank."""
        found = {rank: group.of(rank) for group in self.groups for rank in group.ranks}
        for rank, state in found.items():
            if not state.pid and self.residents:
                found[rank] = replace(state, host=self.residents[rank].host, pid=self.residents[rank].pid)
        return found

    @property
    def heard(self) -> set[int]:
        return {rank for group in self.groups for rank in group.ranks}

    @cached_property
    def have_ended(self) -> set[int]:
        """The ranks that have certainly ended."""
        return {rank for rank, silent in self.silent.items() if silent.how in (LEFT, VANISHED)}

    @property
    def is_complete(self) -> bool:
        """Whether every rank is heard, or has certainly ended."""
        return len(self.heard | self.have_ended) == self.size

    def process_of(self, rank: int) -> tuple[str, int]:
        """Its host and pid; empty and 0 if not known."""
        return self.residents[rank][:2] if self.residents else ("", 0)
