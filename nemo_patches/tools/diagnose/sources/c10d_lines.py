"""Lines of torch's process groups:
time-outs of NCCL's watchdog, Gloo and the store, and torch's own reports.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from nemo_patches.text import safe
from nemo_patches.tools.diagnose import conditions, frame_text
from nemo_patches.tools.diagnose.entries import Entry
from nemo_patches.tools.diagnose.facts import (
    NOT_TOLD,
    OF_MODEL,
    Condition,
    Evidence,
    Place,
)
from nemo_patches.tools.diagnose.sources.log_facts import (
    MOST_KEPT,
    LaunchFacts,
    Line,
    shown,
)

_MOST_FRAMES = 64  # of a failed collective's stack
_MOST_APART = 200  # collectives between a group's ranks: what is enqueued is bounded
DEFAULT_GROUPS = ("", "0")  # "": a group that the log does not name
# The group of fingerprints, which have numbers of their own
_CHECKED = "collectives checked by torch"

_RANK = re.compile(r"\[rank(\d{1,7})\]:|\[(?:PG [^\]]{0,80})?Rank (\d{1,7})\]")
_GROUP = re.compile(
    r"\[PG ?(?:ID ?)?(\w{1,40})(?: ?PG ?GUID ?(\w{1,40}))?(?:\((\w{1,40})\))?"
)
_TIMEOUT = re.compile(
    r"(?:aught ?collective ?operation ?timeout:|\] Work) ?WorkNCCL\((?:SeqNum=(\d{1,18}), ?)?"
    r"OpType=(\w{1,40})(?:, ?TensorShape=\[([\d, ]{0,200})\])?(?:, ?NumelIn=(\d{1,18}))?"
)
_STATUS = re.compile(
    r"(?:at ?work|NCCL ?work|work ?sequence ?id): ?(\d{1,18}).{0,40}?last ?enqueued ?(?:NCCL ?)?"
    r"work: ?(-?\d{1,18}), ?last ?completed ?(?:NCCL ?)?work: ?(-?\d{1,18})"
)
_FINGERPRINT = re.compile(
    r"Rank ?(\d{1,7}) ?is ?running ?collective: ?CollectiveFingerPrint\("
    r"(?:SequenceNumber=(\d{1,18}),? ?)?OpType=(\w{1,40})(?:, ?TensorShape=\[([\d, ]{0,200})\])?"
    r"(?:, ?TensorDtypes=(\w{1,40}))?"
)
_SIGNAL = re.compile(
    r"(?:dump ?signal ?due ?to ?a ?collective|global) ?timeout ?from {0,3}"
    r"(?:(this ?local)|(?:another ?)?rank ?(\d{1,7})?)?"
    r".{0,120}?[Ll]ast ?enqueued ?(?:NCCL ?)?work: ?(-?\d{1,18}), ?last ?completed ?(?:NCCL ?)?"
    r"work: ?(-?\d{1,18})"
)
# DDP's check of its parameters, on each rank against another one.
_PARAMETERS = re.compile(
    r"DDP expects same model across all ranks, but Rank (\d{1,7}) has (\d{1,9}) params, "
    r"while rank (\d{1,7}) has inconsistent (\d{1,9}) params"
)
STUCK_WATCHDOG = re.compile(
    r"watchdog got stuck for \d{1,9} seconds|Heartbeat monitor timed out|"
    r"no heartbeat of its watchdog|watchdog hang"
)
_OF_GLOO = r"(?:gloo[/:]|ProcessGroupGloo).{0,300}?"
GLOO = re.compile(
    rf"(?:{_OF_GLOO}|(?=Application))(?P<error>Timed ?out ?waiting ?\d+ ?ms[\w ]{{0,60}}|"
    r"Application timeout caused pair closure)"
)
GLOO_CLOSED = re.compile(
    rf"{_OF_GLOO}(?P<error>Connection ?(?:closed|reset) ?by ?peer)"
)
_GONE = (
    r"^(?!.*NCCL INFO).*?(?:ncclRemoteError|Connection closed by remote peer|"
    r"remote process exited or there was a network error)"
)
# At start-up: a rank waits for others at the store.
BARRIER = re.compile(
    r"(Timed out initializing|Waiting in) (?:process group in )?store based barrier.{0,80}?"
    r"rank:? ?(\d{1,7}),.{0,20}key: ?(\S{1,80}?) ?\(world_size=(\d{1,7}),"
    r" ?(?:worker_count|num_workers_joined)=(\d{1,7})"
)
_DEFAULT_BARRIERS = (":1", ":0", ":default_pg")
_BARRIER_PASSED = re.compile(r"Rank (\d{1,7}): Completed store-based barrier for ")
CONNECTING = re.compile(
    r"client socket has timed out after \d{1,12} ?m?s while trying to connect to"
    r" \(?(?P<at>[^)]{1,200})"
)
UNIQUE_ID = re.compile(
    r"\[(\d{1,7})\] is setting up NCCL communicator and retr\w{1,10} ncclUniqueId from"
    r" \[(\d{1,7})\]"
)
_DEFAULT_KEY = re.compile(r"keys?: ?/?default_pg/0/(?:/?cuda/)?/?0\b")
_STORE_GONE = re.compile(r"got error: (?:Connection|Broken pipe|failed to recv)")
_STACK_BEGINS = re.compile(r"Stack trace of the failed collective(?!.*not found)")
_FRAME_OF_FAILED = re.compile(
    r"(?:\[rank\d{1,7}\]: ?)?#\d{1,3} (\S{1,200}) from (.{1,500}):(\d{1,9})$"
)
# torch's own reports: what the ranks in the group "missing" had not come to, and the pattern. Those
# in its group "joined" had.
_REPORTS = (
    (
        "any collective",
        re.compile(r"ranks? \[(?P<missing>[\d, -]{1,2000})\] are the lagging ranks"),
    ),
    (
        "the next collective",
        re.compile(
            r"\[(?P<missing>[\d, -]{1,2000})\] finished coll.{0,40} didn't join"
        ),
    ),
    (
        "",
        re.compile(
            r"\[(?P<joined>[\d, -]{1,2000})\] joined but didn't finish collective"
        ),
    ),
    (
        "monitored_barrier",
        re.compile(
            r"(?:\[Rank (?P<joined>\d{1,7})\]: )?Ranks? (?P<missing>[\d, ]{1,20000}) failed to"
            r" pass monitoredBarrier"
        ),
    ),
    (
        "",
        re.compile(r"Rank (?P<joined>\d{1,7}) successfully reached monitoredBarrier"),
    ),
    # fr_trace's; who was expected is in the line after who is missing
    (
        "a collective, by fr_trace",
        re.compile(r"missing ranks: \{(?P<missing>[\d, ]{1,20000})\}"),
    ),
    ("", re.compile(r"expected ranks: \{(?P<joined>[\d, ]{1,20000})\}")),
)
# What lines tell of the rank in the group "rank", else of the line's.
_CONDITIONS = (
    (
        re.compile(
            r"^(?=.*\(gai error: )(?:.*network addresses of \(?(?P<at>[^,)]{1,200})[^)]{0,40}\)?"
            r" cannot be retrieved )?.*?\(gai error: (?P<why>-?\d{1,4}[^)]{0,80})"
        ),
        Condition(conditions.UNRESOLVED, "{at}: {why}"),
    ),
    (
        re.compile(  # torch 2.15's nccl2 says no more than this
            r"\[rank=(?P<rank>\d{1,7})\](?:\[name=(?P<name>[^\]]{1,40})\])? ?Aborting process on"
            r" rank \d{1,7} due to timeout"
        ),
        Condition(conditions.WAITED, "a collective of group {name} timed out"),
    ),
    (
        re.compile(
            r"Timed out after \d{1,9} seconds waiting for (?:clients|workers)\."
            r" (?P<came>\d{1,7})/(?P<size>\d{1,7}) "
        ),
        Condition(
            conditions.WAITED,
            f"{conditions.AT_START}: {{came}} of {{size}} ranks had joined its store",
        ),
    ),
    (GLOO, Condition(conditions.WAITED, "{error}")),
    (GLOO_CLOSED, Condition(conditions.CUT, "{error}")),
    (
        re.compile(
            r"Duplicate GPU detected : rank (?P<first>\d{1,7}) and rank"
            r" (?P<second>\d{1,7}) both on CUDA device (?P<device>\w{1,20})"
        ),
        Condition(
            conditions.RAISED,
            "Duplicate GPU: ranks {first} and {second} both use CUDA device {device}",
        ),
    ),
    (
        CONNECTING,
        Condition(
            conditions.WAITED,
            f"{conditions.AT_START}: it could not connect to the store at {{at}}",
        ),
    ),
)
# Likewise, of lines with a rank alone.
_OF_RANKS = (
    (
        re.compile(_GONE),
        Condition(conditions.CUT, "remote process exited, or a network error"),
    ),
    (
        re.compile(
            rf"^(?:(?={_GONE})|(?!.*NCCL INFO)(?=.*(?:socketProgress|NET/))).*?"
            r"(?:[Pp]eer|from) (?P<peer>[\w.:\-]{1,200}<\d{1,6}>)"
        ),
        Condition(
            conditions.CUT,
            "remote process exited, or a network error; its peer: {peer}",
        ),
    ),
    (
        re.compile(
            r"thread terminated with exception: (?P<error>CUDA error: .{1,200}?)(?:CUDA kernel|$)"
        ),
        Condition(conditions.RAISED, "{error}"),
    ),
    (
        re.compile(
            "Some NCCL operations have failed|To avoid data inconsistency|"
            "watchdog thread terminated with exception"
        ),
        Condition(conditions.WAITED, "its NCCL operations failed, or timed out"),
    ),
    (STUCK_WATCHDOG, Condition(conditions.STUCK, "its NCCL watchdog got stuck")),
    (
        re.compile(
            "Observed flight recorder dump signal from|"
            "Received a global timeout from another rank"
        ),
        Condition(conditions.HEARD),
    ),
)
_OF_EITHER = (*_CONDITIONS, *_OF_RANKS)


@dataclass(frozen=True)
class _TimedOut:
    """One rank's collective that timed out. If not known, number is NOT_TOLD, kind and size are
    empty.
    """

    rank: int
    number: int
    kind: str
    size: str
    line: Line

    def __str__(self) -> str:
        number = f", SeqNum {self.number}" if self.number >= 0 else ""
        size = f" of {self.size}" if self.size else ""
        return f"{self.kind or 'a collective'}{size}{number} timed out"


@dataclass
class _Barrier:
    """The store based barrier of a process group's start. line: the last one on it."""

    size: int
    came: int
    line: Line
    waiting: set[int] = field(default_factory=set)


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
        self._missing: set[int] = set()  # of fr_trace's report so far
        self._barriers: dict[str, _Barrier] = {}  # by key
        self._stack_of: Line | None = None  # whose stack is being written
        self._stack: list[tuple[str, str, str]] = []

    def take(self, line: Line) -> None:
        text = line.text
        if self._stack_of is not None:
            self._take_frame(line)
        for pattern, take in _READERS:
            if found := pattern.search(text):
                take(self, found, line)
        for title, pattern in _REPORTS:
            if found := pattern.search(text):
                self._take_report(found.groupdict(""), title, line)
        for pattern, told in _CONDITIONS if line.rank < 0 else _OF_EITHER:
            if found := pattern.search(text):
                self._take_condition(found.groupdict(""), told, line)

    def _take_condition(
        self, told: dict[str, str], condition: Condition, line: Line
    ) -> None:
        if condition.kind == conditions.RAISED and self._found.is_over:
            return
        if "size" in told:
            self._found.has_size(told["size"])
        rank = int(told.pop("rank", line.rank))
        words = {name: shown(text) for name, text in told.items()}
        text = condition.text.format(**words).removeprefix(": ")
        if "peer" in told:  # lines before did not name it
            self._found.facts.pop((rank, Condition, condition.kind, ""), None)
        ranks = [rank]
        # NCCL's are the communicator's; the job's if the first agrees with the line's
        if "second" in told and rank in (NOT_TOLD, int(told["first"])):
            ranks = [int(told["first"]), int(told["second"])]
        for each in ranks:
            self._found.add(each, Condition(condition.kind, text), line)

    def _waited(
        self, rank: int, text: str, line: Line, own: bool = True, where: str = ""
    ) -> None:
        self._found.add(rank, Condition(conditions.WAITED, text, where), line, own)

    def _take_report(self, told: dict[str, str], title: str, line: Line) -> None:
        missing = ranks_in(told.get("missing", ""))
        for rank in missing:
            self._lagging.setdefault(rank, (title, line))
        if "fr_trace" in title:
            self._missing = set(missing)
        for rank in {*ranks_in(told.get("joined", ""))} - self._missing:
            self._joined.setdefault(rank, line)

    def _take_timeout(self, found: re.Match[str], line: Line) -> None:
        if line.rank < 0:
            return
        number = int(found[1]) if found[1] else NOT_TOLD
        size = _size(found[3], found[4])
        one = _TimedOut(line.rank, number, safe(found[2]), size, line)
        self._waited(line.rank, str(one), line)
        self._timeouts[line.rank].setdefault(number, one)

    def _take_status(self, found: re.Match[str], line: Line) -> None:
        number, enqueued, completed = map(int, found.groups())
        if line.rank >= 0:
            self._note_enqueued(line, enqueued, completed)
            self._note_number(line, number)

    def _note_number(self, line: Line, number: int) -> None:
        one = _TimedOut(line.rank, number, "", "", line)
        self._groups.setdefault((line.rank, number), _group_of(line.text))
        self._unnamed.setdefault(line.rank, one)
        self._waited(line.rank, str(one), line)

    def _note_enqueued(self, line: Line, enqueued: int, completed: int) -> None:
        key = _group_of(line.text), line.rank
        before = self._enqueued.get(key, (NOT_TOLD, 0, line))
        if enqueued > before[0]:
            self._enqueued[key] = (enqueued, completed, line)

    def _take_signal(self, signal: re.Match[str], line: Line) -> None:
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

    def _take_parameters(self, found: re.Match[str], line: Line) -> None:
        """Which rank is the odd one, only all ranks' messages tell: each compares itself with one
        other.
        """
        for rank, count in ((int(found[1]), found[2]), (int(found[3]), found[4])):
            entry = Entry(rank, OF_MODEL, 0, "", f"{count} parameters")
            self._found.add(rank, entry, line, own=rank == int(found[1]))
            self._waited(rank, "DDP found unlike models", line, own=False)

    def _take_fingerprints(self, first: re.Match[str], line: Line) -> None:
        """Ranks that torch's debug wrapper found in different collectives: each waits for the
        others.
        """
        matches = [first, *_FINGERPRINT.finditer(line.text, first.end())][:8]
        if len(matches) < 2:
            return
        any_size = re.search("GATHER|SCATTER|ALLTOALL|COALESCED", first[3])
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

    def _take_unique_id(self, unique: re.Match[str], line: Line) -> None:
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

    def _take_barrier(self, found: re.Match[str], line: Line) -> None:
        rank, key, size, came = int(found[2]), found[3], int(found[4]), int(found[5])
        self._found.has_size(size)
        barrier = self._barriers.setdefault(key, _Barrier(size, came, line))
        barrier.came = came
        barrier.line = line
        barrier.waiting.add(rank)
        if found[1].startswith("Timed"):
            text = f"{came} of {size} ranks had come to the store based barrier"
            self._waited(rank, f"{conditions.AT_START}: {text}", line)

    def _take_passed(self, passed: re.Match[str], line: Line) -> None:
        for barrier in self._barriers.values():
            barrier.waiting.discard(int(passed[1]))

    def _begin_stack(self, found: re.Match[str], line: Line) -> None:
        self._stack_of = line

    def _take_frame(self, line: Line) -> None:
        """The caller of the failed collective: "#2 all_reduce from /a/distributed_c10d.py:2501"."""
        frame = _FRAME_OF_FAILED.match(line.text.strip())
        if frame is not None and len(self._stack) < _MOST_FRAMES:
            self._stack.append((frame[2], frame[3], frame[1]))
        elif frame is None:
            self._end_stack()

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
        timeouts = self._comparable()
        groups = {self._groups.get((one.rank, one.number), "") for one in timeouts}
        groups -= {""}
        by_group: dict[str, list[_TimedOut]] = defaultdict(list)
        only = next(iter(groups)) if len(groups) == 1 else ""
        for one in timeouts:
            by_group[self._groups.get((one.rank, one.number), "") or only].append(one)
        for group, ones in by_group.items():
            if group or len(by_group) == 1:
                self._entry(group, ones, evidence)
        for fact in self._found.facts.values():
            if fact.entry:
                evidence.groups.setdefault(fact.entry.group, set()).add(fact.rank)
                evidence.partly_known.add(fact.entry.group)
        if len(by_group) == 1:
            self._find_silent(next(iter(by_group)), timeouts[0], evidence, by_file)

    def _comparable(self) -> list[_TimedOut]:
        """The first time-out of each rank; none where the numbers are of several launches, or of
        groups that cannot be told apart.
        """
        timeouts = [next(iter(one.values())) for one in self._timeouts.values()]
        has_groups = any(self._groups.get((one.rank, one.number)) for one in timeouts)
        for first in timeouts:
            group = self._groups.get((first.rank, first.number), "?")
            for number in self._timeouts[first.rank]:
                is_lower = number < first.number
                if number != first.number and not has_groups:
                    return []
                if is_lower and self._groups.get((first.rank, number)) == group:
                    return []  # a rank's numbers rise in one launch
        return timeouts or [*self._unnamed.values()]

    def _entry(self, group: str, timeouts: list[_TimedOut], evidence: Evidence) -> None:
        """Entries of one group, whose numbers can be compared. A rank has entered all that it has
        enqueued.
        """
        timeouts = [one for one in timeouts if one.number >= 0] or timeouts
        highest = max(one.number for one in timeouts)
        lowest = min(one.number for one in timeouts)
        if highest - lowest > _MOST_APART:
            return
        for one in timeouts:
            entry = Entry(one.rank, group, one.number, one.kind, one.size)
            self._found.add(one.rank, entry, one.line)
        timed_out = {one.rank for one in timeouts}
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
        self, group: str, first: _TimedOut, evidence: Evidence, by_file: list[set[int]]
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
        text = "the log has no line of it, and time-outs of the others"
        for rank in sorted(silent)[:64]:
            self._found.add(
                rank, Condition(conditions.UNSEEN, text), first.line, own=False
            )
            evidence.groups.setdefault(group, set()).add(rank)

    def _finish_reports(self) -> None:
        came = "it had come, by torch's report"
        for rank, line in self._joined.items():
            self._waited(rank, came, line, own=False)
        waits = any(
            one.condition_kind == conditions.WAITED
            for one in self._found.facts.values()
        )
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
                if not self._found.has(
                    rank, conditions.WAITED
                ):  # it still waits at the log's end
                    self._found.add(rank, waits, line, own=False)
            # Other groups' ranks are not known; if more have come than wait, some are of an earlier
            # job.
            is_whole = len(barrier.waiting) == came < size <= MOST_KEPT
            if key.endswith(_DEFAULT_BARRIERS) and is_whole:
                text = f"to the store based barrier of the start: {came} of {size} had"
                for rank in set(range(size)) - barrier.waiting:
                    self._found.add(
                        rank, Condition(conditions.MISSING, text), line, own=False
                    )


