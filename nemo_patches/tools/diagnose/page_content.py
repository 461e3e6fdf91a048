"""What the page of `diagnose --html` shows, from a report and its evidence."""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nemo_patches.facts import LENGTH_SYNC
from nemo_patches.text import safe
from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.accounts import Account, accounts_of
from nemo_patches.tools.diagnose.findings import Diagnosis, RankSummary
from nemo_patches.tools.diagnose.page import (
    ELSEWHERE,
    UNKNOWN,
    WAITS,
    Lane,
    LogLine,
    Mark,
    ShownJob,
    Stack,
)
from nemo_patches.tools.diagnose.rank_facts import NOT_TOLD, Evidence, Fact
from nemo_patches.tools.diagnose.sources import logs, traces
from nemo_patches.tools.diagnose.sources.traces import RankTrace
from nemo_patches.tools.diagnose.verdicts import doing, parties, where, who

MOST_LANES = 64
_MOST_RANKS = 1 << 14  # a rank of which nothing is told has its lane up to here
_MOST_LINES = 100
_LONGEST_LINE = 1 << 16  # bytes of a log's line
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_OF_STACK = re.compile(  # a tool's line above a thread's frames
    r"(?:\[[^\]]{1,40}\]:? ?)*(?:Current t|T)hread (?:0x)?[0-9a-fA-F]{1,16} (?:\(|\[)"
)


def content_of(report: Diagnosis, evidence: Evidence) -> ShownJob:
    accounts = accounts_of(evidence)
    clock = _Clock(traces.load(evidence.files.get(traces.KIND, []), Evidence()))
    first = clock.traces[0].header if clock.traces else None
    return ShownJob(
        report,
        lanes=tuple(_Lanes(report, evidence, accounts, clock).shown()),
        started=first.started if first is not None else 0.0,
        host=first.host if first is not None else "",
        stacks=tuple(filter(None, map(_stack, accounts.values()))),
        lines=tuple(_log_lines(report, evidence)),
    )


# The ranks in time


class _Clock:
    """Seconds since the first rank's trace began; without traces, since the looks at the ranks.

    Hosts' clocks are not compared: the time of a look is told where a trace is of the same host.
    """

    def __init__(self, read: list[RankTrace]) -> None:
        self.traces = read
        self.starts = {one.rank: _start(one, read[0]) for one in read}
        self._hosts = {safe(one.header.host): one for one in read}

    def of_fact(self, fact: Fact) -> float | None:
        trace = self._hosts.get(fact.host)
        if trace is None:
            return None if self.traces else 0.0
        return self.starts[trace.rank] + fact.at - trace.header.started

    def still_since(self, account: Account) -> float | None:
        """By a look at the rank."""
        fact, still_s = account.motion_fact, account.still_s
        if fact is None or still_s is None or account.moved:
            return None
        t = self.of_fact(fact)
        return None if t is None else t - still_s


def _start(one: RankTrace, first: RankTrace) -> float:
    """A round ends on all ranks at nearly the same moment."""
    last = max(one.rounds.keys() & first.rounds.keys(), default=None)
    if last is None:
        return one.header.started - first.header.started
    return first.rounds[last][0] - one.rounds[last][0]


class _Lanes:
    """Of a job's ranks."""

    def __init__(
        self,
        report: Diagnosis,
        evidence: Evidence,
        accounts: Mapping[int, Account],
        clock: _Clock,
    ) -> None:
        self._accounts = accounts
        self._clock = clock
        self._traces = {one.rank: one for one in clock.traces}
        self._summaries = {one.rank: one for one in report.ranks}
        self._named = set(report.findings[0].ranks if report.findings else ())
        told = {*accounts, *self._traces, *self._summaries} - {NOT_TOLD}
        self._ranks = told.union(range(min(evidence.world_size, _MOST_RANKS)))
        looks = (
            clock.of_fact(one.motion_fact)
            for one in accounts.values()
            if one.motion_fact
        )
        ends = [clock.starts[one.rank] + one.last for one in clock.traces]
        self._end = max([*ends, *(t for t in looks if t is not None)], default=0.0)

    def shown(self) -> list[Lane]:
        """One for each rank; of more than fit, one for the ranks at each place."""
        lanes = [self._of(rank) for rank in sorted(self._ranks)]
        if all(one.begins is None for one in lanes):
            return []  # no source has times
        if len(lanes) <= MOST_LANES:
            return lanes
        groups = [*parties((self._place_of(one), one) for one in lanes).values()]
        groups.sort(key=lambda group: not group[0].is_named)
        if rest := [one for group in groups[MOST_LANES - 1 :] for one in group]:
            groups = [*groups[: MOST_LANES - 1], rest]
        return [*map(_joined, groups)]

    def _of(self, rank: int) -> Lane:
        trace = self._traces.get(rank)
        account = self._accounts.get(rank) or Account(rank)
        summary = self._summaries.get(rank)
        still_since = self._clock.still_since(account)
        lane = Lane(
            (rank,),
            state=_state(account) or (summary.state if summary else "nothing is told"),
            is_named=rank in self._named,
            process=_process(account, summary),
            at_end=_at_end(account, trace),
            begins=still_since,
            since=still_since,
            ends=self._end,
        )
        return lane if trace is None else self._with_trace(lane, account, trace)

    def _with_trace(self, lane: Lane, account: Account, trace: RankTrace) -> Lane:
        start = self._clock.starts[trace.rank]
        called = start + trace.called
        since = called if lane.since is None else max(called, lane.since)
        is_over = account.condition.kind in conditions.OVER or (
            trace.end is not None and not trace.goes_on
        )
        # Else no more is known than its own reports: its lane ends there.
        is_known = lane.is_named or lane.at_end != UNKNOWN
        ends = start + trace.last
        if account.moved or (is_known and not is_over):
            ends = self._end
        return replace(
            lane,
            begins=start,
            at_end=UNKNOWN if is_over else lane.at_end,
            since=since if since < ends and not account.moved else None,
            ends=ends,
            waits=array("d", (start + t for t in trace.waits)),
            calls=array("d", (start + t for t in trace.entered)),
            marks=tuple(_marks(trace, start)),
        )

    def _place_of(self, lane: Lane) -> tuple[object, ...]:
        """By which lanes are grouped, as the report's lines are: a worker's pid does not count."""
        account = self._accounts.get(lane.ranks[0])
        if account is None or not (account.place.wait or account.place.where):
            return lane.is_named, lane.state
        place = account.place
        kind = account.condition.kind
        return lane.is_named, kind, place.wait or place.where, account.moved


