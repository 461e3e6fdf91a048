"""Ranks in the same state at the same place, and their text in a log line. Needs no torch."""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

# No `from __future__ import annotations`: read_facts.py reads the fields' types.

from dataclasses import dataclass, fields, replace
from typing import Any

from ..channel.answers import HELD_UP, NO_WATCH, NOT_THROUGH, UNREACHED
from ..facts import CALLING, COMPUTING, MOVING, Doing, RankFacts
from ..text import named, ranges
from .found import KINDS_OF_SILENT, Found
from .kinds import (
    ALL_RANKS_OF,
    ANSWERS_NOTHING,
    CHECKPOINT,
    COMPILATION,
    DEBUGGER,
    ELSEWHERE,
    EXPORT,
    GONE,
    LEFT,
    SILENT,
    UNANNOUNCED,
    is_guess,
)
from .missing_rank import NOT_ANNOUNCED, REACHED_BY_NONE, MissingRank, process_text

WAITING = "waiting"  # in a collective
UNHEARD = "not heard"  # it is not known where it is, and it is not blamed for that
DOES = {
    CHECKPOINT: " writes a checkpoint",
    DEBUGGER: " is in a debugger",
    COMPILATION: " compiles",
    EXPORT: " exports a model",
}
_NO_WAY = "the way there is lost, or there is none yet"
_WHY = {
    NOT_THROUGH: (
        "its small messages come, its answer does not: perhaps large packets are lost"
        " (look at the MTU)"
    ),
    HELD_UP: "its stall monitor does not answer, while its exchange does",
    NO_WATCH: "there are no stall reports there; stderr there says why",
}
_OF_SEVERAL = {
    ANSWERS_NOTHING: (
        "answer nothing, their connections stand: stopped, or Python's lock (GIL) is"
        " held, or they have no core"
    ),
    GONE: "their processes have gone",
}


@dataclass(frozen=True)
class RankGroup(Doing):
    """Ranks in the same state at the same place.

    runs: the ranks, in rising order, as (first, last) of each run. kind: WAITING, CALLING, MOVING,
    COMPUTING, UNHEARD, or a missing rank's. still: the shortest of theirs. goes_on_for: the
    longest. The rest is what the first of them says of itself, or for UNHEARD, in `where`, why
    nothing is heard. idle: seconds since its last encoder call began, -1 if not known.
    """

    runs: tuple[tuple[int, int], ...]
    kind: str
    host: str = ""
    pid: int = 0
    calls: int = 0
    idle: float = -1.0

    @property
    def ranks(self) -> list[int]:
        return [rank for first, last in self.runs for rank in range(first, last + 1)]

    @property
    def size(self) -> int:
        return sum(last - first + 1 for first, last in self.runs)

    @property
    def is_suspect(self) -> bool:
        """Whether it is known to be in no collective, and not to move."""
        return self.kind not in (WAITING, CALLING, MOVING, COMPUTING, UNHEARD)

    @property
    def is_in_dead_wait(self) -> bool:
        """Whether it is in a wait, and in no collective, without having run at all."""
        return self.is_suspect and self.sleeps and not self.activity

    @property
    def has_ended(self) -> bool:
        return self.kind == LEFT or (self.kind == SILENT and self.where == GONE)

    @property
    def place(self) -> tuple[str, ...]:
        """The key by which ranks are grouped."""
        if self.kind in (CALLING, MOVING, COMPUTING):
            return (self.kind,)
        at = self.caller if self.collective else self.where
        return self.kind, self.collective, self.activity, self.request, at

    def to_json(self) -> dict[str, Any]:
        """Its fields, with the ranks in place of their runs."""
        content = {"ranks": self.ranks, **vars(self)}
        del content["runs"]
        return content

    def missing(self) -> list[MissingRank]:
        """As the missing ranks of a stall report."""
        first, *others = self.ranks
        place = (self.host, self.pid, self.calls, self.idle, self.where)
        return [
            MissingRank(first, self.kind, *place, batch=self.batch),
            *(MissingRank(rank, self.kind, where=self.where) for rank in others),
        ]

    def text(self, with_calls: bool = False) -> str:
        """The text for a log line. with_calls: add the number of encoder calls of ranks that
        wait.
        """
        if self.kind in (SILENT, LEFT, UNANNOUNCED) and (
            self.size == 1 or self.where.startswith(ALL_RANKS_OF)
        ):
            return str(self.missing()[0])
        ranks = named(self.ranks)
        if self.size == 1 and self.host:
            ranks += process_text(self.host, self.pid)
        go = "goes" if self.size == 1 else "go"
        if self.kind == WAITING:
            after = (
                f", after encoder call {self.calls}"
                if with_calls and self.calls
                else ""
            )
            return f"{ranks}: {self.wait}{after}"
        if self.kind == CALLING:
            return f"{ranks}: {go} on with encoder calls"
        place = self.where or self.collective
        at = f", now in {place}" if place else ""
        if self.kind == MOVING:
            return f"{ranks}: {go} on without encoder calls{at}"
        if self.kind == COMPUTING:
            what = "computes but takes" if self.size == 1 else "compute but take"
            return f"{ranks}: {what} no step{at}{self._workers()}"
        if self.kind == UNHEARD:
            return f"{ranks}: not heard: {self.where}"
        if self.kind == SILENT:
            return f"{ranks}: {_OF_SEVERAL.get(self.where, self.where)}"
        if self.kind != ELSEWHERE:
            return f"{ranks}: {_MEANINGS[self.kind]}"
        if self.request and not is_guess(self.request):
            waits = "waits" if self.size == 1 else "wait"
            return f"{ranks} {waits} for a request: {self.request}" + (
                f" in {self.caller}" if self.caller else ""
            )
        batch = f"; last batch {self.batch}" if self.batch and self.size == 1 else ""
        where = self.where or "where is not known"
        return f"{ranks}{DOES.get(self.activity, '')}: {where}{self._workers()}{batch}"

    @property
    def wait(self) -> str:
        """What it waits in, and from where."""
        caller = f", in {self.caller}" if self.caller else ""
        how = "while" if " " in self.hook else "during"
        hook = f", {how} {self.hook}" if self.hook else ""
        return f"{self.collective}{caller}{hook}"

    def _workers(self) -> str:
        return "".join(f"; its data loader's {text}" for text in self.worker_states)


