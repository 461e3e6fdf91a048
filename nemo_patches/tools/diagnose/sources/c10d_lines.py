"""Lines of torch's process groups: time-outs of NCCL's watchdog, Gloo and the store, and torch's
own reports.

The patterns cover torch 1.10 to 2.15.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from nemo_patches.judging.judge import Seat
from nemo_patches.text import safe
from nemo_patches.tools.diagnose import fates, frame_text
from nemo_patches.tools.diagnose.facts import NOT_TOLD, OF_MODEL, Evidence, Fate, Place
from nemo_patches.tools.diagnose.sources.log_facts import (
    MOST_KEPT,
    MOST_RANKS,
    LaunchFacts,
    Line,
    shown,
)

_MOST_FRAMES = 64  # of a failed collective's stack
_MOST_APART = (
    200  # collectives between the ranks of one group: what is enqueued is bounded
)
DEFAULT_GROUPS = ("", "0")  # "": a group that the log does not name
# The group of fingerprints, which have numbers of their own
_CHECKED = "collectives checked by torch"

# Each line that this reader understands has one of these.
_WORDS = (
    *(
        "NCCL",
        "nccl",
        "ollective",
        "arrier",
        "atchdog",
        "gloo",
        "pair closure",
        "imed out",
        "imeout",
        "store",
    ),
    *(
        "Duplicate GPU",
        "sizes: ",
        "group info",
        "Culprit",
        "ranks",
        "last enqueued",
        "remote p",
    ),
    *("dump signal", "due to timeout", "inconsistent", "gai error"),
)
_RANK = re.compile(r"\[rank(\d{1,7})\]:|\[(?:PG [^\]]{0,80})?Rank (\d{1,7})\]")
TIMEOUT = re.compile(
    r"(?:Watchdog ?caught ?collective ?operation ?timeout:|Caught ?collective"
    r" ?operation ?timeout:|\] Work) ?WorkNCCL\("
    r"(?:SeqNum=(\d{1,18}), ?)?OpType=(\w{1,40})(?:, ?TensorShape=\[([\d,"
    r" ]{0,200})\])?(?:, ?NumelIn=(\d{1,18}))?"
)
_GROUP = re.compile(
    r"\[PG ?(?:ID ?)?(\w{1,40})(?: ?PG ?GUID ?(\w{1,40}))?(?:\((\w{1,40})\))?"
)
_STATUS = re.compile(
    r"(?:at ?work|NCCL ?work|work ?sequence ?id): ?(\d{1,18}).{0,40}?"
    r"last ?enqueued ?(?:NCCL ?)?work: ?(-?\d{1,18}), ?last ?completed ?(?:NCCL"
    r" ?)?work: ?(-?\d{1,18})"
)
_FINGERPRINT = re.compile(
    r"Rank ?(\d{1,7}) ?is ?running ?collective:"
    r" ?CollectiveFingerPrint\((?:SequenceNumber=(\d{1,18}),? ?)?"
    r"OpType=(\w{1,40})(?:, ?TensorShape=\[([\d, ]{0,200})\])?(?:,"
    r" ?TensorDtypes=(\w{1,40}))?"
)
_LAGGING = re.compile(
    r"\[([\d, -]{1,2000})\] finished collective #\d{1,18}, but didn't join collective"
    r" #(\d{1,18})"
)
_NEVER_JOINED = re.compile(r"ranks? \[([\d, -]{1,2000})\] are the lagging ranks")
_JOINED = re.compile(
    r"\[([\d, -]{1,2000})\] joined but didn't finish collective #(\d{1,18})"
)
_NOT_PASSED = re.compile(
    r"(?:\[Rank (\d{1,7})\]: )?Ranks? ([\d, ]{1,20000}) failed to pass monitoredBarrier"
)
_REACHED = re.compile(r"Rank (\d{1,7}) successfully reached monitoredBarrier")
_SIGNAL = re.compile(
    r"dump ?signal ?due ?to ?a ?collective ?timeout ?from {0,3}(?:(this ?local)|rank"
    r" ?(\d{1,7}))?.{0,120}?"
    r"Last ?enqueued ?NCCL ?work: ?(-?\d{1,18}), ?last ?completed ?NCCL ?work:"
    r" ?(-?\d{1,18})"
)
_OBSERVED = re.compile(
    r"Observed flight recorder dump signal from (?:another rank|rank ?(\d{1,7}))"
)
# torch 2.15's nccl2 says no more than this.
_NCCL2 = re.compile(
    r"\[rank=(\d{1,7})\](?:\[name=([^\]]{1,40})\])? ?Aborting process on rank \d{1,7}"
    r" due to timeout"
)
# DDP's check of its parameters, on each rank against another one.
_PARAMETERS = re.compile(
    r"DDP expects same model across all ranks, but Rank (\d{1,7}) has (\d{1,9})"
    r" params, "
    r"while rank (\d{1,7}) has inconsistent (\d{1,9}) params"
)
STUCK_WATCHDOG = re.compile(
    r"watchdog got stuck for (\d{1,9}) seconds|Heartbeat monitor timed out|no heartbeat"
    r" of its watchdog|watchdog hang"
)
GLOO = re.compile(
    r"(?:gloo[/:]|ProcessGroupGloo).{0,300}?"
    r"(Timed ?out ?waiting ?\d+ ?ms[\w ]{0,60}|Connection ?closed ?by ?peer|Connection"
    r" ?reset ?by ?peer)|"
    r"(Application timeout caused pair closure)"
)
_FAILED_COLLECTIVE = (
    *("Some NCCL operations have failed", "To avoid data inconsistency"),
    "watchdog thread terminated with exception",
)
_CUDA_ERROR = re.compile(
    r"Rank (\d{1,7})\].{0,40} thread terminated with exception: (CUDA error:"
    r" .{1,200}?)(?:CUDA kernel|$)"
)
_NCCL_GONE = re.compile(
    r"ncclRemoteError|remote process exited or there was a network error|Connection"
    r" closed by remote peer"
)
_PEER = re.compile(r"(?:remote peer|[Pp]eer|from) ([\w.:\-]{1,200}<\d{1,6}>)")
# At start-up: a rank waits for others at the store.
BARRIER = re.compile(
    r"(Timed out initializing|Waiting in) (?:process group in )?store based"
    r" barrier.{0,80}?rank:? ?(\d{1,7}),.{0,20}"
    r"key: ?(\S{1,80}?) ?\(world_size=(\d{1,7}),"
    r" ?(?:worker_count|num_workers_joined)=(\d{1,7})"
)
_DEFAULT_BARRIERS = (":1", ":0", ":default_pg")
_BARRIER_PASSED = re.compile(
    r"Rank (\d{1,7}): Completed store-based barrier for (?:key:)?(\S{1,80})? ?with"
    r" (\d{1,7})"
)
_CLIENTS = re.compile(
    r"Timed out after \d{1,9} seconds waiting for (?:clients|workers)\."
    r" (\d{1,7})/(\d{1,7}) "
)
CONNECTING = re.compile(
    r"client socket has timed out after \d{1,12} ?m?s while trying to connect to"
    r" \(?([^)]{1,200})"
)
_UNRESOLVED = re.compile(
    r"(?:network addresses of \(?([^,)]{1,200})[^)]{0,40}\)? cannot be retrieved )?"
    r"\(?gai error: (-?\d{1,4}[^)\]]{0,80})"
)
UNIQUE_ID = re.compile(
    r"\[(\d{1,7})\] is setting up NCCL communicator and retr\w{1,10} ncclUniqueId from"
    r" \[(\d{1,7})\]"
)
_DEFAULT_KEY = re.compile(
    r"key: ?/?default_pg/0/(?:/cuda/)?/?0\b|keys: ?/?default_pg/0//(?:cuda//)?0\b"
)
_STORE_WAIT = re.compile(
    r"(?:wait timeout after|Timeout waiting for key)|Wait timeout\b"
)
_STORE_GONE = re.compile(r"got error: (?:Connection|Broken pipe|failed to recv)")
_DUPLICATE = re.compile(
    r"Duplicate GPU detected : rank (\d{1,7}) and rank (\d{1,7}) both on CUDA device"
    r" (\w{1,20})"
)
_FRAME_OF_FAILED = re.compile(
    r"^(?:\[rank\d{1,7}\]: ?)?#\d{1,3} (\S{1,200}) from (.{1,500}):(\d{1,9})$"
)

# fr_trace's report on one collective, over several lines.
_OF_ANALYSIS = (
    "equence number",
    "group info",
    "collective: ",
    "ranks: {",
    "input sizes",
    "Culprit",
)
_FR_BEGINS = re.compile(
    r"(?:collective|ranks joining collective)[,:]? ?(?:sequence number)[:,]?"
    r" ?(\d{1,18})|"
    r"[Cc]ollective sequence number: ?(\d{1,18})"
)
_FR_GROUP = re.compile(r"group info: ?(\w{1,40})")
_FR_KIND = re.compile(r"collective: (\w{1,20}:\w{1,60})")
_FR_MISSING = re.compile(r"missing ranks: \{([\d, ]{1,20000})\}")
_FR_SIZES = re.compile(r"input sizes: (\[.{1,200}\])")
_FR_EXPECTED = re.compile(r"expected ranks: \{([\d, ]{1,20000})\}")
_FR_CULPRIT = re.compile(
    r"Culprit rank (\d{1,7}); Error type: (\w{1,60})"
    r"(?:.{0,120}?does not match found collective type: '?([\w:]{1,60}))?"
)


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
        return (
            (self.kind or "a collective")
            + (f" of {self.size}" if self.size else "")
            + number
        )


@dataclass
class _Analysis:
    """The collective that fr_trace is reporting on."""

    number: str = ""
    group: str = ""
    kind: str = ""
    sizes: str = ""
    missing: set[int] = field(default_factory=set)
    expected: set[int] = field(default_factory=set)


class C10dLines:
    """One launch's lines. The rank in [Rank 3] is the group's: a prefix [rank7]: before it has the
    job's.
    """

    def __init__(self, found: LaunchFacts) -> None:
        self._found = found
        self._timeouts: dict[int, _TimedOut] = {}  # the first of each rank
        self._without_name: dict[
            int, _TimedOut
        ] = {}  # known from other lines only, without the kind
        self._is_ambiguous = (
            False  # a rank has time-outs with several numbers, of several groups
        )
        # By rank, numbers below its first one: of a later launch, or of another group.
        self._later_sequences: dict[int, set[int]] = defaultdict(set)
        self._groups: dict[tuple[int, int], str] = {}  # of (rank, number)
        self._enqueued: dict[
            tuple[str, int], tuple[int, int, Line]
        ] = {}  # by group and rank; the last, and completed
        self._analysis = _Analysis()
        self._joined: dict[int, Line] = {}  # ranks that had come, by these reports
        self._lagging: dict[int, tuple[str, Line]] = {}
        self._barriers: dict[
            str, tuple[int, int, set[int], Line]
        ] = {}  # by key: size, came, who waits, the last line
        self._stack_of: Line | None = (
            None  # whose rank's failed collective's stack is being written
        )
        self._stack: list[tuple[str, str, str]] = []

    def take(self, line: Line) -> None:
        text = line.text
        if self._stack_of is None and not any(words in text for words in _WORDS):
            return
        self._read(_REPORTS, line)
        if any(words in text for words in _OF_ANALYSIS):
            self._take_analysis(line)
        self._take_start_up(line)
        self._take_stack(line)
        self._read(_OF_ANY_LINE, line)
        if line.rank >= 0:
            self._take_error(line)
            self._read(_OF_A_RANKS_LINE, line)

    def _read(self, readers: Iterable[_LineReader], line: Line) -> None:
        for words, pattern, take in readers:
            if words in line.text and (found := pattern.search(line.text)):
                take(self, found, line)

    def _take_error(self, line: Line) -> None:
        text = line.text
        if (
            "CUDA error" in text
            and (error := _CUDA_ERROR.search(text))
            and not self._found.is_over
        ):
            fate = Fate(
                fates.RAISED, f"CUDA error: {shown(error[2].partition(': ')[2])}"
            )
        elif "emote" in text and _NCCL_GONE.search(text) and "NCCL INFO" not in text:
            peer = _PEER.search(text)
            told = f"; its peer: {shown(peer[1])}" if peer else ""
            if peer:  # lines before did not name it
                self._found.facts.pop((line.rank, Fate, fates.CUT, ""), None)
            fate = Fate(fates.CUT, f"remote process exited, or a network error{told}")
        elif any(words in text for words in _FAILED_COLLECTIVE):
            fate = Fate(fates.WAITED, "its NCCL operations failed, or timed out")
        else:
            return
        self._found.add(line.rank, fate, line)

    def _take_gloo(self, found: re.Match[str], line: Line) -> None:
        error = found[1] or found[2]
        kind = fates.WAITED if error.startswith(("Timed", "Application")) else fates.CUT
        self._found.add(line.rank, Fate(kind, shown(error)), line)

    def _take_stuck(self, found: re.Match[str], line: Line) -> None:
        seconds = f" for {found[1]} s" if found[1] else ""
        self._found.add(
            line.rank, Fate(fates.STUCK, f"its NCCL watchdog got stuck{seconds}"), line
        )

    def _take_work(self, found: re.Match[str], line: Line) -> None:
        number = int(found[1]) if found[1] else NOT_TOLD
        self._take_timeout(
            _TimedOut(
                line.rank, number, safe(found[2]), _size(found[3], found[4]), line
            )
        )

    def _take_timeout(self, found: _TimedOut) -> None:
        self._found.add(
            found.rank, Fate(fates.WAITED, f"{found} timed out"), found.line
        )
        if found.rank not in self._timeouts and len(self._timeouts) >= MOST_KEPT:
            return
        first = self._timeouts.setdefault(found.rank, found)
        self._is_ambiguous = self._is_ambiguous or first.number != found.number
        if found.number < first.number:
            self._later_sequences[found.rank].add(found.number)

    def _take_status(self, found: re.Match[str], line: Line) -> None:
        if len(self._groups) >= 4 * MOST_KEPT:
            return
        number, enqueued, completed = map(int, found.groups())
        name = _group_of(line.text)
        self._groups.setdefault((line.rank, number), name)
        self._without_name.setdefault(
            line.rank, _TimedOut(line.rank, number, "", "", line)
        )
        self._note_enqueued(name, line, enqueued, completed)
        self._found.add(
            line.rank,
            Fate(fates.WAITED, f"a collective, SeqNum {number}, timed out"),
            line,
        )

    def _note_enqueued(
        self, group: str, line: Line, enqueued: int, completed: int
    ) -> None:
        before = self._enqueued.get((group, line.rank))
        if before is None or enqueued > before[0]:
            self._enqueued[group, line.rank] = (enqueued, completed, line)

    def _take_signal(self, signal: re.Match[str], line: Line) -> None:
        """A time-out, with how far this rank has come in one group; the collective may be of
        another group.
        """
        name, enqueued, completed = _group_of(line.text), int(signal[3]), int(signal[4])
        if len(self._enqueued) < 4 * MOST_KEPT:
            self._note_enqueued(name, line, enqueued, completed)
        if signal[2]:
            self._found.add(
                int(signal[2]),
                Fate(fates.WAITED, "a collective timed out, which it told others"),
                line,
                own=False,
            )
        if signal[1]:
            self._found.add(
                line.rank, Fate(fates.WAITED, "a collective timed out"), line
            )
        elif enqueued <= completed:
            self._take_observed(signal, line)
        elif enqueued > completed >= 0:
            what = (
                f"in number {completed + 1}, when another rank's collective timed out"
            )
            self._found.add(line.rank, Fate(fates.WAITED, what), line)
        if (
            signal[1]
            and enqueued > completed >= 0
            and len(self._groups) < 4 * MOST_KEPT
        ):
            self._groups.setdefault((line.rank, completed + 1), name)
            self._without_name.setdefault(
                line.rank, _TimedOut(line.rank, completed + 1, "", "", line)
            )

    def _take_unresolved(self, found: re.Match[str], line: Line) -> None:
        address = f"{shown(found[1])}: " if found[1] else ""
        self._found.add(
            line.rank, Fate(fates.UNRESOLVED, f"{address}{shown(found[2])}"), line
        )

    def _take_observed(self, _: re.Match[str], line: Line) -> None:
        self._found.add(line.rank, Fate(fates.HEARD), line)

    def _take_nccl2(self, found: re.Match[str], line: Line) -> None:
        group = f" of group {safe(found[2])}" if found[2] else ""
        self._found.add(
            int(found[1]), Fate(fates.WAITED, f"a collective{group} timed out"), line
        )

    def _take_parameters(self, found: re.Match[str], line: Line) -> None:
        """Which rank is the odd one, only all ranks' messages tell: each compares itself with one
        other.
        """
        for rank, count in ((int(found[1]), found[2]), (int(found[3]), found[4])):
            seat = Seat(rank, OF_MODEL, 0, "", f"{count} parameters")
            self._found.add(rank, seat, line, own=rank == int(found[1]))
            self._found.add(
                rank, Fate(fates.WAITED, "DDP found unlike models"), line, own=False
            )

    def _take_fingerprints(self, first: re.Match[str], line: Line) -> None:
        """Ranks that torch's debug wrapper found in different collectives: each waits for the
        others.
        """
        matches = [first, *_FINGERPRINT.finditer(line.text, first.end())][:8]
        if len(matches) < 2:
            return
        any_size = re.search("GATHER|SCATTER|ALLTOALL|COALESCED", matches[0][3])
        for match in matches:
            size = f"[{match[4]}]" if match[4] is not None else ""
            size += f" {match[5]}" if match[5] else ""
            kind, number = safe(match[3]), int(match[2]) if match[2] else NOT_TOLD
            # Judging/judge.py allows any size here, torch's check does not: make it part of the
            # kind
            if any_size:
                kind, size = f"{kind} of {size}".removesuffix(" of "), ""
            self._found.add(
                int(match[1]),
                Seat(int(match[1]), _CHECKED, number, kind, size),
                line,
                own=False,
            )
            self._found.add(
                int(match[1]),
                Fate(fates.WAITED, "torch found unlike collectives"),
                line,
                own=False,
            )

    def _take_not_passed(self, barrier: re.Match[str], line: Line) -> None:
        self._name_missing(ranks_in(barrier[2]), "monitored_barrier", line)
        waiting = int(barrier[1]) if barrier[1] else line.rank
        self._found.add(waiting, Fate(fates.WAITED, "in monitored_barrier"), line)

    def _take_analysis(self, line: Line) -> None:
        text, now = line.text, self._analysis
        if begins := _FR_BEGINS.search(text):
            now = self._analysis = _Analysis(begins[1] or begins[2])
        if group := _FR_GROUP.search(text):
            now.group = group[1]
        elif missing := _FR_MISSING.search(text):
            now.missing = set(ranks_in(missing[1]))
            title = " ".join(
                filter(
                    None,
                    [now.kind or "a collective", now.number and f"number {now.number}"],
                )
            )
            self._name_missing(now.missing, title, line)
        elif expected := _FR_EXPECTED.search(text):
            now.expected = set(ranks_in(expected[1]))
            self._note_joined(now.expected - now.missing, line)
        elif culprits := list(_FR_CULPRIT.finditer(text)):
            self._take_culprits(culprits, line)
        elif sizes := _FR_SIZES.search(text):
            now.sizes = safe(sizes[1])
        elif kind := _FR_KIND.search(text):
            now.kind = safe(kind[1])

    def _take_culprits(self, culprits: list[re.Match[str]], line: Line) -> None:
        """Ranks not in the first rank's collective; if that one is wrong, fr_trace calls healthy
        ranks culprits.
        """
        now, number = self._analysis, int(self._analysis.number or NOT_TOLD)
        unlike = {int(culprit[1]): culprit for culprit in culprits}
        for rank in sorted(now.expected | unlike.keys())[:MOST_KEPT]:
            kind, size = now.kind, now.sizes
            if (culprit := unlike.get(rank)) is not None:
                if "STATE" in culprit[2]:
                    continue  # one has ended it, and another has not
                is_type = "TYPE" in culprit[2] and "DTYPE" not in culprit[2]
                kind = safe(culprit[3] or f"not {kind}") if is_type else kind
                size = size if is_type else f"not {size}"
            self._found.add(
                rank, Seat(rank, now.group, number, kind, size), line, own=False
            )
            self._found.add(
                rank, Fate(fates.WAITED, "by fr_trace's table"), line, own=False
            )

    def _name_missing(
        self, ranks: set[int] | list[int], collective: str, line: Line
    ) -> None:
        for rank in sorted(ranks)[:MOST_KEPT]:
            self._lagging.setdefault(rank, (collective, line))

    def _note_joined(self, ranks: set[int] | list[int], line: Line) -> None:
        for rank in sorted(ranks)[:MOST_KEPT]:
            self._joined.setdefault(rank, line)

    def _take_duplicate(self, found: re.Match[str], line: Line) -> None:
        """NCCL's ranks are the communicator's; they are the job's if the first one agrees with the
        line's prefix.
        """
        first, second = int(found[1]), int(found[2])
        text = (
            f"Duplicate GPU: ranks {first} and {second} both use CUDA device"
            f" {safe(found[3])}"
        )
        ranks = (first, second) if line.rank in (NOT_TOLD, first) else (line.rank,)
        for rank in ranks:
            self._found.add(rank, Fate(fates.RAISED, text), line)

    def _take_start_up(self, line: Line) -> None:
        text = line.text
        if "barrier" in text:
            if barrier := BARRIER.search(text):
                self._take_barrier(barrier, line)
            elif passed := _BARRIER_PASSED.search(text):
                for _, _, ranks, _ in self._barriers.values():
                    ranks.discard(int(passed[1]))
        if (
            "imeout" not in text
            and "imed out" not in text
            and "ncclUniqueId" not in text
        ):
            return
        if clients := _CLIENTS.search(text):
            self._found.has_size(clients[2])
            waits = Fate(
                fates.WAITED,
                f"{fates.AT_START}: {clients[1]} of {clients[2]} ranks had joined its"
                " store",
            )
            self._found.add(line.rank, waits, line)
        elif connecting := CONNECTING.search(text):
            at = shown(connecting[1])
            self._found.add(
                line.rank,
                Fate(
                    fates.WAITED,
                    f"{fates.AT_START}: it could not connect to the store at {at}",
                ),
                line,
            )
        elif unique := UNIQUE_ID.search(text):
            self._take_unique_id(unique, line)
        elif line.has_prefix and _STORE_WAIT.search(text) and "store" in text.lower():
            self._found.add(
                line.rank,
                Fate(fates.WAITED, f"at the store: {shown(text)[-120:]}"),
                line,
            )

    def _take_unique_id(self, unique: re.Match[str], line: Line) -> None:
        """A rank waits for the first rank of its group to publish the communicator's id: that one
        has not come.
        """
        of_default = _DEFAULT_KEY.search(line.text) is not None
        rank = (
            line.rank if line.has_prefix else int(unique[1]) if of_default else NOT_TOLD
        )
        text = f"for rank {unique[2]} of its group to set up an NCCL communicator"
        self._found.add(
            rank,
            Fate(fates.CUT if _STORE_GONE.search(line.text) else fates.WAITED, text),
            line,
        )
        if of_default and rank == int(unique[1]):
            self._name_missing(
                [int(unique[2])], "the set-up of the first NCCL communicator", line
            )

    def _take_barrier(self, barrier: re.Match[str], line: Line) -> None:
        rank, key, size, came = (
            int(barrier[2]),
            barrier[3],
            int(barrier[4]),
            int(barrier[5]),
        )
        self._found.has_size(size)
        _, _, ranks, _ = self._barriers.get(key, (0, 0, set[int](), line))
        if len(self._barriers) < MOST_KEPT or key in self._barriers:
            self._barriers[key] = (size, came, ranks, line)
        if len(ranks) < MOST_KEPT and rank < MOST_RANKS:
            ranks.add(rank)
        if barrier[1].startswith("Timed"):
            text = (
                f"{fates.AT_START}: {came} of {size} ranks had come to the store based"
                " barrier"
            )
            self._found.add(rank, Fate(fates.WAITED, text), line)

    def _take_stack(self, line: Line) -> None:
        """The caller of the failed collective: "#2 all_reduce from /a/distributed_c10d.py:2501"."""
        frame = (
            _FRAME_OF_FAILED.match(line.text.strip())
            if self._stack_of is not None
            else None
        )
        if frame is not None and len(self._stack) < _MOST_FRAMES:
            self._stack.append((frame[2], frame[3], frame[1]))
        elif frame is None:
            self._end_stack()
        if (
            "Stack trace of the failed collective" in line.text
            and "not found" not in line.text
        ):
            self._stack_of = line

    def _end_stack(self) -> None:
        """It explains the rank's time-out, and is no look at the rank."""
        line = self._stack_of
        if line is not None and self._stack and line.rank >= 0:
            where = frame_text.where(self._stack)
            self._found.add(
                line.rank, Fate(fates.WAITED, "a collective timed out", where), line
            )
        self._stack_of = None
        self._stack = []

    # At the end of a launch.

    def finish(self, evidence: Evidence, by_file: list[set[int]]) -> None:
        """by_file: for each file, the ranks that its lines are from."""
        self._end_stack()
        self._finish_reports()
        self._finish_barriers()
        timeouts = list((self._timeouts or self._without_name).values())
        groups = {self._groups.get((one.rank, one.number), "") for one in timeouts} - {
            ""
        }
        several_launches = any(
            self._groups.get((rank, number))
            == self._groups.get((rank, self._timeouts[rank].number), "?")
            for rank, numbers in self._later_sequences.items()
            for number in numbers
        )
        if several_launches or (self._is_ambiguous and not groups):
            timeouts = []  # numbers of several launches, or groups, that cannot be told apart
        by_group: dict[str, list[_TimedOut]] = defaultdict(list)
        only = next(iter(groups)) if len(groups) == 1 else ""
        for one in timeouts:
            by_group[self._groups.get((one.rank, one.number), "") or only].append(one)
        for group, ones in by_group.items():
            if group or len(by_group) == 1:
                self._seat(group, ones, evidence)
        for fact in self._found.facts.values():
            if fact.seat:
                evidence.groups.setdefault(fact.seat.group, set()).add(fact.rank)
                evidence.partly_known.add(fact.seat.group)
        if len(by_group) == 1:
            self._find_silent(next(iter(by_group)), timeouts[0], evidence, by_file)

    def _seat(self, group: str, timeouts: list[_TimedOut], evidence: Evidence) -> None:
        """Seats of one group, whose numbers can be compared. A rank has entered all that it has
        enqueued.
        """
        numbered = [one for one in timeouts if one.number >= 0]
        timeouts = numbered or timeouts
        highest = max(one.number for one in timeouts)
        lowest = min(one.number for one in timeouts)
        if highest - lowest > _MOST_APART:
            return
        for one in timeouts:
            self._found.add(
                one.rank,
                Seat(one.rank, group, one.number, one.kind, one.size),
                one.line,
            )
        timed_out = {one.rank for one in timeouts}
        for (name, rank), (enqueued, completed, line) in self._enqueued.items():
            if (
                name == group
                and rank not in timed_out
                and enqueued >= 0
                and highest - enqueued <= _MOST_APART
            ):
                number = min(enqueued, highest)
                lowest = min(lowest, number)
                self._found.add(
                    rank, Seat(rank, group, number, done=completed >= number), line
                )
        for fact in self._found.facts.values():
            if fact.seat and fact.seat.group == group:
                evidence.begins[group, fact.rank] = lowest

    def _find_silent(
        self, group: str, first: _TimedOut, evidence: Evidence, by_file: list[set[int]]
    ) -> None:
        """Ranks without any line, if they are few and most others waited."""
        # The ranks of other groups than the default one are not in the log.
        if group not in DEFAULT_GROUPS or self._found.missing_lines:
            return
        told = self._found.ranks() | {rank for _, rank in self._enqueued}
        silent = set(range(self._found.world_size)) - told
        if (
            not silent
            or 2 * len(silent) >= self._found.world_size
            or not _has_hosts_of(by_file, silent)
        ):
            return
        text = "the log has no line of it, and time-outs of the others"
        for rank in sorted(silent)[:64]:
            self._found.add(rank, Fate(fates.UNSEEN, text), first.line, own=False)
            evidence.groups.setdefault(group, set()).add(rank)

    def _finish_reports(self) -> None:
        for rank, line in self._joined.items():
            self._found.add(
                rank,
                Fate(fates.WAITED, "it had come, by torch's report"),
                line,
                own=False,
            )
        for rank, (collective, line) in self._lagging.items():
            if rank not in self._joined:
                self._found.add(
                    rank, Fate(fates.MISSING, f"to {collective}"), line, own=False
                )
            else:
                self._found.add(
                    rank,
                    Fate(fates.WAITED, "reports contradict each other"),
                    line,
                    own=False,
                )
        if (
            self._lagging
            and not self._joined
            and not any(
                isinstance(fact.value, Fate) and fact.value.kind == fates.WAITED
                for fact in self._found.facts.values()
            )
        ):
            line = next(iter(self._lagging.values()))[1]
            self._found.add(
                NOT_TOLD,
                Fate(fates.WAITED, "in a collective, by torch's report"),
                line,
                own=False,
            )

    def _finish_barriers(self) -> None:
        for key, (size, came, ranks, line) in self._barriers.items():
            for rank in ranks:
                if not self._found.has(
                    rank, fates.WAITED
                ):  # it still waits at the end of the log
                    place = Place(
                        collective="the store based barrier of a process group's start"
                    )
                    self._found.add(rank, place, line, own=False)
            # Other groups' ranks are not known; if more have come than wait, some are of an earlier
            # job.
            if (
                key.endswith(_DEFAULT_BARRIERS)
                and len(ranks) == came < size <= MOST_KEPT
            ):
                for rank in set(range(size)) - ranks:
                    text = (
                        f"to the store based barrier of the start: {came} of {size} had"
                    )
                    self._found.add(rank, Fate(fates.MISSING, text), line, own=False)


