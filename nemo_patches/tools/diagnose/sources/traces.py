"""Reader of traces:
of each rank its last call, how it ended, where its stall reports saw all ranks, and who was
late.

Ranks are compared by the numbers of their calls and rounds, never by hosts' clocks. A trace that is
damaged tells how its process ended, and nothing of its last call.
"""

from __future__ import annotations

import contextlib
import json
import socket
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from nemo_patches.facts import LENGTH_SYNC
from nemo_patches.judging.judge import Seat
from nemo_patches.judging.kinds import GONE, LEFT, SILENT, UNANNOUNCED
from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.collect.host_jobs import STUCK_AFTER_S
from nemo_patches.tools.diagnose.collect.proc_files import (
    CLOCK_SLACK_S,
    started_at,
    stat_fields,
)
from nemo_patches.tools.diagnose.facts import (
    Call,
    Evidence,
    Fact,
    Fate,
    Member,
    Motion,
    Place,
    Value,
)
from nemo_patches.tools.diagnose.findings import Finding, RankSummary
from nemo_patches.tools.diagnose.frame_text import shown
from nemo_patches.tools.diagnose.rank_end import (
    BY_HAND,
    ENDED_WITH_IT,
    STALL_EXIT,
    TIMED_OUT,
    Error,
    error_in,
    error_of,
)
from nemo_patches.tools.diagnose.sources.stall_lines import told_in
from nemo_patches.tools.diagnose.verdicts import finding, parties
from nemo_patches.tracing import records

KIND = "traces"
_HEADS = (b'{"k":"header"', b'{"k": "header"')
_MOST_RANKS = 1 << 20
_LONGEST_LINE = 1 << 20  # bytes
_LONGEST_TEXT = 600  # characters of a report
_KEPT_ROUNDS = 1024  # of each rank: by these lateness is told
_LEAST_ROUNDS = 48  # fewer show no habit
_LEAST_LAG_S = 0.005
_LEAST_WAITING = 0.05  # share of the time; less does no harm
_GROUP = "length sync"  # all encoders share the rounds
_IN_VAIN = (records.TIMEOUT, records.UNWAITED)
_KINDS = {LEFT: fates.GONE, SILENT: fates.SILENT, UNANNOUNCED: fates.UNSEEN}


