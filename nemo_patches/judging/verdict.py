"""The verdict on a job that makes no progress: which ranks the others wait for, by all places.

Steps decide. A rank that waits in a collective is never blamed for it, nor one that goes on, nor
one of which nothing is known. Where the evidence does not decide, the verdict says so. Needs no
torch.
"""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

# No `from __future__ import annotations`: read_facts.py reads the fields' types.

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..facts import CALLING, COMPUTING, MOVING
from ..text import FEW_RANKS, named
from .kinds import ELSEWHERE, PERHAPS, SILENT, is_guess
from .missing_rank import DETAILED, MissingRank, shortened
from .rank_groups import UNHEARD, WAITING, RankGroup
from .waits import remedy

WAITED_FOR = "who is waited for"
_NO_RANK_MOVES = "no rank moves: "
_IS_A_GUESS = "is a guess, by a method's name"
_ALL_IN = (
    "every rank waits in the same collective: possibly one is a call ahead, or the"
    " network has failed"
)
_MAY_WAIT = "who waits may wait for a rank that goes on"
# Collectives in which all ranks wait for what one of them has: so a server's ranks wait for its
# requests.
_FROM_ONE = {
    "broadcast",
    "broadcast_object_list",
    "irecv",
    "recv",
    "recv_object_list",
    "scatter",
    "scatter_object_list",
}


@dataclass(frozen=True)
class Verdict:
    """level: WARNING where ranks wait, no rank takes a step, and those that are waited for neither
    compute nor are in something that ends by itself; or where all ranks are in one dead wait or the
    other. Else INFO. remark: how to read it. lead: what to say first. is_idle: all that the others
    may wait for is a person or a request.
    """

    level: int
    remark: str
    groups: tuple[RankGroup, ...]  # the suspects first, and of these the smallest
    lead: str = ""
    is_idle: bool = False

    @property
    def suspects(self) -> list[RankGroup]:
        return [group for group in self.groups if group.is_suspect]

    @property
    def missing(self) -> tuple[MissingRank, ...]:
        """The suspects, if a rank waits for them, and no rank that they may wait for moves."""
        if self.lead or self.is_idle or self._has(MOVING, COMPUTING):
            return ()
        if self.level < logging.WARNING and not self._has(WAITING):
            return ()
        return tuple(rank for group in self.suspects for rank in group.missing())

    @property
    def goes_on(self) -> bool:
        """Whether some rank does."""
        return self._has(CALLING, MOVING, COMPUTING)

    @property
    def stays_info(self) -> bool:
        """Whether it is no warning either if it lasts: nobody waits in vain, as far as is known."""
        if self.level >= logging.WARNING:
            return False
        if self.is_idle or self._has(CALLING, MOVING):
            return True
        return self.goes_on and not self._has(WAITING)

    @property
    def waiting_for_sure(self) -> set[int]:
        """The ranks in a collective, unless that is a guess."""
        waiting = (group for group in self.groups if group.kind == WAITING)
        return set(_ranks(one for one in waiting if not is_guess(one.collective)))

    @property
    def is_busy(self) -> bool:
        """Whether a suspect is in something that ends by itself."""
        return any(group.activity for group in self.suspects)

    @property
    def is_certain(self) -> bool:
        """Whether some rank waits in a collective, which is no guess, and none computes or is at
        what ends by itself; or all are in a dead wait.
        """
        if self.level < logging.WARNING or self.is_busy or self._has(COMPUTING):
            return False
        return bool(self.lead or self.waiting_for_sure)

    @property
    def is_sure_at_the_start(self) -> bool:
        """Whether it is certain even before the first steps, when anything may take any time."""
        stand = all(group.sleeps or group.kind != ELSEWHERE for group in self.suspects)
        return self.is_certain and stand and not self.lead and not self._has(UNHEARD)

    def overdue(self, still_s: float) -> "Verdict":
        """The same, as a warning: it has lasted. still_s: for so long no rank has moved, if none
        goes on.
        """
        why = (
            "no rank takes a step"
            if self.goes_on
            else f"no rank has moved for {still_s:.0f} s"
        )
        if self.remark:
            why = f"{self.remark}; {why}"
        return replace(self, level=logging.WARNING, remark=why)

    def outline(self) -> list[tuple[object, ...]]:
        """The text without the ranks' places in their code."""
        return [
            (group.runs, group.kind, group.collective, group.activity, group.request)
            for group in self.groups
        ]

    def text(self) -> str:
        """The groups in one line, shortened."""
        others = [group for group in self.groups if not group.is_suspect]
        only_collectives = not self.suspects and len(others) > 1
        lines = _lines(self.suspects) + _lines(others, with_calls=only_collectives)
        if self.remark:
            lines.append(self.remark)
        return shortened(self.lead + " | ".join(lines))

    def short(self, own: int, hosts: Sequence[str]) -> str:
        """For one of many ranks: where it is, and who is waited for. The first rank of its host
        that stands has the whole text; empty for that one, and where ranks are few. hosts: by rank.
        """
        standing = _ranks(
            group for group in self.groups if group.kind in (WAITING, ELSEWHERE)
        )
        first = next((one for one in standing if hosts[one] == hosts[own]), own)
        group = next((one for one in self.groups if own in one.ranks), None)
        if first == own or group is None or len(hosts) <= FEW_RANKS:
            return ""
        place = group.wait if group.collective else group.where
        missing = [one.rank for one in self.missing]
        who = f"{WAITED_FOR}: {named(missing)}" if missing else "where all are"
        return f"rank {own}: {place} | {who}, in rank {first}'s line"

    def _has(self, *kinds: str) -> bool:
        return any(group.kind in kinds for group in self.groups)


