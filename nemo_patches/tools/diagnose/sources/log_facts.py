"""The facts of one launch of a job, as its log tells them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.entries import Entry
from nemo_patches.tools.diagnose.rank_facts import (
    NOT_TOLD,
    Condition,
    Fact,
    Motion,
    Place,
    ProcessRank,
    Value,
)
from nemo_patches.tools.diagnose.sources.lines import MOST_KEPT, Line, shown

MOST_RANKS = 1 << 20
_CLOSED_BY = re.compile(r"by ?peer \[?(\d{1,3}(?:\.\d{1,3}){3})\b")
_PROCESS = re.compile(r"(?:Killed:? process |\bpid[ =])(\d{1,9})(?:[ ,)]|$)")
_IS_PYTHON = re.compile(r"process \d{1,9}(?:,|$| \((?:py|pt_))")
_FAULT = re.compile(r"\bby GPU\b|\bamdgpu\b.*\bpid \d")
_BLOCKED = re.compile(r"\btask \S{1,80}:(\d{1,9}) blocked for")
_ONE_OF_HOST = re.compile(r"\btask \d|\blocal[ _]rank\b|\bpid\b|Killed process")
_MOST_FACTS = 8 * MOST_KEPT
_MOST_NOT_TOLD = 8  # conditions of which the log does not tell the rank
_MOST_REPORTS = 4  # folders
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-.][a-z0-9]+){0,20}")
_REPORTS = (conditions.MISSING, conditions.NODE)  # of others
_OF_EVENTS = conditions.CAUSES | {
    *(conditions.FAILED, conditions.TOLD_DEAD, conditions.TOLD_ABSENT)
}


@dataclass
class LaunchFacts:
    """The facts of one launch, bounded whatever the log holds.

    Of a rank's conditions of one kind the first is kept; of its places, and of whether it moved,
    the last. A fact's `at` is its line's number, by the clock of its file: lines of one file stand
    in the order in which they were written. What launchers tell has none: it comes at the end,
    whenever it happened.

    world_size: 0 where no line tells it. is_over: a line of the present file tells of a time-out,
    or of an end. rank_of_pid: as far as lines tell both. ranks_at: by address, likewise. patched:
    nemo_patches is on. missing_lines: Ray leaves out lines of some ranks that are like others', or
    a file was not read to its end. not_told: conditions so far of which the log does not tell the
    rank. reports_made: lines of others so far, that a rank had not come. reports: folders with
    stall reports that lines name. several_hosts: local ranks are not the job's. cure: as
    Evidence has it. ranks_of_name: of pods and hosts. texts: by citation, of lines that tell a
    condition and no rank. by_local_rank: keys of the facts whose rank is one. listed: by pid, the
    ranks of a process list. idle: as Evidence has it.
    """

    facts: dict[tuple[object, ...], Fact] = field(default_factory=dict)
    world_size: int = 0
    is_over: bool = False
    rank_of_pid: dict[int, int] = field(default_factory=dict)
    ranks_at: dict[str, set[int]] = field(default_factory=dict)
    patched: bool = False
    missing_lines: bool = False
    not_told: int = 0
    reports_made: int = 0
    reports: dict[str, None] = field(default_factory=dict)
    several_hosts: bool = False
    cure: str = ""
    ranks_of_name: dict[str, set[int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    # In order, as a set is not.
    by_local_rank: dict[tuple[object, ...], None] = field(default_factory=dict)
    listed: dict[int, int] = field(default_factory=dict)
    idle: dict[int, str] = field(default_factory=dict)

    def add(
        self, rank: int, value: Value, line: Line, own: bool = True, host: str = ""
    ) -> None:
        at = 0.0 if host else float(line.number)
        self.note(Fact(rank, value, line.cite, at, host or line.file, own), line)

    def note(self, fact: Fact, line: Line) -> None:
        if fact.rank == NOT_TOLD and self.not_told <= _MOST_NOT_TOLD:
            self.texts[line.cite] = line.text
        self.keep(fact, line.local_rank)

    def keep(self, fact: Fact, local_rank: int = NOT_TOLD) -> None:
        """local_rank: of the line, if it has no other rank."""
        key = _key(fact.rank, fact.value)
        if fact.rank != local_rank and key in self.by_local_rank:
            self.facts.pop(key, None)
            del self.by_local_rank[key]
        elif fact.rank == local_rank >= 0 and key not in self.facts:
            self.by_local_rank[key] = None
        if isinstance(fact.value, (Place, Motion)):
            self.facts.pop(key, None)
        elif (before := self.facts.get(key)) is not None:
            self.facts[key] = _with_place(before, fact)
            return
        if not NOT_TOLD <= fact.rank < MOST_RANKS or len(self.facts) >= _MOST_FACTS:
            return
        is_hint = fact.condition_kind == conditions.HINT
        if fact.rank == NOT_TOLD and not is_hint:
            self.not_told += 1
            if self.not_told > _MOST_NOT_TOLD:
                return
        self.facts[key] = fact
        self.reports_made += fact.condition_kind in _REPORTS

    def without_local_ranks(self) -> set[int]:
        """On several hosts a local rank is not the job's: move such facts to NOT_TOLD. Returns the
        local ranks.
        """
        hosts = {
            fact.host
            for fact in self.facts.values()
            if isinstance(fact.value, ProcessRank)
        } - {""}
        if not self.several_hosts and len(hosts) < 2:
            return set()
        of_local = [
            self.facts.pop(key) for key in self.by_local_rank if key in self.facts
        ]
        for fact in of_local:
            if isinstance(fact.value, Condition):
                self.keep(replace(fact, rank=NOT_TOLD))
        return {fact.rank for fact in of_local} - {
            fact.rank for fact in self.facts.values()
        }

    def has_size(self, size: str | int) -> None:
        self.world_size = max(self.world_size, min(int(size), MOST_RANKS))

    def leave_out_lines_of_ranks(self) -> None:
        """A line without a rank's prefix may be of an exception whose rank other lines tell."""
        told = {
            fact.cite
            for fact in self.facts.values()
            if fact.rank != NOT_TOLD and isinstance(fact.value, Condition)
        }
        self.leave_out(lambda fact: fact.rank == NOT_TOLD and fact.cite in told)

    def leave_out(self, which: Callable[[Fact], bool]) -> None:
        self.facts = {key: one for key, one in self.facts.items() if not which(one)}

    def leave_out_kills_for_memory(self) -> None:
        """Of nobody, where others tell the rank."""
        self.leave_out(_is_kill_for_memory)

    def leave_out_reports(self) -> None:
        """Of others, of who had not come: the job has gone on, and no rank gave up waiting."""
        if conditions.WAITED not in self.kinds:
            self.leave_out(
                lambda fact: fact.condition_kind in _REPORTS and not fact.own
            )

    def leave_out_waits(self, line: Line) -> None:
        """Of time-outs whose rank is not told: after them all ranks have gone on in that file."""
        self.leave_out(
            lambda fact: (
                fact.rank == NOT_TOLD
                and fact.condition_kind == conditions.WAITED
                and fact.host == line.file
            )
        )

    def note_pid(self, pid: int, rank: int) -> None:
        """Ray writes a worker's process id before each of its lines; a job may log it at its
        start. Containers may have one for several ranks.
        """
        if len(self.rank_of_pid) < MOST_KEPT:
            is_one = self.rank_of_pid.setdefault(pid, rank) == rank
            self.rank_of_pid[pid] = rank if is_one else NOT_TOLD

    def ranks_of_pids(self) -> dict[int, int]:
        """Local ranks, of a list of processes, count on a single host."""
        return (
            self.rank_of_pid if self.several_hosts else self.listed | self.rank_of_pid
        )

    def tell_ranks_of_killed(self) -> None:
        """The kernel names a process that it kills by its id; another file may have the rank, or
        list the processes of all others.
        """
        for key, fact in [*self.facts.items()]:
            is_killed = fact.condition_kind == conditions.KILLED
            pid = _PROCESS.search(fact.condition_text) if is_killed else None
            rank = self.rank_of_pid.get(int(pid[1]), NOT_TOLD) if pid else NOT_TOLD
            value = fact.condition
            if pid and rank == NOT_TOLD and _IS_PYTHON.search(value.text):
                rank = self.listed.get(int(pid[1]), self.unlisted)
                text = f"{value.text}; by the list of processes it is rank {rank}"
                value = replace(value, text=text)
            if fact.rank == NOT_TOLD != rank:
                del self.facts[key]
                self.keep(replace(fact, rank=rank, value=value))
                if fact.condition_text.startswith(conditions.FOR_MEMORY):
                    # Ray counts the workers that it kills, and then names each.
                    self.leave_out(_is_kill_of_nobody)

    @property
    def unlisted(self) -> int:
        """The one rank that no process of a list is. The first may be another host's."""
        ranks = set(self.listed.values())
        first = min(ranks, default=0)
        gaps = set(range(first if first > 1 else 0, max(ranks, default=0))) - ranks
        return gaps.pop() if len(gaps) == 1 < len(ranks) else NOT_TOLD

    def tell_ranks_of_faults(self) -> None:
        """A GPU's fault ends its process by SIGABRT: the kernel names that, or one ended so."""
        aborted = {
            fact.rank: fact.cite.rpartition(":")[0]
            for fact in self.facts.values()
            if fact.condition_kind == conditions.ABORTED
            and not self.has(fact.rank, conditions.WAITED)
        }
        for key, fact in [*self.facts.items()]:
            if fact.rank != NOT_TOLD or not _FAULT.search(fact.condition_text):
                continue
            pid = _PROCESS.search(fact.condition_text)
            ranks = {rank for rank, file in aborted.items() if file == fact.host}
            if pid is not None:
                ranks = {self.rank_of_pid.get(int(pid[1]), NOT_TOLD)} & aborted.keys()
            if len(ranks) == 1 and max(ranks) >= 0:
                del self.facts[key]
                value = replace(fact.condition, kind=conditions.RAISED)
                self.keep(replace(fact, rank=max(ranks), value=value))

    def tell_ranks_of_blocked(self, last: Mapping[int, Line]) -> None:
        """The kernel names a process that a disk, or a file system, has held up for minutes: that
        may be over, so its rank counts where it said less than all others, or where all others
        waited until a limit. last: each rank's last line.
        """
        held: dict[int, tuple[tuple[object, ...], Fact]] = {}
        for key, fact in [*self.facts.items()]:
            if (blocked := _BLOCKED.search(fact.condition_text)) is None:
                continue
            rank = self.rank_of_pid.get(int(blocked[1]), NOT_TOLD)
            of_host = self.ranks_named(fact.cite)
            if rank == NOT_TOLD or (of_host and rank not in of_host):
                continue
            if held.setdefault(rank, (key, fact))[1] is not fact:
                del self.facts[key]  # told again
        others = [line for rank, line in last.items() if rank not in held]
        waited = {
            fact.rank
            for fact in self.facts.values()
            if fact.condition_kind == conditions.WAITED
        }
        have_waited = 1 < self.world_size <= len((waited | held.keys()) - {NOT_TOLD})
        for rank, (key, fact) in held.items():
            line, text = last.get(rank), fact.condition_text
            is_first = (
                line is not None
                and len(others) > 1
                and all(
                    line.file == other.file and line.number < other.number
                    for other in others
                )
            )
            if not (is_first or have_waited) or rank in waited:
                text = f"{text} (rank {rank})"
                self.facts[key] = replace(fact, value=Condition(conditions.HINT, text))
                continue
            if line is not None:
                text = f'{text}; it printed last "{shown(line.text)}" [{line.cite}]'
            del self.facts[key]
            told = Condition(conditions.TOLD_APART, text)
            self.keep(replace(fact, rank=rank, value=told, own=False))

    def note_names(self, names: Mapping[str, set[int]]) -> None:
        for name, ranks in names.items():
            self.ranks_of_name.setdefault(name, set()).update(ranks)

    def ranks_named(self, text: str) -> set[int]:
        """Of the pod or the host that a text names: the one with the fewest, and not the half of
        the job.
        """
        known = self.ranks_of_name
        parts = [
            part for name in _NAME.findall(text) for part in (name, *name.split("."))
        ]
        # Which process of a host, its address does not tell.
        at = [] if _ONE_OF_HOST.search(text) else _ADDRESS.findall(text)
        ranks = [known[name] for name in (*parts, *at) if name in known]
        fewest = min(ranks, key=len, default=set())
        named = len({*chain(*known.values())})
        size = max(self.world_size, named)
        is_one_of_two = len(fewest) == 1 and named == size == 2
        return fewest if is_one_of_two or 2 * len(fewest) < size else set()

    def tell_ranks_of_named(self) -> None:
        """An event of a pod or a host is its ranks', unless they say that they waited."""
        for key, fact in [*self.facts.items()]:
            if fact.rank != NOT_TOLD or fact.condition_kind not in _OF_EVENTS:
                continue
            ranks = self.ranks_named(self.texts.get(fact.cite, ""))
            if any(self.has(rank, conditions.WAITED) for rank in ranks):
                continue
            # Which of a host's ranks that process is, its name does not tell.
            if len(ranks) > 1 and _ONE_OF_HOST.search(self.texts.get(fact.cite, "")):
                continue
            if ranks:
                del self.facts[key]
            for rank in ranks:
                self.keep(replace(fact, rank=rank))

    def explain_node(self, line: Line) -> None:
        """What the cluster tells of a node that a launcher has lost."""
        for key, fact in self.facts.items():
            text = fact.condition_text
            if fact.condition_kind == conditions.NODE and _names(text) & _names(
                line.text
            ):
                text = f"{text}; {' '.join(line.text.split())} [{line.cite}]"
                self.facts[key] = replace(
                    fact, value=replace(fact.condition, text=text)
                )

    def note_address(self, address: str, rank: int) -> None:
        """Ranks log their hosts' at their start."""
        if len(self.ranks_at) < MOST_KEPT:
            self.ranks_at.setdefault(address, set()).add(rank)

    def tell_who_closed(self) -> None:
        """Gloo names the address by which a connection was closed: it is told of the one rank there
        that says nothing of its own end.
        """
        told = {
            rank: (by[1], fact)
            for fact in self.facts.values()
            if fact.condition_kind == conditions.CUT
            and (by := _CLOSED_BY.search(fact.condition_text))
            and len(ranks := self.ranks_at.get(by[1], set())) == 1
            for rank in ranks - self.ranks()
        }
        for rank, (address, fact) in told.items() if len(told) == 1 else ():
            gone = Condition(
                conditions.GONE, f"{address}, its address, closed others' connections"
            )
            self.keep(replace(fact, rank=rank, value=gone, own=False))

    def note_reports(self, folder: str) -> None:
        if len(self.reports) < _MOST_REPORTS:
            self.reports[folder] = None

    def has_cuda_error(self, rank: int) -> bool:
        fact = self.facts.get((rank, Condition, conditions.RAISED, ""))
        return fact is not None and "CUDA error" in fact.condition_text

    def explain(self, rank: int, kind: str, text: str) -> None:
        """Say more of a condition."""
        key = (rank, Condition, kind, "")
        value = replace(self.facts[key].condition, text=text)
        self.facts[key] = replace(self.facts[key], value=value)

    def explain_exception(self, rank: int, why: str) -> None:
        raised = self.facts[rank, Condition, conditions.RAISED, ""]
        text = f"{raised.condition_text.rstrip('.')}, {why}"
        self.explain(rank, conditions.RAISED, text)

    def has(self, rank: int, condition: str) -> bool:
        return (rank, Condition, condition, "") in self.facts

    @property
    def kinds(self) -> set[str]:
        """Of conditions that are told, of any rank."""
        return {fact.condition_kind for fact in self.facts.values()} - {""}

    def ranks(self) -> set[int]:
        """Ranks of which more is known than that they belong to the job."""
        return {
            fact.rank
            for fact in self.facts.values()
            if not isinstance(fact.value, ProcessRank)
        }

    @property
    def tells_anything(self) -> bool:
        return bool(self.ranks())


def _names(text: str) -> set[str]:
    return {name for name in _NAME.findall(text) if re.search(r"\d", name)}


def _is_kill_for_memory(fact: Fact) -> bool:
    """Of nobody."""
    text = fact.condition_text
    return fact.rank == NOT_TOLD and text.startswith(conditions.FOR_MEMORY)


def _is_kill_of_nobody(fact: Fact) -> bool:
    """Nor does it name the process."""
    return _is_kill_for_memory(fact) and not _PROCESS.search(fact.condition_text)


def _with_place(before: Fact, fact: Fact) -> Fact:
    """The earlier condition, with the place of the later one of its kind."""
    old, new = before.value, fact.value
    if not (isinstance(old, Condition) and isinstance(new, Condition)) or old.where:
        return before
    return replace(before, value=replace(old, where=new.where, details=new.details))


def _key(rank: int, value: Value) -> tuple[object, ...]:
    if isinstance(value, Condition):
        return (rank, Condition, value.kind, value.text if rank == NOT_TOLD else "")
    if isinstance(value, Entry):
        return (rank, Entry, value.group, value.number)
    return (rank, type(value))
