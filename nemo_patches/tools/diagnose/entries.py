"""Which ranks are waited for, by the numbers of the collectives that each rank has entered.

Needs no torch.

Every source that numbers them (Flight Recorder dumps, watchdogs' lines, traces) becomes Entries.
What is odd about a source, its reader tells by leaving a rank out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
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
    they are. done: the rank has come out of it, or given it up; None: its source never tells, so
    that it is in it excuses nobody. completed: all ranks had entered it. caller: from where in the
    user's code; not compared. counted: its source counts a call when it returns, so the rank may be
    inside the next one.
    """

    rank: int
    group: str
    number: int
    kind: str = ""
    size: str = ""
    done: bool | None = False
    completed: bool = False
    caller: str = ""
    counted: bool = False

    @property
    def may_have_any_size(self) -> bool:
        """Whether ranks may give different sizes."""
        return (
            self.kind.rpartition(":")[2].lower().replace("_", "").startswith(_ANY_SIZE)
        )


class EntryJudgement(NamedTuple):
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
) -> list[EntryJudgement]:
    """For each group, the first collective in which its ranks differ; groups in the order of their
    names.

    members: by group the ranks of which anything is known; who has an entry is one anyway. begins:
    by group and rank the number from which on its record is whole, where that is not the first one
    in it.
    """
    of_group: dict[str, list[Entry]] = {group: [] for group in members}
    # By rank the groups in whose collectives it is.
    pending: dict[int, set[str]] = defaultdict(set)
    for entry in entries:
        of_group.setdefault(entry.group, []).append(entry)
        if entry.done is False:
            pending[entry.rank].add(entry.group)
    found = [
        one
        for group, told in sorted(of_group.items())
        if (one := _of_group(told, members.get(group, ()), begins or {}))
    ]
    return [_spared(one, found, pending) if one.id == MISSING else one for one in found]


def _of_group(
    entries: Iterable[Entry],
    members: Iterable[int],
    begins: Mapping[tuple[str, int], int],
) -> EntryJudgement | None:
    of_number: dict[int, dict[int, Entry]] = defaultdict(dict)
    last = dict.fromkeys(members, -1)
    first: dict[int, int] = {}
    for entry in entries:
        rank = entry.rank
        of_number[entry.number][rank] = entry
        last[rank] = max(entry.number, last.get(rank, -1))
        begin = begins.get((entry.group, rank), entry.number)
        first[rank] = min(begin, first.get(rank, begin))
    if len(last) < 2:
        return None
    for number in sorted(of_number):
        if number < max(first.values()):
            continue
        there = of_number[number]
        who = tuple(sorted(there))
        some = there[who[0]]
        if len({entry.kind for entry in there.values()} - {""}) > 1:
            return EntryJudgement(OUT_OF_STEP, (), who, some)
        sizes = {entry.size for entry in there.values()} - {""}
        if len(sizes) > 1 and not some.may_have_any_size:
            return EntryJudgement(SIZES, (), who, some)
        absent = tuple(sorted(rank for rank, top in last.items() if top < number))
        if not absent:
            continue
        if any(entry.completed for entry in there.values()):
            return EntryJudgement(OLDER, (), who, some, absent)
        accused = tuple(
            rank for rank in absent if not _is_in(rank, of_number[last[rank]])
        )
        return EntryJudgement(
            MISSING if accused else DRIFTED, accused, who, some, absent
        )
    there = of_number[max(last.values())]
    if there.keys() != last.keys() or any(entry.done for entry in there.values()):
        return None
    return EntryJudgement(ALL_IN, (), tuple(sorted(there)), there[min(there)])


def _is_in(rank: int, there: Mapping[int, Entry]) -> bool:
    """Whether the rank waits in this collective, which nobody has completed."""
    is_over = any(entry.completed for entry in there.values())
    return rank in there and there[rank].done is False and not is_over


def _spared(
    one: EntryJudgement, found: list[EntryJudgement], pending: Mapping[int, set[str]]
) -> EntryJudgement:
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
