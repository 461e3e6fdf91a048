"""nemo_patches' own lines in a log:
which rank was missing, where it was, and where the others waited.
"""

from __future__ import annotations

import re

from nemo_patches.facts import LENGTH_SYNC
from nemo_patches.judging.kinds import (
    ALL_RANKS_OF,
    CHECKPOINT,
    COMPILATION,
    DEBUGGER,
    EXPORT,
    GONE,
)
from nemo_patches.judging.kinds import SILENT as NO_HEARTBEAT
from nemo_patches.judging.missing_rank import UNPATCHED
from nemo_patches.sync.protocol import APART
from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose.facts import Fact, Fate, Member, Motion, Place
from nemo_patches.tools.diagnose.sources.c10d_lines import ranks_in
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts, Line, shown

_OURS = re.compile(
    r"(?:^|\s)nemo_patches (INFO|WARNING|ERROR) \[rank (\d{1,7}|\?)/(\d{1,7}|\?)"
    r" ([^\]]{0,100})\] (.*)"
)
_IDLE = re.compile(
    r"^no (?:encoder call|step) for (\d{1,9}) s\. (?:no rank moves: )?(.*)"
)
_MISSING = re.compile(
    r"^(\S.{0,200}?): (?:training|evaluation) call \d{1,12}: .*?Missing: (.*)"
)
_ENDED_SYNC = re.compile(r"^(\S.{0,200}?): gone: (.*)")
_GROUP = re.compile(
    r"^ranks? (\d{1,7}(?:(?:-|, )\d{1,7}){0,400})(?: \(([^)]{1,255})\))?(.*)$"
)
_OF_A_HOST = re.compile(rf"^{ALL_RANKS_OF}(.{{1,255}}) \(([\d, -]{{1,2000}})\): (.*)$")
_PID = re.compile(r"(?:(.*), )?pid (\d{1,9})$")
_WAITS = re.compile(
    r"^ (?:waits itself,|has ended this evaluation, .{0,40} and waits) in (.{1,200}?)"
    r"(?:: (.*)|;.*)?$"
)
_LAST_CALL = re.compile(r"; its last encoder call, \d{1,12}, began .*$")
_RECOVERED = re.compile(
    r"recovered: ranks? ([\d, -]{1,2000}) came \d{1,9}(?:\.\d{1,3})? s late"
)
_WENT_ON = re.compile(
    r"other ranks waited for this one, and gave up|(?:calls|collectives) go on, after"
)
_STALL_EXIT = re.compile(r"this process ends with exit code \d{1,3}")
_REPORT_IN = re.compile(
    r"; `nemo-patches diagnose (.{1,400}?)` reads those of all ranks on this host"
)
_DOES = {
    " writes a checkpoint": CHECKPOINT,
    " is in a debugger": DEBUGGER,
    " compiles": COMPILATION,
    " exports a model": EXPORT,
}
_GOES_ON = re.compile(
    r"(?:: ?)? (?:go(?:es)? on|computes? but takes? no step)|.* go on with"
)
_LEFT = Fate(fates.ENDED, "it left: it ended, or destroyed its process group")
# Words of a group's text, and what has become of these ranks
_FATES = (
    ("ha(?:s|ve) left", _LEFT),
    ("not announced", Fate(fates.UNSEEN, "not patched, or not started")),
    (f"{GONE}|their processes have gone", Fate(fates.GONE, GONE)),
    (
        "answers? nothing|connections? (?:was|were) lost",
        Fate(fates.SILENT, NO_HEARTBEAT),
    ),
)
# A place in a group's text: these ranks are in no collective. Else the text is a collective's name.
_IS_PLACE = re.compile(r"\(.{1,300}:\d{1,9}\)")
_IS_CALLER = re.compile(r", in .*\(.*:\d+\)|, (?:while|during) ")