def judged(groups: tuple[RankGroup, ...]) -> Verdict:
    """The ranks that others wait for, as far as the groups show."""
    kinds = {group.kind for group in groups}
    suspects = [group for group in groups if group.is_suspect]
    idle = bool(suspects) and _wait_for_requests(groups, suspects)
    if idle and MOVING not in kinds:
        told = tuple(
            replace(group, request=group.request.removeprefix(PERHAPS))
            for group in groups
        )
        return Verdict(logging.INFO, "", told, is_idle=True)
    if kinds.intersection((MOVING, COMPUTING)):
        return Verdict(logging.INFO, _MAY_WAIT if WAITING in kinds else "", groups)
    if WAITING in kinds:
        return _of_waiting(groups, suspects)
    if SILENT in kinds:
        return Verdict(logging.WARNING, "", groups)
    if groups and all(group.is_in_dead_wait for group in groups):
        return Verdict(logging.WARNING, "", groups, _NO_RANK_MOVES)
    return Verdict(logging.INFO, "no rank is known to wait for another", groups)


def _wait_for_requests(
    groups: tuple[RankGroup, ...], suspects: list[RankGroup]
) -> bool:
    """Whether all suspects do, and the others wait for these requests; if none waits: whether it is
    certain that they do. A rank that has ended is none of these.
    """
    collectives = {group.collective for group in groups if group.kind == WAITING}
    is_from_one = bool(collectives) and _FROM_ONE.issuperset(collectives)
    return all(
        group.request and (is_from_one or not is_guess(group.request))
        for group in suspects
    )


def _of_waiting(groups: tuple[RankGroup, ...], suspects: list[RankGroup]) -> Verdict:
    """If ranks wait in a collective, and none is known to move except those that call their
    encoders.
    """
    waiting = [group for group in groups if group.kind == WAITING]
    unheard = [group for group in groups if group.kind == UNHEARD]
    guesses = [group for group in waiting if is_guess(group.collective)]
    are_guesses = guesses == waiting
    if len(groups) > len(waiting) + len(unheard):
        if not suspects:
            remark = "the ranks that wait may have had fewer batches"
            return Verdict(logging.INFO, remark, groups)
        slow = [group for group in suspects if not group.has_ended]
        ends_by_itself = bool(slow) and all(group.activity for group in slow)
        guess = f"that they wait {_IS_A_GUESS}" if are_guesses else ""
        level = logging.INFO if ends_by_itself else logging.WARNING
        return Verdict(level, guess, groups)
    level = logging.INFO if are_guesses else logging.WARNING
    if unheard:
        ranks = _ranks(unheard)
        are = "is" if len(ranks) == 1 else "are"
        return Verdict(level, f"where {named(ranks)} {are}, nobody knows", groups)
    if len(waiting) == 1:
        return Verdict(level, _ALL_IN, groups)
    how = "the ranks wait at different places"
    if guesses:
        ranks = _ranks(guesses)
        verb = "waits" if len(ranks) == 1 else "wait"
        how = f"that {named(ranks)} {verb} {_IS_A_GUESS}"
    elif len({group.collective for group in waiting}) > 1:
        cure = remedy(
            (one.ranks, (one.hook, one.collective, one.caller), one.batch)
            for one in waiting
        )
        how = f"{cure}; the ranks wait in different collectives"
    return Verdict(level, f"{how}; which of them is wrong cannot be told", groups)


def _lines(groups: list[RankGroup], with_calls: bool = False) -> list[str]:
    lines = [group.text(with_calls=with_calls) for group in groups[:DETAILED]]
    if rest := groups[DETAILED:]:
        lines.append(f"{len(rest)} more groups: {named(_ranks(rest))}")
    return lines


def _ranks(groups: Iterable[RankGroup]) -> list[int]:
    return sorted(rank for group in groups for rank in group.ranks)
