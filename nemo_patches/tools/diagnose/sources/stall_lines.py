"""nemo_patches' own lines in a log:
which rank was missing, where it was, and where the others waited.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

from nemo_patches.facts import LENGTH_SYNC
from nemo_patches.judging.kinds import ALL_RANKS_OF, GONE
from nemo_patches.judging.kinds import SILENT as NO_HEARTBEAT
from nemo_patches.judging.rank_groups import DOES
from nemo_patches.judging.verdict import WAITED_FOR
from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.rank_facts import (
    NOT_TOLD,
    Condition,
    Motion,
    Place,
    ProcessRank,
)
from nemo_patches.tools.diagnose.sources.lines import Line, ranks_in, shown
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts

_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}$")
_STALL = re.compile(
    r"^no (?:encoder call|step) for \d{1,9} s\. (?:no rank moves: )?(?P<groups>.*)|"
    r"(?:(?P<call> call \d{1,12}: .*?Missing: )|: gone: )"
    r"ranks? (?P<missing>[\d, -]{1,2000}) of \d{1,7}(?P<details>.*)"
)
_WAITED_FOR = re.compile(rf" \| {WAITED_FOR}: ranks? ([\d, -]{{1,2000}}), in rank \d")
_GROUP = re.compile(
    r"^(?:ranks? (?P<ranks>\d{1,7}(?:(?:-|, )\d{1,7}){0,400})"
    r"(?: \((?:(?P<host>[^,)]{1,255}), )?pid (?P<pid>\d{1,9})(?: in its container)?\))?|"
    rf"{ALL_RANKS_OF}.{{1,255}}? \((?P<of_host>[\d, -]{{1,2000}})\))(?P<text>.*)$"
)
_WAITS = re.compile(
    r"^ (?:waits itself,|has ended this evaluation, .{0,40} and waits)"
    r" (?:in|(perhaps )for) (.{1,200}?)(?:: (.*)|;.*)?$"
)
_LAST_CALL = re.compile(r"; its last encoder call, .*$|, after encoder call \d+$")
_CAME = re.compile(
    r"recovered: ranks? (?P<late>[\d, -]{1,2000}) came|"
    r"other ranks waited for this one, and gave up|(?:calls|collectives) go on, after"
)
_IS_OVER = re.compile(r"(?:calls|collectives) go on, after")
_REPORT_IN = re.compile(
    r"; `nemo-patches diagnose (.{1,400}?)` reads those of all ranks on this host"
)
# As judging/waits.py says it: the job knows the ranks' batches
_CURE = re.compile(r"most likely [\w, -]{1,2000}: `NEMO_PATCHES_\w{1,40}=\w{1,40}`")
_AGE = re.compile(r"\d+(?:\.\d+)? s\b")  # by which reports of one look differ
_STALL_EXIT = re.compile(r"this process ends with exit code \d{1,3}")
_GOES_ON = re.compile(
    r":? (?:go(?:es)? on|(?P<computes>computes? but takes? no step))|.* go on with"
)
_REQUEST = re.compile(r" waits? for a request: (.{1,300})")
HAS_LEFT = Condition(
    conditions.ENDED, "it left: it ended, or destroyed its process group"
)
# Words of a group's text, and what has become of these ranks
_CONDITIONS = (
    ("ha(?:s|ve) left", HAS_LEFT),
    ("not announced", Condition(conditions.UNSEEN, "not patched, or not started")),
    (f"{GONE}|their processes have gone", Condition(conditions.GONE, GONE)),
    (
        "answers? nothing|connections? (?:was|were) lost",
        Condition(conditions.SILENT, NO_HEARTBEAT),
    ),
)
# A place in a group's text: these ranks are in no collective. Else the text is a collective's name.
_IS_PLACE = re.compile(r"\(.{1,300}:\d{1,9}\)|takes no part|^$|where is not known")
_CALLER = re.compile(r", (?:in|while|during) ")
_MOST_REPORTS = 1 << 16  # unlike ones
# Ranks in the reports that are read, the last ones: 4,096 ranks are to be read in seconds.
_MOST_TOLD = 1 << 19
# Of what follows a place, as judging/rank_groups.py writes it; "last batch 7" is none.
_WORKER = "its data loader's "


# What was told of a rank before it moved, or was seen at a place
_OVER: tuple[tuple[object, ...], ...] = (
    *((Place,), (Motion,)),
    *((Condition, kind, "") for kind in (conditions.UNSEEN, conditions.SILENT)),
)
Told: TypeAlias = Place | Motion | Condition


class StallLines:
    """One launch's lines. Where ranks were is hearsay: a rank reports what the others had said."""

    def __init__(self, found: LaunchFacts) -> None:
        self._found = found
        # What is not read yet, in the order of the lines, with the time that each has.
        self._unread: dict[tuple[object, ...], tuple[str, Callable[[], None]]] = {}
        self._hosts: set[str] = set()
        self._time = ""  # of the present line
        self._placed: set[int] = set()  # ranks, by these lines

    def take(self, ours: re.Match[str], line: Line) -> None:
        level, rank, size, host, text = ours.groups()
        time = _TIME.search(line.text, 0, ours.start())
        self._time = time[0] if time else ""
        self._hosts.add(host)
        line = line._replace(has_prefix=True)  # ranks in it are the job's
        if size != "?":
            self._found.has_size(size)
        reporter = int(rank) if rank != "?" else NOT_TOLD
        if reporter >= 0:
            self._process(reporter, 0, host, line)
        stall = _STALL.search(text)
        if " patched " in f" {text}" or stall:
            self._found.patched = self._found.patched or "not patched" not in text
        if came := _CAME.search(text):
            late = ranks_in(came["late"]) if came["late"] else [reporter]
            self._put((text, rank), lambda: self._came(late, reporter, text, line))
        elif stall:
            cure = _CURE.search(text)
            self._found.cure = cure[0] if cure else ""
            if stall["call"]:
                waits = Place(collective=LENGTH_SYNC)
                self._put((reporter,), lambda: self._tell(reporter, line, waits))
            report = "report", _AGE.sub("", text.rpartition("Missing: ")[2]), level
            goes_on = level == "INFO"
            self._put(report, lambda: self._take_groups(text, line, goes_on))
        elif _STALL_EXIT.search(text):
            ended = Condition(conditions.TERMINATED, conditions.STALL_EXIT)
            self._found.add(reporter, ended, line)
        elif report_in := _REPORT_IN.search(text):
            self._found.note_reports(shown(report_in[1]))

    def _put(self, key: tuple[object, ...], read: Callable[[], None]) -> None:
        """All ranks may report the same: it is read once, in the place of the last one."""
        self._unread.pop(key, None)
        if len(self._unread) < _MOST_REPORTS:
            self._unread[key] = self._time, read

    def finish(self) -> None:
        """Lines may stand one rank after the other: by one host's clock they are in order."""
        unread, self._unread = list(self._unread.items()), {}
        if len(self._hosts) == 1:
            unread.sort(key=lambda one: one[1][0])
        reports = [key for key, _ in unread if key[0] == "report"]
        most = max(_MOST_TOLD // max(self._found.world_size, 1), 1)
        passed_over = set(reports[:-most])
        for read in [read for key, (_, read) in unread if key not in passed_over]:
            read()

    def _came(self, late: list[int], reporter: int, text: str, line: Line) -> None:
        for rank in late:
            self._tell(rank, line, Motion(True, shown(text)))
        self._found.facts.pop((reporter, Place), None)
        if _IS_OVER.search(text):  # for all: what it waited for has come
            for rank in self._placed:
                self._found.facts.pop((rank, Place), None)
            self._placed.clear()

    def _take_groups(self, text: str, line: Line, goes_on: bool) -> None:
        """goes_on: these ranks do, or will by themselves, and their earlier places are over."""
        stall = _STALL.search(text)
        waited_for = Condition(conditions.UNSEEN, "others waited for it")
        for missing in ranks_in((stall and stall["missing"]) or ""):
            self._tell(missing, line, waited_for)
        if short := _WAITED_FOR.search(text):  # of one of many ranks
            for missing in {*ranks_in(short[1])} - self._placed:
                self._tell(missing, line, waited_for)
        for group, values in _groups_in(text):
            for rank in ranks_in(group["ranks"] or group["of_host"]):
                if group["pid"]:
                    self._process(rank, int(group["pid"]), group["host"] or "", line)
                if goes_on:
                    self._found.facts.pop((rank, Place), None)
                else:
                    self._tell(rank, line, *values)

    def _tell(self, rank: int, line: Line, *values: Told) -> None:
        """What is told of a rank at once."""
        if values and not isinstance(values[0], Condition):
            for key in _OVER:
                self._found.facts.pop((rank, *key), None)
        for value in values:
            if isinstance(value, Place):
                self._placed.add(rank)
            self._found.add(rank, value, line, own=False)

    def _process(self, rank: int, pid: int, host: str, line: Line) -> None:
        if pid:
            self._found.facts.pop((rank, ProcessRank), None)
        # A host's process 1 is no rank.
        member = ProcessRank(self._found.world_size, pid, in_container=pid == 1)
        self._found.add(rank, member, line, own=False, host=shown(host))


def told_in(text: str) -> Iterator[tuple[int, Told]]:
    """What the text of a stall report tells of each rank."""
    for group, values in _groups_in(text):
        for rank in ranks_in(group["ranks"] or group["of_host"]):
            yield from ((rank, value) for value in values)


def _groups_in(text: str) -> Iterator[tuple[re.Match[str], list[Told]]]:
    stall = _STALL.search(text)
    groups = (stall["groups"] or stall["details"] or "") if stall else ""
    for part in groups.split(" | "):
        if group := _GROUP.match(part.strip()):
            yield group, list(_values_of(_LAST_CALL.sub("", group["text"])))


def _values_of(text: str) -> Iterator[Told]:
    """The facts about ranks in the text after their names."""
    if goes_on := _GOES_ON.match(text):
        yield Motion(True, shown(text.lstrip(": ")))
        if goes_on["computes"]:
            yield _place_in(text.partition(", now in ")[2])
    elif "not heard" not in text:
        known = (one for words, one in _CONDITIONS if re.search(words, text.lower()))
        yield next(known, None) or _place_of(text)


def _place_of(text: str) -> Place:
    """Of ranks that neither go on nor are gone."""
    if request := _REQUEST.match(text):
        return Place(shown(request[1]))
    if waits := _WAITS.match(text):
        collective = (waits[1] or "") + waits[2]
        return Place(where=shown(waits[3] or ""), collective=shown(collective))
    # " is elsewhere: read (data.py:41)", " writes a checkpoint: save (nemo.py:7)"
    does = (one for one, words in DOES.items() if text.startswith(words))
    return _place_in(text.partition(": ")[2], next(does, ""))


def _place_in(text: str, activity: str = "") -> Place:
    where, *details = text.split("; ")
    if _IS_PLACE.search(where) and not _CALLER.search(where):
        told = [shown(one) for one in details]
        workers = [one for one in told if one.startswith(_WORKER)]
        others = [one for one in told if one not in workers[:1]]
        worker = (workers or [""])[0]
        return Place(shown(where), "", "", activity, worker, tuple(others))
    collective, *callers = _CALLER.split(where)
    return Place(collective=shown(collective), caller=shown(", in ".join(callers)))