_READERS: tuple[
    tuple[re.Pattern[str], Callable[[C10dLines, re.Match[str], Line], None]], ...
] = (
    (_TIMEOUT, C10dLines._take_timeout),
    (_STATUS, C10dLines._take_status),
    (_SIGNAL, C10dLines._take_signal),
    (_FINGERPRINT, C10dLines._take_fingerprints),
    (_PARAMETERS, C10dLines._take_parameters),
    (BARRIER, C10dLines._take_barrier),
    (_BARRIER_PASSED, C10dLines._take_passed),
    (UNIQUE_ID, C10dLines._take_unique_id),
    (_STACK_BEGINS, C10dLines._begin_stack),
)


def rank_in(text: str) -> int | None:
    """The job's rank, by a line's prefix; None for [PG 3 Rank 1] alone, which has the group's."""
    if (prefix := _RANK.search(text)) is None:
        return None
    if prefix[1]:
        return int(prefix[1])
    return (
        int(prefix[2])
        if _group_of(prefix[0]) in DEFAULT_GROUPS or "PG ID" not in prefix[0]
        else None
    )


def _group_of(text: str) -> str:
    group = _GROUP.search(text)
    if group is None:
        return ""
    number = safe(group[2] or group[1])
    is_named = group[3] and number not in DEFAULT_GROUPS
    return f"{number} ({safe(group[3])})" if is_named else number


def ranks_in(text: str) -> list[int]:
    """ "0, 2-4": [0, 2, 3, 4]; at most MOST_KEPT."""
    ranks: list[int] = []
    for first, last in re.findall(r"(\d{1,7})(?:-(\d{1,7}))?", text.replace(" ", "")):
        begin = int(first)
        ranks += range(begin, min(int(last or first), begin + MOST_KEPT) + 1)
    return ranks[:MOST_KEPT]


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