class StallLines:
    """One launch's lines. Where ranks were is hearsay: a rank reports what the others had said."""

    def __init__(self, found: LaunchFacts) -> None:
        self._found = found

    def take(self, line: Line) -> None:
        if (ours := _OURS.search(line.text)) is None:
            return
        level, rank, size, host, text = ours.groups()
        if size != "?":
            self._found.has_size(size)
        reporter = int(rank) if rank != "?" else -1
        if reporter >= 0 and host:
            self._found.keep(
                Fact(
                    reporter,
                    Member(self._found.world_size),
                    line.cite,
                    host=shown(host),
                    own=False,
                )
            )
        if " patched " in f" {text}" or "Missing: " in text or _IDLE.search(text):
            self._found.patched = self._found.patched or "not patched" not in text
        if idle := _IDLE.search(text):
            for part in idle[2].split(" | "):
                self._take_group(part, line, is_stall=level != "INFO")
        elif missing := _MISSING.search(text):
            self._take_missing(reporter, missing[2], line)
        elif gone := _ENDED_SYNC.search(text):
            self._take_missing(-1, gone[2], line)
        elif recovered := _RECOVERED.search(text):
            for late in ranks_in(recovered[1]):
                self._went_on(late, text, line, own=False)
            self._found.facts.pop((reporter, Place), None)
        elif _STALL_EXIT.search(text):
            self._found.add(reporter, Fate(fates.TERMINATED, fates.STALL_EXIT), line)
        elif _WENT_ON.search(text):
            self._went_on(reporter, text, line)
        elif report_in := _REPORT_IN.search(text):
            self._found.note_reports(shown(report_in[1]))

    def _went_on(self, rank: int, by: str, line: Line, own: bool = True) -> None:
        self._found.add(rank, Motion(True, shown(by)), line, own)
        self._found.facts.pop((rank, Place), None)

    def _take_missing(self, reporter: int, text: str, line: Line) -> None:
        """ "rank 5 of 8 | rank 5 (node8, pid 4711) is elsewhere: read (data.py:41)"."""
        first, *details = text.split(" | ")
        ranks = ranks_in(
            first.removeprefix("ranks ").removeprefix("rank ").partition(" of ")[0]
        )
        if not ranks:
            return  # the text says why they are not known
        if reporter >= 0:
            self._found.add(reporter, Place(collective=LENGTH_SYNC), line, own=False)
        for rank in ranks:
            self._found.add(
                rank, Fate(fates.UNSEEN, "others waited for it"), line, own=False
            )
        for detail in details:
            if not detail.startswith(UNPATCHED[:40]):
                self._take_group(detail, line)

    def _take_group(self, text: str, line: Line, is_stall: bool = True) -> None:
        """is_stall: else the ranks go on, or will by themselves, and their earlier places are
        over.
        """
        ranks, process, value = _group_in(text)
        for rank in ranks:
            if process is not None:
                self._found.facts.pop((rank, Member), None)
                member = Member(self._found.world_size, int(process[2]))
                self._found.keep(
                    Fact(
                        rank, member, line.cite, host=shown(process[1] or ""), own=False
                    )
                )
            if not is_stall:
                self._found.facts.pop((rank, Place), None)
            if value is None or not (is_stall or isinstance(value, Motion)):
                continue
            if isinstance(value, Motion):
                self._found.facts.pop((rank, Place), None)
            elif isinstance(value, Place):
                self._found.facts.pop((rank, Motion), None)
                self._found.facts.pop((rank, Fate, fates.UNSEEN, ""), None)
            self._found.add(rank, value, line, own=False)


def told_in(text: str) -> dict[int, Place | Motion | Fate]:
    """By rank, what the text of a stall report tells."""
    found: dict[int, Place | Motion | Fate] = {}
    if idle := _IDLE.search(text):
        for part in idle[2].split(" | "):
            ranks, _, value = _group_in(part)
            if value is not None:
                found |= dict.fromkeys(ranks, value)
    return found


def _group_in(
    text: str,
) -> tuple[list[int], re.Match[str] | None, Place | Motion | Fate | None]:
    """The ranks of a group, the process of one alone, and what is told of them."""
    if (group := _GROUP.match(text.strip())) is not None:
        return (
            ranks_in(group[1]),
            _PID.match(group[2] or ""),
            _value_of(_LAST_CALL.sub("", group[3])),
        )
    if (of_host := _OF_A_HOST.match(text.strip())) is not None:
        return ranks_in(of_host[2]), None, _value_of(of_host[3])
    return [], None, None


def _value_of(text: str) -> Place | Motion | Fate | None:
    """The fact about ranks in the text after their names."""
    text = text.strip() if text.startswith(": ") else text
    if _GOES_ON.match(text):
        return Motion(True, shown(text.lstrip(": ")))
    lowered = text.lower()
    if "not heard" in lowered:
        return None
    told = (fate for words, fate in _FATES if re.search(words, lowered))
    return next(told, None) or _place_in(text)


def _place_in(text: str) -> Place:
    if waits := _WAITS.match(text):
        return Place(where=shown(waits[2] or ""), collective=shown(waits[1]))
    if apart := next((one for one in APART if one in text), ""):
        return Place(where=shown(apart), activity=shown(apart))
    activity = next(
        (what for words, what in _DOES.items() if text.startswith(words)), ""
    )
    where = text.partition(": ")[2] if ": " in text else text.removeprefix(":").strip()
    where, *details = where.split("; ")
    if _IS_PLACE.search(where) and not _IS_CALLER.search(where):
        worker = next((one for one in details if "worker" in one), "")
        batch = [shown(one) for one in details if one.startswith("last batch")]
        return Place(
            where=shown(where),
            activity=activity,
            worker=shown(worker),
            details=tuple(batch),
        )
    if not where or where.startswith(("is late", "is elsewhere", "where is not known")):
        return Place(activity=activity)
    collective, _, caller = re.sub(r", after encoder call \d+$", "", where).partition(
        ", in "
    )
    return Place(collective=shown(collective), caller=shown(caller))
