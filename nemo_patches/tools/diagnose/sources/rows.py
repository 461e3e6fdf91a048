"""The table of single lines: its words, its pattern, and the fact that such a line tells.

The last rows are general: words that no other row knows. What they tell is hearsay, with its line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.facts import NOT_TOLD, Condition
from nemo_patches.tools.diagnose.sources.c10d_lines import ranks_in
from nemo_patches.tools.diagnose.sources.log_facts import MOST_KEPT, LaunchFacts, Line

_MOST_RANK = 1 << 12  # of a general row: larger numbers are process ids


class _Row(NamedTuple):
    """words: one of these is in the line, split by |. The pattern's groups: ranks: whose fact it
    is; others go into the text.
    """

    words: str
    pattern: re.Pattern[str]
    kind: str
    text: str


_ROWS = (
    _Row(
        "Notify record",
        re.compile(
            r"has not received the Notify record from remote rank: ?\[(?P<ranks>\d{1,7})\]"
            r".{0,200}tag\[(?P<tag>\w{1,80})"
        ),
        conditions.MISSING,
        "to {tag}, by HCCL",
    ),
    # What was wrong around the ranks.
    _Row(
        "NVRM|NVLink|nvlink",
        re.compile(
            r"(?:NVRM: |nvidia-nvlink: )(?P<what>(?:Xid|GPU|NVLink|Fatal).{1,200})|"
            r"(?=.*(?:rror|atal|down))(?P<link>NVLink.{1,200})"
        ),
        conditions.HINT,
        "the kernel: {what}{link}",
    ),
    _Row(
        "kernel|blocked for|not responding|mlx5",
        re.compile(
            r"(?P<what>INFO: task \S{1,80} blocked for more than \d{1,9} seconds|"
            r"nfs: server \S{1,200} not responding.{0,40}|"
            r"mlx5_\S{1,20}: .{0,80}(?:[Ll]ink down|health|[Ff]atal).{0,80}|"
            r"EDAC .{0,80}UE .{0,80}|Machine check events logged)"
        ),
        conditions.HINT,
        "the kernel: {what}",
    ),
    _Row(
        "Culprit rank",
        re.compile(r"(?P<what>Culprit rank \d{1,7}; Error type: .{1,2000})"),
        conditions.HINT,
        "fr_trace: {what}",
    ),
    _Row(
        "NCCL WARN",
        re.compile(r"NCCL WARN (?P<what>.{1,200})"),
        conditions.HINT,
        "NCCL: {what}",
    ),
    _Row(
        "SIGSEGV|SIGBUS|SIGILL|SIGFPE",
        re.compile(r"^\W{0,20}(?P<what>SIG(?:SEGV|BUS|ILL|FPE)) received"),
        conditions.HINT,
        "{what} received",
    ),
    _Row(
        "@",
        re.compile(
            r"^.{0,60}?@ +0x[0-9a-f]+ +(?:\(?\w+\)? +)?(?P<what>nccl\w{1,80})\("
        ),
        conditions.HINT,
        "its native stack is in {what}",
    ),
)
_BY_WORDS = tuple((tuple(row.words.split("|")), row) for row in _ROWS)
# NCCL's RAS: a communicator, ranks of one state, and these ranks if they are few.
_RAS_GROUP = re.compile(r"^#(\d{1,6}-\d{1,6}) \(\w{1,40}\) [A-Z]")
_RAS_STATE = re.compile(
    r"^\s{1,4}(?P<count>\d{1,7}) ranks? (?:has|have)"
    r" (?P<what>(?:launched up to operation (?P<number>\d{1,18})|\w.{1,80}))$"
)
_RAS_RANK = re.compile(
    r"^\s{1,8}Rank (\d{1,7}) -- GPU \S{1,20} managed by process (\d{1,9}) on node (\S{1,80})"
)
_HOROVOD = re.compile(r"^(\d{1,7}): \[(\S{1,200}?)[,\]]")
# General rows. Between the rank and the word nothing may stand that changes who or whether.
_WHO = r"\b(?P<who>[Rr]ank|[Ww]orker|[Pp]rocess|[Tt]ask|[Nn]ode|RANK)s?"
_NUMBER = r"(?: ?[#:=_-] ?| )?\[?(?P<ranks>\d{1,6}(?:(?:, ?|-)\d{1,6}){0,400})\b\]?(?![\d.:]*\d)"
_BETWEEN = (
    r"(?:(?!\b(?:[Rr]anks?|[Ww]orkers?|[Pp]rocess|[Tt]asks?|[Nn]odes?|not|no|never|if|when|"
    r"whether|may|might|could|would|waits?|waiting|for|from|by|because|after|since|until|"
    r"detected|reports?|saw|other|others)\b)[^.;|\d\n]){0,40}?"
)
_DIED = (
    r"crashed|died|is dead|(?:was|been|got) killed|"
    r"killed(?=\s*$|[\s(]*(?:by|with|due|signal|SIG|[Oo][Oo][Mm]))|"
    r"segfault(?:ed)?|core dumped|aborted|"
    r"(?:exited|terminated|ended|finished) (?:unexpectedly|abnormally)|"
    r"(?:(?:exit(?:ed)?|return(?:ed)?|terminated|finished)\W{1,3}(?:with |status )?"
    r"(?:exit ?|return ?)?(?:code|status)|exit ?code|returncode|rc)\W{1,3}-?[1-9]\d{0,2}\b|"
    r"(?:exited|terminated|died|killed) (?:with|by|on) signal \w{1,12}"
)
_ABSENT = (
    r"is missing|missing|stalled|is stuck|stuck|hung|is hanging|unresponsive|"
    r"not responding|does not respond|no heartbeat|missed (?:its |a |the )?heartbeats?|"
    r"heartbeat (?:lost|timeout|timed out|expired)|lost contact|is lost|unreachable|"
    r"did not (?:report|respond|arrive|join|check in)|never (?:arrived|joined|reported)|"
    r"has not (?:reported|arrived|joined|responded)|silent"
)
_GENERAL = (
    (re.compile(rf"{_WHO}{_NUMBER}{_BETWEEN}\b(?:{_DIED})\b"), conditions.TOLD_DEAD),
    (
        re.compile(rf"{_WHO}{_NUMBER}{_BETWEEN}\b(?:{_ABSENT})\b"),
        conditions.TOLD_ABSENT,
    ),
    (
        re.compile(
            r"\b(?:[Mm]issing|[Ss]talled|[Uu]nresponsive|[Dd]ead|[Ss]tuck|[Ll]agging|[Ll]ost)"
            rf" {_WHO[2:]}{_NUMBER}"
        ),
        conditions.TOLD_ABSENT,
    ),
)
_VERBS = re.compile(
    "issing|talled|tuck|h[au]ng|espon|heartbeat|ost |agging|crash|died|[Dd]ead|kill|exit|code|"
    "segfault|core dump|abort|unreachable|did not|never|has not|silent|rc[=: ]|terminated|"
    "unexpected|abnormal"
)
_GENERAL_WORDS = re.compile(
    "(?:rank|worker|process|task|node)s?\\b.{0,120}(?:missing|stall|stuck|h[au]ng|respon|heartbeat|"
    "lost|crash|died|dead|kill|exit|segfault|core dump|abort|terminated|return|unreachable|"
    "did not|never|has not|silent|code)|(?:missing|stalled|unresponsive|dead|stuck|lagging|lost)"
    " (?:rank|worker|process|task|node)",
    re.IGNORECASE,
)
# Lines that tell of something else by the same words.
_OTHER = re.compile(
    r"(?i)\b(?:if|unless|whether|tip|hint|example)\b|data ?loader|recover|restarted|succe|"
    r"gracefully|cleanly|missing keys?|"
    r"\bok\b|\bretry|healthy|no longer|thread|nemo_patches |^(?:srun|slurmstepd|prterun|mpirun)\b"
)


@dataclass
class _State:
    """Of a RAS communicator's ranks. ranks: those that are listed, with the line."""

    count: int
    what: str
    number: int
    ranks: dict[int, tuple[str, Line]] = field(default_factory=dict)