_MEANINGS = {
    LEFT: "have left: they ended, or destroyed their process group",
    UNANNOUNCED: f"have not announced themselves: {NOT_ANNOUNCED}",
}


_OF_STATE = {one.name for one in fields(RankGroup)} & {
    one.name for one in fields(RankFacts)
}


def grouped(found: Found) -> tuple[RankGroup, ...]:
    """The groups of all ranks: the suspects first, the smallest group of these before the
    others.
    """
    single = [_of_state(rank, state) for rank, state in found.states.items()]
    single += [
        _of_silent(rank, silence.how, found) for rank, silence in found.silent.items()
    ]
    by_place: dict[tuple[str, ...], list[RankGroup]] = {}
    for group in sorted(single, key=lambda one: one.runs):
        by_place.setdefault(group.place, []).append(group)
    joined = [
        replace(
            alone[0],
            runs=tuple(ranges(group.runs[0][0] for group in alone)),
            still=min(
                (group.still for group in alone if group.still >= 0), default=-1.0
            ),
            sleeps=all(group.sleeps for group in alone),
            goes_on_for=max(group.goes_on_for for group in alone),
        )
        for alone in by_place.values()
    ]
    order = {UNHEARD: 1, MOVING: 2, COMPUTING: 2, CALLING: 2, WAITING: 3}
    return tuple(
        sorted(
            joined, key=lambda group: (order.get(group.kind, 0), group.size, group.runs)
        )
    )


def _of_state(rank: int, state: RankFacts) -> RankGroup:
    kind = state.goes_on or (WAITING if state.collective else ELSEWHERE)
    return RankGroup(
        ((rank, rank),), kind, **{name: getattr(state, name) for name in _OF_STATE}
    )


def _of_silent(rank: int, how: str, found: Found) -> RankGroup:
    kind = KINDS_OF_SILENT.get(how, UNHEARD)
    if how == UNREACHED:
        where = f"it {REACHED_BY_NONE}: {found.silent[rank].note}"
        return RankGroup(((rank, rank),), kind, where=where)
    where = _WHY.get(how, _NO_WAY) if kind == UNHEARD else found.evidence(rank)
    return RankGroup(((rank, rank),), kind, *found.process_of(rank), where=where)
