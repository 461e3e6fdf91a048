"""What torch's process groups tell of collectives that timed out: numbers, and who had come.

Their lines' patterns are in rows.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypeAlias

from nemo_patches.text import safe
from nemo_patches.tools.diagnose import conditions, frame_text
from nemo_patches.tools.diagnose.entries import Entry
from nemo_patches.tools.diagnose.rank_facts import (
    NOT_TOLD,
    OF_MODEL,
    Condition,
    Evidence,
    Place,
)
from nemo_patches.tools.diagnose.sources.hearsay_lines import Steps, ranks_named_in
from nemo_patches.tools.diagnose.sources.lines import (
    DEFAULT_GROUPS,
    MOST_KEPT,
    Line,
    group_of,
    ranks_in,
)
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts
from nemo_patches.tools.diagnose.sources.rows import FINGERPRINT, Row

_MOST_FRAMES = 64  # of a failed collective's stack
_MOST_ROWS = 1 << 14  # of a recorder's table
_MOST_APART = 200  # collectives between a group's ranks: what is enqueued is bounded
# The group of fingerprints, which have numbers of their own
_CHECKED = "collectives checked by torch"

# Likewise of the rows of fr_trace's table
_RECORDED = "fr_trace's table"
_CELL = re.compile(
    r"(?P<kind>(?!send|recv|\w+:send|\w+:recv)[\w.:]{1,80})\("
    r"(?:input_sizes=(?P<size>\[[^()]{0,200}\]), )?.{0,200}?\bstate=(?P<state>\w{1,20})\)"
)
_ANY_SIZE = re.compile("GATHER|SCATTER|ALLTOALL|COALESCED")
_DEFAULT_BARRIERS = (":1", ":0", ":default_pg")
_DEFAULT_KEY = re.compile(r"keys?: ?/?default_pg/0/(?:/?cuda/)?/?0\b")
_STORE_GONE = re.compile(r"got error: (?:Connection|Broken pipe|failed to recv)")


# One rank's collective that timed out, without its group, and the line.
_TimedOut: TypeAlias = tuple[Entry, Line]


@dataclass
class _Barrier:
    """The store based barrier of a process group's start. line: the last one on it."""

    size: int
    came: int
    line: Line
    waiting: set[int] = field(default_factory=set)


@dataclass
class _RecorderTable:
    """What each rank has recorded, in its order. starts: of the columns; at: the last line."""

    ranks: list[int]
    starts: list[int]
    at: int
    rows: list[tuple[list[re.Match[str] | None], Line]] = field(default_factory=list)
    is_damaged: bool = False

    def take(self, line: Line) -> None:
        ends = [*self.starts[1:], len(line.text)]
        texts = [
            line.text[begin:end].strip()
            for begin, end in zip(self.starts, ends, strict=True)
        ]
        cells = [_CELL.fullmatch(text) for text in texts]
        self.is_damaged |= any(
            text and not cell for text, cell in zip(texts, cells, strict=True)
        )
        self.at = line.number
        self.rows.append((cells, line))

    def entries(self) -> list[_TimedOut]:
        """From the last row on that all have completed. None where the rows are not alike up to
        there: the ranks' records begin at different collectives.
        """
        open_at = next(
            (
                number
                for number, (cells, _) in enumerate(self.rows)
                if not all(cell and cell["state"] == "completed" for cell in cells)
            ),
            len(self.rows),
        )
        for cells, _ in self.rows[:open_at]:
            if len({(one["kind"], one["size"]) for one in cells if one}) > 1:
                return []
        begin = max(open_at - 1, 0)
        return [
            (_recorded(rank, number, cell), line)
            for number, (cells, line) in enumerate(
                self.rows[begin : begin + _MOST_APART], begin
            )
            for rank, cell in zip(self.ranks, cells, strict=True)
            if cell
        ]


def _recorded(rank: int, number: int, cell: re.Match[str]) -> Entry:
    done = cell["state"] == "completed"
    kind, size = safe(cell["kind"]), safe(cell["size"] or "")
    return Entry(rank, _RECORDED, number, kind, size, done, completed=done)