_LineReader: TypeAlias = tuple[
    str, re.Pattern[str], Callable[[C10dLines, re.Match[str], Line], None]
]
# Words that the line has, its pattern, and the method that takes it. First torch's own reports, on
# a desync and by monitored_barrier.
_REPORTS: tuple[_LineReader, ...] = (
    ("CollectiveFingerPrint", _FINGERPRINT, C10dLines._take_fingerprints),
    ("due to timeout", _NCCL2, C10dLines._take_nccl2),
    ("inconsistent", _PARAMETERS, C10dLines._take_parameters),
    (
        "lagging ranks",
        _NEVER_JOINED,
        lambda own, by, line: own._name_missing(
            ranks_in(by[1]), "any collective", line
        ),
    ),
    (
        "finished collective",
        _LAGGING,
        lambda own, by, line: own._name_missing(
            ranks_in(by[1]), f"collective {by[2]}", line
        ),
    ),
    (
        "joined but",
        _JOINED,
        lambda own, by, line: own._note_joined(ranks_in(by[1]), line),
    ),
    ("monitoredBarrier", _NOT_PASSED, C10dLines._take_not_passed),
    (
        "monitoredBarrier",
        _REACHED,
        lambda own, by, line: own._note_joined([int(by[1])], line),
    ),
)
_OF_ANY_LINE: tuple[_LineReader, ...] = (
    ("gai error", _UNRESOLVED, C10dLines._take_unresolved),
    ("Duplicate GPU", _DUPLICATE, C10dLines._take_duplicate),
    ("loo", GLOO, C10dLines._take_gloo),
    ("pair closure", GLOO, C10dLines._take_gloo),
)
_OF_A_RANKS_LINE: tuple[_LineReader, ...] = (
    ("got stuck", STUCK_WATCHDOG, C10dLines._take_stuck),
    *(
        (words, STUCK_WATCHDOG, C10dLines._take_stuck)
        for words in ("Heartbeat", "no heartbeat", "watchdog hang")
    ),
    ("WorkNCCL", TIMEOUT, C10dLines._take_work),
    ("enqueued", _STATUS, C10dLines._take_status),
    ("dump", _SIGNAL, C10dLines._take_signal),
    ("dump signal", _OBSERVED, C10dLines._take_observed),
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
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if (
            first.isdigit()
            and (last or first).isdigit()
            and int(first[:8]) <= int((last or first)[:8])
        ):
            ranks += range(
                int(first[:8]),
                min(int((last or first)[:8]) + 1, int(first[:8]) + MOST_KEPT),
            )
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
