"""Where all ranks are, grouped, and which of them the others wait for: the verdict on a job that calls no encoder.

A rank that waits in a collective is never blamed for it. Where the evidence does not decide, the verdict says so.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .heartbeat import Heartbeat
from .missing_rank import DETAILED, UNPATCHED, MissingRank
from .occupation import CHECKPOINT, COMPILATION, DEBUGGER, EXPORT, is_guess
from .rank_text import ELSEWHERE, LEFT, SILENT, UNANNOUNCED, named, ranges

WAITING = "waiting"  # in a collective
CALLING = "calling"  # it goes on with encoder calls
MOVING = "moving"  # it goes on with something else
_DOES = {
    CHECKPOINT: " writes a checkpoint",
    DEBUGGER: " is in a debugger",
    COMPILATION: " compiles",
    EXPORT: " exports a model",
}


@dataclass(frozen=True)
class RankGroup:
    """Ranks that are in the same state at the same place.

    runs: the ranks, in rising order, as (first, last) of each run. kind: WAITING, CALLING, MOVING, or a missing rank's.
    still: the shortest time in seconds since any of them was seen to move, -1 if not known. The rest is what the first
    of them says of itself. idle: seconds since its last encoder call began, -1 if not known.
    """

    runs: tuple[tuple[int, int], ...]
    kind: str
    host: str = ""
    pid: int = 0
    calls: int = 0
    idle: float = -1.0
    where: str = ""
    collective: str = ""
    activity: str = ""
    worker_states: tuple[str, ...] = ()
    batch: str = ""
    still: float = -1.0

    @property
    def ranks(self) -> list[int]:
        return [rank for first, last in self.runs for rank in range(first, last + 1)]

    @property
    def size(self) -> int:
        return sum(last - first + 1 for first, last in self.runs)

    @property
    def is_suspect(self) -> bool:
        """Whether it is not in a collective, and does not go on either."""
        return self.kind not in (WAITING, CALLING, MOVING)

    @property
    def place(self) -> tuple[str, str, str, str]:
        """What makes ranks one group. Those in the same collective are, wherever they called it from."""
        if self.kind == MOVING:
            return self.kind, "", "", ""
        return self.kind, self.collective, self.activity, "" if self.collective else self.where

    def origin(self) -> str:
        """Where a collective was called from, and after how many encoder calls."""
        return f", from {self.where.partition(' < ')[0]}, after encoder call {self.calls}" if self.where else ""

    def missing(self) -> list[MissingRank]:
        """As what a stall report names."""
        first, *others = self.ranks
        place = (self.host, self.pid, self.calls, self.idle, self.where)
        named_rank = MissingRank(first, self.kind, *place, batch=self.batch)
        return [named_rank, *(MissingRank(rank, self.kind) for rank in others)]

    def __str__(self) -> str:
        if self.size == 1 and self.kind in (SILENT, LEFT, UNANNOUNCED):
            return str(self.missing()[0])
        ranks = named(self.ranks)
        if self.size == 1 and self.host:
            ranks += f" ({self.host}, pid {self.pid})"
        if self.kind == WAITING:
            return f"{ranks}: {self.collective}"
        if self.kind == CALLING:
            return f"{ranks}: {'goes' if self.size == 1 else 'go'} on with encoder calls"
        if self.kind == MOVING:
            at = f", now in {self.where or self.collective}" if self.where or self.collective else ""
            return f"{ranks}: {'goes' if self.size == 1 else 'go'} on without encoder calls{at}"
        if self.kind != ELSEWHERE:
            return f"{ranks}: {_MEANINGS[self.kind]}"
        more = "".join(f"; its data loader's {text}" for text in self.worker_states)
        more += f"; last batch {self.batch}" if self.batch and self.size == 1 else ""
        return f"{ranks}{_DOES.get(self.activity, '')}: {self.where or 'where is not known'}{more}"


_MEANINGS = {
    SILENT: "no heartbeat: stopped, killed, host unreachable, or Python's lock (GIL) held",
    LEFT: "have left: they ended, or destroyed their process group",
    UNANNOUNCED: "have not announced themselves: not patched, not started, or not yet at a first encoder call",
}


@dataclass(frozen=True)
class Verdict:
    """level: WARNING where ranks wait, for nothing known to end by itself, and none moves; else INFO.

    remark: how to read it.
    """

    level: int
    remark: str
    groups: tuple[RankGroup, ...]  # the suspects first, and of these the smallest

    @property
    def missing(self) -> tuple[MissingRank, ...]:
        """The suspects, where somebody waits for them, and no other rank moves that they may have waited for."""
        kinds = {group.kind for group in self.groups}
        if self.level < logging.WARNING and (WAITING not in kinds or MOVING in kinds):
            return ()
        return tuple(rank for group in self.groups if group.is_suspect for rank in group.missing())

    @property
    def waiting_for_sure(self) -> set[int]:
        """The ranks in a collective, where that is no guess."""
        waiting = (group for group in self.groups if group.kind == WAITING and not is_guess(group.collective))
        return {rank for group in waiting for rank in group.ranks}

    @property
    def is_busy(self) -> bool:
        """Whether a suspect is at what ends by itself."""
        return any(group.is_suspect and group.activity for group in self.groups)

    @property
    def is_certain(self) -> bool:
        """Whether some rank waits in a collective, which is no guess, and none is at what ends by itself."""
        return self.level >= logging.WARNING and bool(self.waiting_for_sure) and not self.is_busy

    def text(self) -> str:
        """The groups in one line."""
        suspects = [group for group in self.groups if group.is_suspect]
        others = [group for group in self.groups if not group.is_suspect]
        only_collectives = not suspects and len(others) > 1  # then where each was called from is all that there is
        lines = [*map(str, suspects[:DETAILED]), *_rest(suspects)]
        lines += [str(group) + (group.origin() if only_collectives else "") for group in others[:DETAILED]]
        lines += _rest(others)
        lines += [UNPATCHED] if any(group.kind == UNANNOUNCED for group in suspects) else []
        return " | ".join([*lines, *([self.remark] if self.remark else [])])


def grouped(
    size: int, heartbeats: Mapping[int, Heartbeat], silent: Iterable[int], calling_within_s: float
) -> tuple[RankGroup, ...]:
    """The groups of all `size` ranks, by their latest heartbeats.

    silent: ranks whose heart has stopped. calling_within_s: so long after its last encoder call a rank still goes on;
    half as long after it was last seen to move.
    """
    by_place: dict[tuple[str, str, str, str], list[RankGroup]] = {}
    silent = set(silent)
    # Who syncs, and has not announced itself, has no stall reports.
    unheard = ELSEWHERE if any(one.tells_that_all_sync() for one in heartbeats.values()) else UNANNOUNCED
    for rank in range(size):
        runs, heartbeat = ((rank, rank),), heartbeats.get(rank)
        group = _alone(runs, heartbeat, rank in silent, calling_within_s) if heartbeat else RankGroup(runs, unheard)
        by_place.setdefault(group.place, []).append(group)
    joined = (
        replace(
            alone[0],
            runs=tuple(ranges(group.runs[0][0] for group in alone)),
            still=min((group.still for group in alone if group.still >= 0), default=-1.0),
        )
        for alone in by_place.values()
    )
    order = {MOVING: 1, CALLING: 1, WAITING: 2}
    return tuple(sorted(joined, key=lambda group: (order.get(group.kind, 0), group.size, group.runs)))


def judged(groups: tuple[RankGroup, ...]) -> Verdict:
    """Who is waited for, as far as the groups tell."""
    suspects = [group for group in groups if group.is_suspect]
    waiting = [group for group in groups if group.kind == WAITING]
    calling = [group for group in groups if group.kind == CALLING]
    are_guesses = all(is_guess(group.collective) for group in waiting)
    if any(group.kind == MOVING for group in groups):
        return Verdict(logging.INFO, "who waits may wait for a rank that goes on" if waiting else "", groups)
    if waiting and suspects:
        ends_by_itself = all(group.activity for group in suspects if group.kind != LEFT)
        ends_by_itself &= any(group.activity for group in suspects)
        guess = "that they wait is a guess, by a method's name" if are_guesses else ""
        return Verdict(logging.INFO if ends_by_itself else logging.WARNING, guess, groups)
    if waiting and calling:
        return Verdict(logging.INFO, "the ranks that wait may have had fewer batches", groups)
    if waiting:
        remark = "every rank waits in the same collective: possibly one is a call ahead, or the network has failed"
        if len({group.collective for group in waiting}) > 1:
            remark = "the ranks wait in different collectives; which of them is wrong cannot be told"
        return Verdict(logging.INFO if are_guesses else logging.WARNING, remark, groups)
    if any(group.kind == SILENT for group in suspects):
        return Verdict(logging.WARNING, "", groups)
    return Verdict(logging.INFO, "no rank is known to wait for another", groups)


def _alone(
    runs: tuple[tuple[int, int], ...], heartbeat: Heartbeat, is_silent: bool, calling_within_s: float
) -> RankGroup:
    place = (heartbeat.host, heartbeat.pid, heartbeat.calls, heartbeat.idle)
    still = heartbeat.still
    if heartbeat.phase == LEFT or is_silent:
        return RankGroup(runs, LEFT if heartbeat.phase == LEFT else SILENT, *place, still=still)
    if 0 <= heartbeat.idle < calling_within_s:
        return RankGroup(runs, CALLING, *place, still=still)
    kind = WAITING if heartbeat.collective else ELSEWHERE
    kind = MOVING if 0 <= still < calling_within_s / 2 else kind
    about = (heartbeat.where, heartbeat.collective, heartbeat.activity)
    more = (heartbeat.worker_states, heartbeat.batch)
    return RankGroup(runs, kind, *place, *about, *more, still=still)


def _rest(groups: list[RankGroup]) -> list[str]:
    rest = groups[DETAILED:]
    ranks = sorted(rank for group in rest for rank in group.ranks)
    return [f"{len(rest)} more groups: {named(ranks)}"] if rest else []