class RowLines:
    """One launch's lines."""

    def __init__(self, found: LaunchFacts) -> None:
        self._found = found
        self._ras: dict[str, list[_State]] = defaultdict(list)
        self._communicator = ""
        self._lists_missing = False  # Horovod, in the next lines

    def take(self, line: Line) -> None:
        text = line.text
        for words_of, row in _BY_WORDS:
            if any(word in text for word in words_of) and (
                told := row.pattern.search(text)
            ):
                words = told.groupdict("")
                condition = Condition(row.kind, row.text.format(**words)[:300])
                ranks = ranks_in(words.get("ranks", "")) or [line.rank]
                for rank in ranks:
                    self._found.add(rank, condition, line, own=False)
        self._take_ras(line)
        self._take_horovod(line)

    def _take_horovod(self, line: Line) -> None:
        told = _HOROVOD.match(line.text)
        if told and self._lists_missing:
            missing = Condition(conditions.MISSING, f"to {told[2]}, by Horovod")
            self._found.add(int(told[1]), missing, line, own=False)
        self._lists_missing = told is not None or line.text == "Missing ranks:"

    def take_words(self, line: Line) -> None:
        """Of a line that no row knows."""
        text = line.text
        if not _VERBS.search(text) or not _GENERAL_WORDS.search(text):
            return
        if _OTHER.search(text):
            return
        for pattern, kind in _GENERAL:
            if told := pattern.search(line.text):
                is_node = told["who"].lower() == "node"
                ranks = [one for one in ranks_in(told["ranks"]) if one < _MOST_RANK]
                for rank in [NOT_TOLD] if is_node and ranks else ranks:
                    said = Condition(kind, line.text.strip()[:200])
                    self._found.add(rank, said, line, own=False)
                return

    def _take_ras(self, line: Line) -> None:
        if group := _RAS_GROUP.match(line.text):
            self._communicator = group[1]
        elif not self._communicator:
            return
        elif told := _RAS_STATE.match(line.text):
            number = int(told["number"] or NOT_TOLD)
            one = _State(int(told["count"]), told["what"], number)
            if len(states := self._ras[self._communicator]) < MOST_KEPT:
                states.append(one)
        elif rank := _RAS_RANK.match(line.text):
            process = f"process {rank[2]} on {rank[3]}"
            for state in self._ras[self._communicator][-1:]:
                state.ranks.setdefault(int(rank[1]), (process, line))

    def finish(self) -> None:
        """RAS lists the ranks of a state where they are few."""
        for states in filter(None, self._ras.values()):
            last = max(one.number for one in states)
            most = max(one.count for one in states)
            for one in states:
                is_behind = one.number < last if last >= 0 else one.count < most
                for rank, (process, line) in one.ranks.items() if is_behind else ():
                    what = (
                        f"to operation {last}"
                        if last >= 0
                        else f"as others: {one.what}"
                    )
                    text = f"{what}, by NCCL's RAS; {process}"
                    missing = Condition(conditions.MISSING, text)
                    self._found.add(rank, missing, line, own=False)