class C10dLines:
    """One launch's lines. The rank in [Rank 3] is the group's: a prefix [rank7]: before it has the
    job's.
    """

    def __init__(self, found: LaunchFacts) -> None:
        self._found = found
        # Of each rank by number, the first first
        self._timeouts: dict[int, dict[int, _TimedOut]] = defaultdict(dict)
        # Known from other lines only, without the kind
        self._unnamed: dict[int, _TimedOut] = {}
        self._groups: dict[tuple[int, int], str] = {}  # of (rank, number)
        # By group and rank: the last number enqueued, completed
        self._enqueued: dict[tuple[str, int], tuple[int, int, Line]] = {}
        self._joined: dict[int, Line] = {}  # ranks that had come, by torch's reports
        self._lagging: dict[int, tuple[str, Line]] = {}
        # Since the last report, by rank; and those that have made several
        self._steps: dict[int, Steps] = defaultdict(Steps)
        self._gone_on: set[int] = set()
        self._missing: set[int] = set()  # of fr_trace's report so far
        self._barriers: dict[str, _Barrier] = {}  # by key
        self._of_paddle: dict[tuple[int, str, int], _TimedOut] = {}
        self._stack_of: Line | None = None  # whose stack is being written
        self._stack: list[tuple[str, str, str]] = []
        self._last_frame = 0  # number of its line
        self._recorded: _RecorderTable | None = None  # fr_trace's last

    def _waited(
        self, rank: int, text: str, line: Line, own: bool = True, where: str = ""
    ) -> None:
        self._found.add(rank, Condition(conditions.WAITED, text, where), line, own)

    def take_report(self, row: Row, found: re.Match[str], line: Line) -> None:
        told, title = found.groupdict(""), row.text
        self._steps.clear()
        self._gone_on.clear()
        missing = ranks_in(told.get("missing", ""))
        for rank in missing:
            self._lagging.setdefault(rank, (title, line))
        if "fr_trace" in title:
            self._missing = set(missing)
        for rank in {*ranks_in(told.get("joined", ""))} - self._missing:
            self._joined.setdefault(rank, line)

    def take_recorder_head(self, found: re.Match[str], line: Line) -> None:
        heads = [*re.finditer(r"Rank (\d+)", line.text)][:MOST_KEPT]
        ranks, starts = [int(one[1]) for one in heads], [one.start() for one in heads]
        if len(set(ranks)) == len(ranks):
            self._recorded = _RecorderTable(ranks, starts, line.number + 1)

    def take_recorder_row(self, found: re.Match[str], line: Line) -> None:
        table = self._recorded
        if table and line.number == table.at + 1 and len(table.rows) < _MOST_ROWS:
            table.take(line)

    def _finish_recorded(self, evidence: Evidence) -> None:
        table = self._recorded
        told = table.entries() if table and not table.is_damaged else []
        for entry, line in told:
            self._found.add(entry.rank, entry, line, own=False)
            evidence.begins[_RECORDED, entry.rank] = told[0][0].number

    def take_step(self, line: Line) -> None:
        """All ranks that a report is about go on after it: they came late, and nobody is missing.

        Who goes on alone may still be where the others wait for it.
        """
        told = self._joined.keys() | self._lagging.keys()
        if not (self._joined and self._lagging):
            return
        named = {line.rank} if line.has_prefix else ranks_named_in(line.text)
        for rank in named & told if len(named) == 1 else ():
            if self._steps[rank].go_on(line.text):
                self._gone_on.add(rank)
        if told <= self._gone_on:
            self._end_report()
            self._found.leave_out_waits(line)

    def _end_report(self) -> None:
        for of_report in (self._joined, self._lagging, self._steps, self._gone_on):
            of_report.clear()

    def take_timeout(self, found: re.Match[str], line: Line) -> None:
        number, size = int(found[1] or NOT_TOLD), _size(found[3], found[4])
        one = Entry(line.rank, "", number, safe(found[2]), size)
        self._timed_out(one, line)
        self._timeouts[line.rank].setdefault(number, (one, line))

    def _timed_out(self, one: Entry, line: Line) -> None:
        number = f", SeqNum {one.number}" if one.number >= 0 else ""
        size = f" of {one.size}" if one.size else ""
        text = f"{one.kind or 'a collective'}{size}{number} timed out"
        self._waited(line.rank, text, line)

    def take_status(self, found: re.Match[str], line: Line) -> None:
        number, enqueued, completed = map(int, found.groups())
        self._note_enqueued(line, enqueued, completed)
        self._note_number(line, number)

    def _note_number(self, line: Line, number: int) -> None:
        one = Entry(line.rank, "", number)
        self._groups.setdefault((line.rank, number), group_of(line.text))
        self._unnamed.setdefault(line.rank, (one, line))
        self._timed_out(one, line)

    def _note_enqueued(self, line: Line, enqueued: int, completed: int) -> None:
        key = group_of(line.text), line.rank
        before = self._enqueued.get(key, (NOT_TOLD, 0, line))
        if enqueued > before[0]:
            self._enqueued[key] = (enqueued, completed, line)

    def take_signal(self, signal: re.Match[str], line: Line) -> None:
        """A time-out, with how far this rank has come in one group; the collective may be of
        another group.
        """
        is_own, other, *numbers = signal.groups()
        enqueued, completed = map(int, numbers)
        if other:
            text = "a collective timed out, which it told others"
            self._waited(int(other), text, line, own=False)
        if line.rank < 0:
            return
        self._note_enqueued(line, enqueued, completed)
        if is_own:
            if enqueued > completed >= 0:
                self._note_number(line, completed + 1)
            self._waited(line.rank, "a collective timed out", line)
        elif enqueued <= completed:
            self._found.add(line.rank, Condition(conditions.HEARD), line)
        elif completed >= 0:
            text = (
                f"in number {completed + 1}, when another rank's collective timed out"
            )
            self._waited(line.rank, text, line)

    def take_parameters(self, found: re.Match[str], line: Line) -> None:
        """Which rank is the odd one, only all ranks' messages tell: each compares itself with one
        other.
        """
        for rank, count in ((int(found[1]), found[2]), (int(found[3]), found[4])):
            entry = Entry(rank, OF_MODEL, 0, "", f"{count} parameters")
            self._found.add(rank, entry, line, own=rank == int(found[1]))
            self._waited(rank, "DDP found unlike models", line, own=False)

    def take_fingerprints(self, first: re.Match[str], line: Line) -> None:
        """Ranks that torch's debug wrapper found in different collectives: each waits for the
        others.
        """
        matches = [first, *FINGERPRINT.finditer(line.text, first.end())][:8]
        if len(matches) < 2:
            return
        any_size = _ANY_SIZE.search(first[3])
        for match in matches:
            rank, number = int(match[1]), int(match[2] or NOT_TOLD)
            kind = safe(match[3])
            size = f"[{match[4] or ''}] {match[5] or ''}"
            size = size.removeprefix("[] ").strip()
            # entries.py allows any size here, torch's check does not
            if any_size:
                kind, size = f"{kind} of {size}", ""
            entry = Entry(rank, _CHECKED, number, kind, size)
            self._found.add(rank, entry, line, own=False)
            self._waited(rank, "torch found unlike collectives", line, own=False)

    def take_unique_id(self, unique: re.Match[str], line: Line) -> None:
        """A rank waits for the first rank of its group to publish the communicator's id: that one
        has not come.
        """
        of_default = _DEFAULT_KEY.search(line.text) is not None
        own, first = int(unique[1]), int(unique[2])
        rank = line.rank if line.has_prefix else own if of_default else NOT_TOLD
        kind = conditions.CUT if _STORE_GONE.search(line.text) else conditions.WAITED
        text = f"for rank {first} of its group to set up an NCCL communicator"
        self._found.add(rank, Condition(kind, text), line)
        if of_default and rank == own:
            title = "the set-up of the first NCCL communicator"
            self._lagging.setdefault(first, (title, line))

    def take_paddle(self, told: re.Match[str], line: Line) -> None:
        """Paddle's watchdog tells each group's last collective, and those that timed out."""
        rank, number, group = (
            int(told["rank"]),
            int(told["number"]),
            safe(told["group"]),
        )
        entry = Entry(rank, group, number, told["kind"], told["size"] or "")
        if told["done"] == "1":
            entry = entry._replace(done=True)
        elif told["timed_out"]:
            self._waited(rank, f"{entry.kind}, number {number}, timed out", line)
        if len(self._of_paddle) < MOST_KEPT:
            self._of_paddle[rank, group, number] = entry, line

    def take_barrier(self, found: re.Match[str], line: Line) -> None:
        rank, key, size, came = int(found[2]), found[3], int(found[4]), int(found[5])
        self._found.has_size(size)
        barrier = self._barriers.setdefault(key, _Barrier(size, came, line))
        barrier.came = came
        barrier.line = line
        barrier.waiting.add(rank)
        if found[1].startswith("Timed"):
            text = f"{came} of {size} ranks had come to the store based barrier"
            self._waited(rank, f"{conditions.AT_START}: {text}", line)

    def take_passed(self, passed: re.Match[str], line: Line) -> None:
        for barrier in self._barriers.values():
            barrier.waiting.discard(int(passed[1]))

    def take_stack_begins(self, found: re.Match[str], line: Line) -> None:
        self._end_stack()
        self._stack_of, self._last_frame = line, line.number

    def take_stack_frame(self, frame: re.Match[str], line: Line) -> None:
        """The caller of the failed collective: "#2 all_reduce from /a/distributed_c10d.py:2501"."""
        if line.number != self._last_frame + 1:
            self._end_stack()
        elif len(self._stack) < _MOST_FRAMES:
            self._stack.append((frame[2], frame[3], frame[1]))
        self._last_frame = line.number

    def _end_stack(self) -> None:
        """It explains the rank's time-out, and is no look at the rank."""
        line, stack = self._stack_of, self._stack
        self._stack_of, self._stack = None, []
        if line is not None and stack and line.rank >= 0:
            where = frame_text.where(stack)
            self._waited(line.rank, "a collective timed out", line, where=where)

    # At the end of a launch.

    def finish(self, evidence: Evidence, by_file: list[set[int]]) -> None:
        """by_file: for each file, the ranks that its lines are from."""
        self._end_stack()
        self._finish_reports()
        self._finish_barriers()
        if conditions.WAITED in self._found.kinds:
            for entry, line in self._of_paddle.values():
                self._found.add(entry.rank, entry, line)
        self._finish_recorded(evidence)
        timeouts = [
            (one._replace(group=self._group(one)), line)
            for one, line in self._comparable()
        ]
        groups = {one.group for one, _ in timeouts} - {""}
        only = groups.pop() if len(groups) == 1 else ""
        by_group: dict[str, list[_TimedOut]] = defaultdict(list)
        for one, line in timeouts:
            group = one.group or only
            by_group[group].append((one._replace(group=group), line))
        for group, ones in by_group.items():
            if group or len(by_group) == 1:
                self._enter(group, ones, evidence)
        for fact in self._found.facts.values():
            if fact.entry:
                evidence.groups.setdefault(fact.entry.group, set()).add(fact.rank)
                evidence.partly_known.add(fact.entry.group)
        if len(by_group) == 1:
            self._find_silent(next(iter(by_group)), timeouts[0][1], evidence, by_file)

    def _comparable(self) -> list[_TimedOut]:
        """The first time-out of each rank; none where the numbers are of several launches, or of
        groups that cannot be told apart.
        """
        timeouts = [next(iter(one.values())) for one in self._timeouts.values()]
        has_groups = any(self._group(one) for one, _ in timeouts)
        for first, _ in timeouts:
            group = self._groups.get((first.rank, first.number), "?")
            for number in self._timeouts[first.rank]:
                if number != first.number and not has_groups:
                    return []
                is_same = self._groups.get((first.rank, number)) == group
                if number < first.number and is_same:
                    return []  # a rank's numbers rise in one launch
        return timeouts or [*self._unnamed.values()]

    def _group(self, one: Entry) -> str:
        return self._groups.get((one.rank, one.number), "")

    def _enter(self, group: str, timeouts: list[_TimedOut], evidence: Evidence) -> None:
        """Entries of one group, whose numbers can be compared. A rank has entered all that it has
        enqueued.
        """
        timeouts = [one for one in timeouts if one[0].number >= 0] or timeouts
        numbers = [one.number for one, _ in timeouts]
        highest, lowest = max(numbers), min(numbers)
        if highest - lowest > _MOST_APART:
            return
        for entry, line in timeouts:
            self._found.add(entry.rank, entry, line)
        timed_out = {one.rank for one, _ in timeouts}
        for (name, rank), (enqueued, completed, line) in self._enqueued.items():
            is_near = enqueued >= 0 and highest - enqueued <= _MOST_APART
            if name == group and rank not in timed_out and is_near:
                number = min(enqueued, highest)
                lowest = min(lowest, number)
                done = completed >= number
                entry = Entry(rank, group, number, done=done, counted=True)
                self._found.add(rank, entry, line)
        for fact in self._found.facts.values():
            if fact.entry and fact.entry.group == group:
                evidence.begins[group, fact.rank] = lowest

    def _find_silent(
        self, group: str, first: Line, evidence: Evidence, by_file: list[set[int]]
    ) -> None:
        """Ranks without any line, if they are few and most others waited."""
        # The ranks of other groups than the default one are not in the log.
        if group not in DEFAULT_GROUPS or self._found.missing_lines:
            return
        told = self._found.ranks() | {rank for _, rank in self._enqueued}
        size = self._found.world_size
        silent = set(range(size)) - told
        if 2 * len(silent) >= size or not _has_hosts_of(by_file, silent):
            return
        for rank in sorted(silent)[:64]:
            text = "the log has no line of it, and time-outs of the others"
            if printed := evidence.printed.get(rank):
                text = f"{conditions.NO_TIME_OUT}; it printed {printed}"
            unseen = Condition(conditions.UNSEEN, text)
            self._found.add(rank, unseen, first, own=False)
            evidence.groups.setdefault(group, set()).add(rank)

    def _finish_reports(self) -> None:
        came = "it had come, by torch's report"
        for rank, line in self._joined.items():
            self._waited(rank, came, line, own=False)
        waits = conditions.WAITED in self._found.kinds
        for rank, (title, line) in self._lagging.items():
            if not waits:  # who does, the report does not say
                self._waited(NOT_TOLD, came, line, own=False)
            if rank not in self._joined:
                missing = Condition(conditions.MISSING, f"to {title}")
                self._found.add(rank, missing, line, own=False)

    def _finish_barriers(self) -> None:
        waits = Place(collective="the store based barrier of a process group's start")
        for key, barrier in self._barriers.items():
            size, came, line = barrier.size, barrier.came, barrier.line
            for rank in barrier.waiting:
                # It still waits at the log's end.
                if not self._found.has(rank, conditions.WAITED):
                    self._found.add(rank, waits, line, own=False)
            # Other groups' ranks are not known; if more have come than wait, some are of an earlier
            # job.
            is_whole = len(barrier.waiting) == came < size <= MOST_KEPT
            if key.endswith(_DEFAULT_BARRIERS) and is_whole:
                text = f"to the store based barrier of the start: {came} of {size} had"
                missing = Condition(conditions.MISSING, text)
                for rank in set(range(size)) - barrier.waiting:
                    self._found.add(rank, missing, line, own=False)


def _size(shape: str | None, numel: str | None) -> str:
    """In elements; empty if the line does not say."""
    if numel:
        return str(int(numel))
    if shape is None:
        return ""
    product = 1
    for length in shape.replace(" ", "").split(","):
        product *= int(length[:9] or 1)
    return str(min(product, 1 << 60))


def _has_hosts_of(by_file: list[set[int]], silent: set[int]) -> bool:
    """Whether the silent ranks' hosts have logs among the files; True if these are not one log for
    each host.

    A host is taken to have as many ranks as the widest range in a file, with successive numbers.
    """
    of_hosts = [ranks for ranks in by_file if ranks]
    if len(of_hosts) < 2 or any(len(ranks) < 2 for ranks in of_hosts):
        return True
    size = max(max(ranks) - min(ranks) + 1 for ranks in of_hosts)
    hosts = {rank // size for ranks in of_hosts for rank in ranks}
    return all(rank // size in hosts for rank in silent)
