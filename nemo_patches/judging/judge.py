"""The one judge: which ranks are waited for, by the collectives that each rank has entered.

Needs no torch.

Every source (places of a running job, stacks, Flight Recorder dumps, watchdogs' lines, RAS, traces)
becomes Entries. What is odd about a source, its reader tells by leaving a rank out.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

# Ids of verdicts.
MISSING = "missing-rank"  # others are in a collective that these ranks have not entered
OUT_OF_STEP = "out-of-step"  # ranks are in different collectives of the same number
SIZES = "sizes-differ"  # ranks are in the same collective with different sizes
DRIFTED = "drifted"  # those that have not entered one wait in an earlier one
# Every rank that has not entered one waits in another group's.
CROSSED = "crossed-groups"
ALL_IN = "all-in"  # all are in the same one, and none has come out
OLDER = "older"  # the records are of different times: some rank has come out of it
_IN_VAIN = (MISSING, OUT_OF_STEP, SIZES)  # a rank cannot come out of such a collective

_JOB = "job"  # the group in which all ranks are
_ANY_SIZE = (
    "coalesced",
    "alltoall",
    "gather",
    "scatter",
    "send",
    "recv",
)  # as kinds begin of unlike sizes


class Entry(NamedTuple):
    """One collective that a rank has entered.

    number: of its group, rising by one. kind, size: empty where not known; both are compared as
    they are. done: the
    rank has come out of it, or given it up; None: its source never tells, so that it is in it
    excuses nobody.
    completed: all ranks had entered it. caller: from where in the user's code; not compared.
    """

    rank: int
    group: str
    number: int
    kind: str = ""
    size: str = ""
    done: bool | None = False
    completed: bool = False
    caller: str = ""

    @property
    def may_have_any_size(self) -> bool:
        """Whether ranks may give different sizes."""
        return (
            self.kind.rpartition(":")[2].lower().replace("_", "").startswith(_ANY_SIZE)
        )


class Judgement(NamedTuple):
    """accused: empty if the entries do not decide. waiting: ranks in `entry`; absent: ranks that
    have not entered it.
    """

    id: str
    accused: tuple[int, ...]
    waiting: tuple[int, ...]
    entry: Entry
    absent: tuple[int, ...] = ()


def judge(
    entries: Iterable[Entry],
    members: Mapping[str, Iterable[int]],
    begins: Mapping[tuple[str, int], int] | None = None,
) -> list[Judgement]:
    """For each group, the first collective in which its ranks differ; groups in the order of their
    names.

    members: by group the ranks of which anything is known; who has an entry is one anyway.
    begins: by
    group and rank the
    number from which on its record is whole, where that is not the first one in it.
    """
    of_group: dict[str, dict[int, dict[int, Entry]]] = {
        group: {rank: {} for rank in sorted(ranks)} for group, ranks in members.items()
    }
    # By rank the groups in whose collectives it is.
    pending: dict[int, set[str]] = defaultdict(set)
    for entry in entries:
        of_group.setdefault(entry.group, {}).setdefault(entry.rank, {})[
            entry.number
        ] = entry
        if entry.done is False:
            pending[entry.rank].add(entry.group)
    found = [
        one
        for group, ranks in sorted(of_group.items())
        if (one := _of_group(group, ranks, begins or {}))
    ]
    return [_spared(one, found, pending) if one.id == MISSING else one for one in found]


def judge_places(
    waits: Mapping[int, str],
    members: Iterable[int],
    unreadable: Collection[int] = (),
) -> Judgement | None:
    """The same where only the collective is known that each rank waits in now, by rank; empty: not
    told. Which it is counts only once all are in one: first come ranks in none. unreadable: where
    they are is not known.
    """
    members = set(members)
    are_out = members - waits.keys() - set(unreadable)
    entries = (
        Entry(rank, _JOB, 1, "" if are_out else kind) for rank, kind in waits.items()
    )
    return next(iter(judge(entries, {_JOB: members})), None)


def _of_group(
    group: str,
    entered: Mapping[int, Mapping[int, Entry]],
    begins: Mapping[tuple[str, int], int],
) -> Judgement | None:
    if len(entered) < 2:
        return None
    tops = {rank: max(of_rank, default=-1) for rank, of_rank in entered.items()}
    firsts = (
        begins.get((group, rank), min(of_rank))
        for rank, of_rank in entered.items()
        if of_rank
    )
    first = max(firsts, default=0)
    for number in sorted(
        {
            number
            for of_rank in entered.values()
            for number in of_rank
            if number >= first
        }
    ):
        there = {
            rank: of_rank[number]
            for rank, of_rank in entered.items()
            if number in of_rank
        }
        some, who = next(iter(there.values())), tuple(sorted(there))
        if len({entry.kind for entry in there.values()} - {""}) > 1:
            return Judgement(OUT_OF_STEP, (), who, some)
        sizes = {entry.size for entry in there.values()} - {""}
        if len(sizes) > 1 and not some.may_have_any_size:
            return Judgement(SIZES, (), who, some)
        if absent := tuple(sorted(rank for rank, top in tops.items() if top < number)):
            if any(entry.completed for entry in there.values()):
                return Judgement(OLDER, (), who, some, absent)
            accused = tuple(
                rank for rank in absent if not _is_in(entered, rank, tops[rank])
            )
            return Judgement(
                MISSING if accused else DRIFTED, accused, who, some, absent
            )
    last = max(tops.values())
    stuck = [
        of_rank[last]
        for of_rank in entered.values()
        if last in of_rank and not of_rank[last].done
    ]
    return (
        Judgement(ALL_IN, (), tuple(sorted(entered)), stuck[0])
        if len(stuck) == len(entered)
        else None
    )


def _is_in(entered: Mapping[int, Mapping[int, Entry]], rank: int, number: int) -> bool:
    """Whether the rank waits in this collective, which nobody has completed."""
    there = [of_rank[number] for of_rank in entered.values() if number in of_rank]
    own = entered[rank].get(number)
    is_over = any(entry.completed for entry in there)
    return own is not None and own.done is False and not is_over


def _spared(
    one: Judgement, found: list[Judgement], pending: Mapping[int, set[str]]
) -> Judgement:
    """A rank that waits in a collective of another group is not to blame."""
    waits = {
        rank
        for other in found
        if other is not one and other.id in _IN_VAIN
        for rank in other.waiting
    }
    accused = tuple(
        rank
        for rank in one.accused
        if rank not in waits and not pending[rank] - {one.entry.group}
    )
    return one._replace(id=MISSING if accused else CROSSED, accused=accused)