@dataclass
class RankTrace:
    """One start of one rank's process."""

    header: records.Header
    path: Path
    entered: array[float] = field(default_factory=lambda: array("d"))
    gave_up: array[float] = field(default_factory=lambda: array("d"))
    last: float = 0.0  # when its last record was made
    numbers: dict[str, int] = field(
        default_factory=dict
    )  # of the last call, by encoder
    encoder: str = ""  # of the last call
    training: int = 0  # calls
    evaluation: int = 0  # calls since the last training call
    phase: str = ""  # of the last call; empty: it has left it
    round: int = 0  # the latest that this rank has issued
    outcome: str = ""  # of the last length sync
    outcomes: Counter[str] = field(default_factory=Counter)
    rounds: dict[int, tuple[float, float]] = field(default_factory=dict)  # end, wait
    vain_rounds: set[int] = field(default_factory=set)
    waited: float = 0.0
    raised: dict[str, Any] | None = None  # since which no encoder was called
    stalled: dict[str, Any] | None = None  # the job's report, likewise
    missing: dict[str, Any] | None = None  # the report on the round that was given up
    gone: set[int] = field(default_factory=set)  # whose process it saw gone
    end: dict[str, Any] | None = None
    bad: int = 0  # lines that are no records, or do not follow from those before

    @property
    def rank(self) -> int:
        return self.header.rank

    @property
    def number(self) -> int:
        return self.numbers.get(self.encoder, 0)

    @property
    def title(self) -> str:
        if not self.number:
            return "its first encoder call"
        kind = "evaluation" if self.evaluation else "training"
        return f"{kind} call {self.number} of {safe(self.encoder)}"

    @property
    def position(self) -> tuple[int, int]:
        """The same on ranks that train together, whatever evaluations went before."""
        return self.training, self.evaluation

    @property
    def came_to(self) -> int:
        """The latest round that it may have issued."""
        return self.round + (self.phase == LENGTH_SYNC)

    @property
    def in_vain(self) -> bool:
        return self.outcome in _IN_VAIN

    @property
    def went_well(self) -> bool:
        """Whether nothing was wrong at its end; with a reason the process goes on without it."""
        is_odd = self.phase or self.bad or self.raised or self.missing or self.stalled
        return self.end is not None and not is_odd

    @property
    def is_whole(self) -> bool:
        return not self.bad and not (self.end or {}).get("reason")

    def take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            self._take(record, record["k"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.bad += 1

    def _take(self, record: dict[str, Any], kind: str) -> None:
        t = float(record["t"])  # a second header has none: another process wrote here
        if kind == records.Enter.k:
            self._enter(record, t)
        elif (
            kind in (records.Sync.k, records.Leave.k, records.Raised.k) and record["e"]
        ):
            self._in_call(record, kind, t)
        elif kind == records.Raised.k:
            self.raised = record
        elif kind == records.Stalled.k:
            seen = zip(record["ranks"], record["where"], strict=True)
            self.gone |= {int(rank) for rank, where in seen if where == GONE}
            if record["e"]:
                self.missing = record
            else:  # where nobody waits, ranks decode, or end
                self.stalled = record if record.get("waited") else None
        elif kind == records.End.k:
            self.end = record
        self.last = t

    def _enter(self, record: dict[str, Any], t: float) -> None:
        encoder, number = str(record["e"]), int(record["n"])
        if number != self.numbers.get(encoder, number - 1) + 1 or self.phase:
            self.bad += 1
        self.encoder = encoder
        self.numbers[encoder] = number
        if record["training"]:
            self.training += 1
            self.evaluation = 0
        else:
            self.evaluation += 1
        self.entered.append(t)
        self.phase = LENGTH_SYNC
        self.raised = self.stalled = None

    def _in_call(self, record: dict[str, Any], kind: str, t: float) -> None:
        encoder, number = str(record["e"]), int(record["n"])
        if (
            kind == records.Sync.k
            and number == self.numbers.get(encoder, number - 1) + 1
        ):
            self.numbers[encoder] = (
                number  # of a compiled encoder nothing else is there
            )
            self.entered.append(t)
            self.encoder = encoder
        elif encoder != self.encoder or number != self.number or not self.phase:
            self.bad += 1
        if kind == records.Sync.k:
            self._sync(record, t)
            return
        self.phase = ""
        if kind == records.Raised.k:
            self.raised = record

    def _sync(self, record: dict[str, Any], t: float) -> None:
        self.phase = ids.LAYERS if self.phase else ""
        self.outcome = str(record["outcome"])
        self.outcomes[self.outcome] += 1
        wait, number = float(record["waited"]), int(record["round"])
        self.waited += wait
        if self.outcome in (records.LOCAL, records.ENDED):
            return
        self.bad += self.round > 0 and not (
            0 <= number - self.round <= 1 or number == 1
        )
        self.round = number
        if self.in_vain:
            self.gave_up.append(t)
            self.vain_rounds.add(number)
        elif self.outcome == records.CAME:
            self.missing = None
            self.rounds[number] = (t, wait)
            if len(self.rounds) > _KEPT_ROUNDS:
                del self.rounds[next(iter(self.rounds))]


def recognises(name: str, head: bytes) -> bool:
    return head.startswith(_HEADS)


def load(files: Iterable[Path], evidence: Evidence) -> list[RankTrace]:
    """The latest launch's traces, by rank."""
    starts = []
    for path in files:
        try:
            starts.append(_read(path))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            why = getattr(error, "strerror", "") or str(error)
            evidence.problems.append(safe(f"{path.name}: {why}"))
    latest = _latest(starts)
    evidence.earlier += [
        safe(f"{one.path.name}: of an earlier launch, or of another job: not judged")
        for one in starts
        if one not in latest
    ]
    for one in latest:
        if one.bad:
            text = f"{one.bad} lines are no records, or do not follow from those before"
            evidence.problems.append(safe(f"{one.path.name}: {text}"))
    return sorted(latest, key=lambda one: one.rank)


def _read(path: Path) -> RankTrace:
    with path.open("rb") as file:
        first = json.loads(file.readline(_LONGEST_LINE) or b"{}")
        number = first.get("format")
        if number != records.FORMAT:
            raise ValueError(
                f"format {number}; this nemo_patches reads {records.FORMAT}"
            )
        header = records.Header(**{k: v for k, v in first.items() if k != "k"})
        if not 0 <= header.rank < header.world_size <= _MOST_RANKS:
            raise ValueError(f"rank {header.rank} of {header.world_size} in its header")
        trace = RankTrace(header, path)
        while line := file.readline(_LONGEST_LINE):
            if line.endswith(b"\n"):
                trace.take(line)
            else:
                trace.bad += 1
    return trace


def _latest(starts: list[RankTrace]) -> list[RankTrace]:
    """Each rank's last start in the newest job. A rank with fewer starts than others may not have
    been in the last launch: it counts only if it began nearer to that than to the one before.
    """
    if not starts:
        return []
    newest = max(starts, key=lambda one: one.header.started).header
    of_rank: dict[int, list[float]] = defaultdict(list)
    last: dict[int, RankTrace] = {}
    for one in sorted(starts, key=lambda one: one.header.started):
        header = one.header
        if header.job == newest.job and header.world_size == newest.world_size:
            last[one.rank] = one
            of_rank[one.rank].append(header.started)
    most = max(of_rank.values(), key=len)
    return [
        one
        for rank, one in last.items()
        if len(of_rank[rank]) == len(most)
        or abs(one.header.started - most[-1]) < abs(one.header.started - most[-2])
    ]


def read(files: list[Path], evidence: Evidence) -> None:
    traces = load(files, evidence)
    if not traces:
        return
    evidence.world_size = traces[0].header.world_size
    by_rank = {one.rank: one for one in traces}
    absent = sorted(set(range(evidence.world_size)) - by_rank.keys())
    if absent:
        evidence.problems.append(f"there is no trace of {named(absent)}")
    ends = {one.rank: _end(one) for one in traces}
    _without_end(traces, ends)
    for one in traces:
        evidence.facts += _of_rank(one, ends[one.rank])
        for rank in sorted(one.gone):
            other = by_rank.get(rank)
            if other is not None and other.end is None:
                evidence.facts.append(_fact(one, Fate(fates.GONE), one.last, of=rank))
    for one in traces:
        end = ends[one.rank]
        if end is None or end.kind != fates.ENDED:
            evidence.facts += _of_reports(one, by_rank)
    _add_seats(traces, evidence)
    outcomes = {outcome for one in traces for outcome in one.outcomes}
    if records.TIMEOUT in outcomes and records.CAME not in outcomes:
        evidence.facts += [
            Fact(rank, Fate(fates.UNSEEN), "no trace of it is here", own=False)
            for rank in absent
        ]
    evidence.findings += [
        *_different(traces),
        *_uneven(traces, list(ends.values())),
        *_straggler(traces),
        *_late(traces),
    ]
    evidence.ranks += _summaries(traces)
    if not absent and all(one.went_well for one in traces):
        evidence.is_well = True
        evidence.facts = [
            fact for fact in evidence.facts if not isinstance(fact.value, Call)
        ]
    calls = max(len(one.entered) for one in traces)
    vain = sum(len(one.gave_up) for one in traces)
    evidence.summary.append(
        f"{len(traces)} of {evidence.world_size} ranks have a trace: {calls} calls,"
        f" {vain} length syncs given up on all ranks."
    )


def _fact(trace: RankTrace, value: Value, t: float, of: int | None = None) -> Fact:
    """of: the rank that this one's report is about."""
    header = trace.header
    cite = f"rank {trace.rank}'s {'trace' if of is None else 'stall report'}"
    at, rank = header.started + t, trace.rank if of is None else of
    return Fact(rank, value, cite, at, safe(header.host), own=of is None)


def _of_rank(trace: RankTrace, end: Fate | None) -> Iterator[Fact]:
    member = Member(trace.header.world_size, trace.header.pid)
    yield _fact(trace, member, trace.last)
    if end is not None:
        yield _fact(trace, end, (trace.raised or trace.end or {"t": trace.last})["t"])
    if trace.is_whole:
        call = Call(trace.title, trace.position, trace.phase, trace.in_vain)
        yield _fact(trace, call, trace.last)


def _end(trace: RankTrace) -> Fate | None:
    """How its process ended, by its own records; None where they do not say."""
    end = trace.end if trace.end and not trace.end.get("reason") else None
    # Not every exit code is known to the interpreter.
    code = (end.get("exit_code") or 0) if end else None
    if code == STALL_EXIT:
        return Fate(fates.TERMINATED, "stall_exit")
    said = str(end.get("error") or "") if end else ""
    raised = trace.raised
    if raised is None and not said:
        if end is None:
            return None
        text = f"after {trace.title}" + (f", exit code {code}" if code else "")
        return Fate(fates.ENDED, text, exit_code=code or 0)
    error = _raised(raised) if raised else error_in(said)
    if error.type in BY_HAND or ENDED_WITH_IT.search(error.message):
        return Fate(fates.TERMINATED, error.line)
    if error.is_of_a_collective:
        kind = fates.WAITED if TIMED_OUT.search(error.line) else fates.CUT
        start = f"{fates.AT_START}: " if error.is_of_the_start else ""
        return Fate(kind, start + error.line)
    where = " < ".join(
        shown(function, file, line) for file, line, function in error.frames[:3]
    )
    lines = tuple(map(safe, error.traceback.strip().splitlines()[-4:]))
    return Fate(fates.RAISED, error.line, safe(where), lines, code)


def _raised(record: dict[str, Any]) -> Error:
    text = {
        name: str(record.get(name, "")) for name in ("type", "message", "traceback")
    }
    return error_of(records.Raised(t=0.0, e="", n=0, **text))


def _without_end(traces: list[RankTrace], ends: dict[int, Fate | None]) -> None:
    """Where connections closed, or a launcher ended the others, the one rank without an end was
    killed. Of several only all those of a host are told: SIGTERM leaves no end either.
    """
    unknown = [one for one in traces if ends[one.rank] is None and not _runs(one)]
    cut = [one for one in unknown if one.outcome == records.ENDED]
    unknown = [one for one in unknown if one not in cut]
    known = {end.kind for end in ends.values() if end is not None}
    others_ended = cut or {fates.CUT, fates.TERMINATED} & known
    hosts = {one.header.host for one in unknown}
    is_host = all(one in unknown for one in traces if one.header.host in hosts)
    if (
        not others_ended
        or fates.WAITED in known
        or not unknown
        or (len(unknown) > 1 and not is_host)
    ):
        return
    if all(one.is_whole for one in unknown):
        ends |= {one.rank: Fate(fates.GONE) for one in unknown}
        ends |= {one.rank: Fate(fates.CUT, fates.SYNC_ENDED) for one in cut}


def _runs(trace: RankTrace) -> bool:
    """Whether its process runs on this host now, or goes on without a trace."""
    header = trace.header
    if (trace.end or {}).get("reason"):
        return True
    fields = stat_fields(f"/proc/{header.pid}/stat")
    if header.host != socket.gethostname() or not fields or fields[0] in "ZX":
        return False
    return 0 < started_at(header.pid) < header.started + CLOCK_SLACK_S


def _of_reports(trace: RankTrace, traces: dict[int, RankTrace]) -> Iterator[Fact]:
    """What its stall reports say of all ranks, if they are about the stall that it is in."""
    if (report := trace.stalled) is not None:
        t, text = float(report["t"]), safe(str(report.get("text", "")))
        still_s = t - (trace.entered[-1] if trace.entered else 0.0)
        # It has waited for its stall_timeout, however short: that is a hang.
        age = still_s if still_s >= STUCK_AFTER_S else None
        yield _fact(trace, Motion(False, text[:_LONGEST_TEXT], age), t)
        for rank, value in told_in(text).items():
            other = traces.get(rank)
            has_no_end = other is not None and other.end is None
            if has_no_end and isinstance(value, Fate) and value.kind == fates.ENDED:
                value = Fate(fates.GONE)  # it left, and its trace has no end
            if not _went_on(other, trace, t):
                yield _fact(trace, value, t, of=rank)
    report = trace.missing
    if report is None or not trace.in_vain:
        return
    with contextlib.suppress(KeyError, TypeError, ValueError):
        t = float(report["t"])
        names = ("ranks", "kinds", "where", "collectives")
        told = list(zip(*(report[name] for name in names), strict=True))
        came = {rank for rank, one in traces.items() if one.came_to >= trace.round}
        if told and all(rank in came for rank, *_ in told):
            return  # who was missing has come by now: it was late
        yield _fact(trace, Place(collective=LENGTH_SYNC), t, of=trace.rank)
        for one in traces.values():
            if one.missing is None and one.in_vain and one.round == trace.round:
                at = one.gave_up[-1]
                yield _fact(one, Place(collective=LENGTH_SYNC), at)
        for rank, kind, where, collective in told:
            if rank in came:
                continue
            fate = fates.GONE if where == GONE else _KINDS.get(kind)
            place = Place(safe(str(where)), safe(str(collective)))
            yield _fact(trace, Fate(fate) if fate else place, t, of=int(rank))


def _went_on(other: RankTrace | None, by: RankTrace, t: float) -> bool:
    """Whether a rank has called an encoder, or ended, after another one's report: by the end of the
    last round that both were in.
    """
    if other is None or other is by:
        return False
    last = max(other.rounds.keys() & by.rounds.keys(), default=None)
    if last is None:
        return other.position > by.position
    moved = max(other.entered[-1], (other.end or {"t": 0.0})["t"])
    return bool(moved - other.rounds[last][0] > t - by.rounds[last][0])


def _add_seats(traces: list[RankTrace], evidence: Evidence) -> None:
    """The last rounds, if a rank has given up the latest one, or reports a stall in it. Rounds pair
    by number. A trace that lacks one which came on another rank is not whole.
    """
    came = max((max(one.rounds, default=0) for one in traces), default=0)
    known = [one for one in traces if one.is_whole and one.came_to >= came]
    latest = max((one.came_to for one in known), default=0)
    if not any(
        one.came_to == latest and (one.in_vain or (one.phase and one.stalled))
        for one in known
    ):
        return
    members = evidence.groups.setdefault(_GROUP, set())
    if len(known) < evidence.world_size:
        evidence.partly_known.add(_GROUP)
    for one in known:
        if not one.came_to or one.outcome == records.ENDED:
            continue
        members.add(one.rank)
        done = {
            number: True for number in (one.round - one.in_vain, one.round) if number
        }
        if one.phase == LENGTH_SYNC:
            done[one.round + 1] = False
        for number, is_done in done.items():
            seat = Seat(
                one.rank, _GROUP, number, LENGTH_SYNC, done=is_done, caller=one.title
            )
            evidence.facts.append(_fact(one, seat, one.last))


def _different(traces: list[RankTrace]) -> Iterator[Finding]:
    """What differs between ranks: whether they sync their lengths, settings, versions."""
    syncs = [
        (set(one.outcomes) != {records.LOCAL}, one.rank)
        for one in traces
        if one.outcomes
    ]
    if len(by_sync := parties(syncs)) > 1:
        text = f"The length is synced on {named(by_sync[True])}, and not on"
        text += (
            f" {named(by_sync[False])} (sync_max_audio_length is false, or sync=local)."
        )
        yield finding(ids.DIFFERENT_SYNC, text, next(iter(by_sync.values())))
    for name in traces[0].header.settings | traces[0].header.versions:
        by_value = parties(
            ((one.header.settings | one.header.versions).get(name, "none"), one.rank)
            for one in traces
        )
        if len(by_value) > 1 and not (name == "sync" and len(by_sync) > 1):
            told = "; ".join(
                f"{safe(str(key))} on {named(of)}" for key, of in by_value.items()
            )
            yield finding(ids.DIFFERENT_SETTINGS, f"{safe(name)} differs: {told}.")


def _uneven(traces: list[RankTrace], ends: list[Fate | None]) -> Iterator[Finding]:
    """Of ranks that have all ended."""
    calls = parties((len(one.entered), one.rank) for one in traces if not one.bad)
    have_ended = all(
        one.went_well or (end is not None and end.kind == fates.ENDED)
        for one, end in zip(traces, ends, strict=True)
    )
    if len(calls) < 2 or not have_ended:
        return
    told = "; ".join(f"{named(ranks)} {count}" for count, ranks in calls.items())
    yield finding(ids.UNEVEN_CALLS, f"The ranks made unlike numbers of calls: {told}.")


def _lags(traces: list[RankTrace]) -> dict[int, list[float]]:
    """By rank, how long after the first it came, in the last rounds that came in time on all."""
    shared = set.intersection(*(set(one.rounds) for one in traces))
    longest = {n: max(one.rounds[n][1] for one in traces) for n in sorted(shared)}
    return {
        one.rank: [most - one.rounds[n][1] for n, most in longest.items()]
        for one in traces
    }


def _straggler(traces: list[RankTrace]) -> Iterator[Finding]:
    """The rank that comes last to most rounds. None where others come nearly as late: each may have
    waited for the other before the encoder.
    """
    lags = _lags(traces)
    count = len(next(iter(lags.values())))
    if len(traces) < 2 or count < _LEAST_ROUNDS:
        return
    usual = {rank: median(of_rank) for rank, of_rank in lags.items()}
    rank = max(usual, key=lambda one: usual[one])
    others = [one for one in lags if one != rank]
    is_last = [
        all(lags[rank][n] > lags[one][n] for one in others) for n in range(count)
    ]
    ends = [traces[0].rounds[n][0] for n in sorted(traces[0].rounds)[-count:]]
    if (
        all(2 * sum(part) > len(part) for part in (is_last, is_last[-count // 4 :]))
        and usual[rank] >= max(_LEAST_LAG_S, *(2 * usual[one] for one in others))
        and usual[rank] * count >= _LEAST_WAITING * (ends[-1] - ends[0])
    ):
        text = f"rank {rank} comes last to {sum(is_last)} of the last {count} rounds, "
        text += f"{usual[rank] * 1000:.0f} ms after the first (median)."
        yield finding(ids.STRAGGLER, text, [rank])


def _late(traces: list[RankTrace]) -> Iterator[Finding]:
    """Rounds that some ranks gave up, and others came to late."""
    for one in traces:
        others = [other for other in traces if other.vain_rounds & one.rounds.keys()]
        if others:
            count = len(
                set.union(*(each.vain_rounds for each in others)) & one.rounds.keys()
            )
            gave_up = named([each.rank for each in others])
            text = f"rank {one.rank} came too late to {count} of its last rounds; {gave_up}"
            yield finding(ids.LATE, f"{text} went on without it.", [one.rank])


def _summaries(traces: list[RankTrace]) -> Iterator[RankSummary]:
    lags = _lags(traces)
    for one in traces:
        where = f"in {one.title}, {one.phase}" if one.phase else f"out of {one.title}"
        yield RankSummary(
            rank=one.rank,
            host=safe(one.header.host),
            pid=one.header.pid,
            calls=len(one.entered),
            state=where if one.number else "no call yet",
            ago=None,
            waited=one.waited,
            lag=median(lags[one.rank]) if lags[one.rank] else None,
        )