def _joined(lanes: Sequence[Lane]) -> Lane:
    """The lane of ranks at one place, with what is told of its first rank."""
    begins = [one.begins for one in lanes if one.begins is not None]
    sinces = [one.since for one in lanes if one.since is not None]
    others = ", and others' places" if len({one.state for one in lanes}) > 1 else ""
    return replace(
        lanes[0],
        ranks=tuple(rank for one in lanes for rank in one.ranks),
        state=lanes[0].state + others,
        process="" if len(lanes) > 1 else lanes[0].process,
        begins=min(begins, default=None),
        since=max(sinces, default=None),
        ends=max(one.ends for one in lanes),
        waits=array("d", (t for one in lanes for t in one.waits)),
        calls=array("d", (t for one in lanes for t in one.calls)),
        marks=tuple(mark for one in lanes for mark in one.marks),
    )


def _process(account: Account, summary: RankSummary | None) -> str:
    member = account.member_fact
    host = summary.host if summary else member.host if member else ""
    pid = summary.pid if summary else account.member.pid
    return ", ".join([*([host] if host else []), *([f"pid {pid}"] if pid else [])])


def _at_end(account: Account, trace: RankTrace | None) -> str:
    """Where it is after its last step."""
    if account.moved:
        return UNKNOWN
    if account.place.collective or (trace is not None and trace.phase == LENGTH_SYNC):
        return WAITS
    return ELSEWHERE if account.place.where else UNKNOWN


def _state(account: Account) -> str:
    """Where it is, or how it ended, in words."""
    place = account.place
    if place.collective and account.condition.kind not in conditions.OVER:
        return where(place, "waits")
    return doing(replace(account, place=replace(place, details=())))


def _marks(trace: RankTrace, start: float) -> Iterator[Mark]:
    for t in trace.gave_up:
        yield Mark(start + t, "▼", "gave up a length sync")
    if trace.stalled is not None:
        yield Mark(start + trace.stalled.t, "◆", "stall report")
    if trace.raised is not None:
        yield Mark(start + trace.raised.t, "✕", "exception")
    if trace.end is not None and not trace.goes_on:
        yield Mark(start + trace.end.t, "■", "end of the process")


# Their stacks


def _stack(account: Account) -> Stack | None:
    place, state = account.place, _state(account)
    if account.rank == NOT_TOLD or not (state or place.way):
        return None
    last = place.where or account.condition.where or "no frame is known"
    frames = place.way or tuple(reversed(last.split(" < ")))
    if state.startswith(f"it is in {frames[-1]}"):
        state = ""  # the frames say it
    details = tuple(filter(None, (place.worker, *place.details)))
    return Stack(account.rank, frames, state, details, is_whole=bool(place.way))


# What logs say


def _log_lines(report: Diagnosis, evidence: Evidence) -> Iterator[LogLine]:
    """The lines that facts are from, in the order of the files; of many those that the report cites
    before others.
    """
    ranks: dict[str, set[int]] = {}
    for fact in evidence.facts:
        ranks.setdefault(fact.cite, set()).add(fact.rank)
    report_text = repr(report)
    cites = sorted(ranks, key=lambda cite: f"[{cite}" not in report_text)
    by_name: dict[str, dict[int, str]] = {}
    for cite in cites[:_MOST_LINES]:
        name, _, line = cite.rpartition(":")
        if line.isdecimal():
            by_name.setdefault(name, {})[int(line)] = cite
    for file in evidence.files.get(logs.KIND, ()):
        # As logs are cited: with enough of their folders to tell them apart.
        names = (
            safe("/".join(file.parts[-depth:]), 200)
            for depth in range(1, len(file.parts) + 1)
        )
        of_file = by_name.pop(
            next((name for name in names if name in by_name), ""), None
        )
        if of_file and file.is_file():  # a pipe has been read
            for number, text in _lines(file, of_file):
                if _OF_STACK.match(text):  # shown with the stacks
                    continue
                yield LogLine(of_file[number], who(ranks[of_file[number]]), text)


def _lines(file: Path, numbers: Collection[int]) -> Iterator[tuple[int, str]]:
    number, last, begins = 1, max(numbers), True
    with suppress(OSError), file.open("rb") as opened:
        while number <= last and (piece := opened.readline(_LONGEST_LINE)):
            if begins and number in numbers:
                text = _COLOURS.sub("", piece.decode("utf-8", "replace")).rstrip()
                yield number, text.rpartition("\r")[2]  # what a progress bar left
            begins = piece.endswith(b"\n")
            number += begins
