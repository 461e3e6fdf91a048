"""Reader of traces:
of each rank its last call, how it ended, where its stall reports saw all ranks, and who was
late.

Ranks are compared by the numbers of their calls and rounds, never by hosts' clocks. A trace that is
damaged tells how its process ended, and nothing of its last call.
"""

from __future__ import annotations

import socket
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import get_args

import msgspec

from nemo_patches.facts import LENGTH_SYNC
from nemo_patches.judging.kinds import (
    GONE,
    LEFT,
    OF_EVALUATION,
    OF_TRAINING,
    SILENT,
    UNANNOUNCED,
)
from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.collect.proc_files import (
    CLOCK_SLACK_S,
    started_at,
    stat_fields,
)
from nemo_patches.tools.diagnose.entries import Entry
from nemo_patches.tools.diagnose.findings import Finding, RankSummary
from nemo_patches.tools.diagnose.frame_text import shown
from nemo_patches.tools.diagnose.rank_end import STALL_EXIT, error_in, error_of
from nemo_patches.tools.diagnose.rank_facts import (
    Condition,
    EncoderCall,
    Evidence,
    Fact,
    Motion,
    Place,
    ProcessRank,
    Value,
)
from nemo_patches.tools.diagnose.sources.exception_lines import kind_of
from nemo_patches.tools.diagnose.sources.report_files import (
    RankReport,
    ReportedGroup,
    facts_of,
)
from nemo_patches.tools.diagnose.sources.stall_lines import HAS_LEFT, told_in
from nemo_patches.tools.diagnose.verdicts import capital, finding, parties
from nemo_patches.tracing import records

KIND = "traces"
_HEAD = b'{"k":"header"'
_MOST_RANKS = 1 << 20
_LONGEST_LINE = 1 << 20  # bytes
_KEPT_ROUNDS = 1024  # of each rank: by these lateness is told
_LEAST_ROUNDS = 48  # fewer show no habit
_LEAST_LAG_S = 0.005
_LEAST_WAITING = 0.05  # share of the time; less does no harm
_OTHER_ENCODER = (
    "Look at what decides there which encoder is called: it must be the same on all"
    " ranks."
)
_GROUP = "length sync"  # all encoders share the rounds
_CONDITIONS = {
    LEFT: conditions.GONE,
    SILENT: conditions.SILENT,
    UNANNOUNCED: conditions.UNSEEN,
}
_DECODERS: dict[bytes, msgspec.json.Decoder[records.Timed]] = {
    kind.k.encode(): msgspec.json.Decoder(kind) for kind in get_args(records.Timed)
}


@dataclass(frozen=True)
class ReadStall(records.Stalled):
    """Read."""

    groups: tuple[ReportedGroup, ...] = ()


_DECODERS[b"stalled"] = msgspec.json.Decoder(ReadStall)


@dataclass
class RankTrace:
    """One start of one rank's process."""

    header: records.Header
    path: Path
    entered: array[float] = field(default_factory=lambda: array("d"))
    calls: list[str] = field(
        default_factory=list
    )  # of which kind, and encoder, each was
    gave_up: array[float] = field(default_factory=lambda: array("d"))
    last: float = 0.0  # when its last record was made
    called: float = 0.0  # likewise, of those that its calls make
    # In its length syncs: from when to when, one after the other.
    waits: array[float] = field(default_factory=lambda: array("d"))
    # Of the last call, by encoder
    numbers: dict[str, int] = field(default_factory=dict)
    encoder: str = ""  # of the last call
    training: int = 0  # calls
    evaluation: int = 0  # calls since the last training call
    phase: str = ""  # of the last call; empty: it has left it
    round: int = 0  # the latest that this rank has issued
    outcome: str = ""  # of the last length sync
    rounds: dict[int, tuple[float, float]] = field(default_factory=dict)  # end, wait
    vain_rounds: set[int] = field(default_factory=set)
    waited: float = 0.0
    raised: records.Raised | None = None  # since which no encoder was called
    stalled: ReadStall | None = None  # the job's report, likewise
    missing: ReadStall | None = None  # on the round that was given up
    departed: ReadStall | None = None  # ranks that have left
    told: ReadStall | None = (
        None  # the last line on a stall, also one that is no warning
    )
    end: records.End | None = None
    gone: set[int] = field(default_factory=set)  # whose process it saw gone
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
        return self.outcome in (records.TIMEOUT, records.UNWAITED)

    @property
    def goes_on(self) -> bool:
        """Whether only the trace has ended."""
        return self.end is not None and bool(self.end.reason)

    @property
    def went_well(self) -> bool:
        """Whether nothing was wrong at its end; with a reason the process goes on without it."""
        is_odd = self.phase or self.bad or self.raised or self.missing or self.stalled
        return self.end is not None and not is_odd

    @property
    def is_whole(self) -> bool:
        return not self.bad and not self.goes_on

    def is_cut(self, came: int) -> bool:
        """Whether it lacks a round that came on another rank, and so was over on all: this rank had
        no time to write it. Where it is since is not known.
        """
        has_ended = self.end or self.raised or self.outcome == records.ENDED
        return self.round < came and not has_ended

    def take(self, line: bytes) -> None:
        try:
            record = _DECODERS[line[6 : line.index(b'"', 6)]].decode(line)
        except (ValueError, KeyError, RecursionError):  # also of a line that is cut
            self.bad += 1
            return
        if isinstance(record, records.Enter):
            self._enter(record)
        elif isinstance(record, records.Sync):
            self._sync(record)
        elif isinstance(record, records.Leave):
            self._check(record.e, record.n)
            self.phase = ""
        elif isinstance(record, records.Raised):
            if record.e:
                self._check(record.e, record.n)
                self.phase = ""
            self.raised = record
        elif isinstance(record, ReadStall):
            seen = zip(record.ranks, record.where, strict=False)
            self.gone |= {rank for rank, where in seen if where == GONE}
            if record.e and not record.n:
                self.departed = record
            elif record.e:
                self.missing = record
            else:  # where nobody waits, ranks decode, or end
                self.stalled = record if record.waited else None
                self.told = record
        elif isinstance(record, records.End):
            self.end = record
        self.last = record.t
        if not isinstance(record, (ReadStall, records.End)):
            self.called = record.t

    def _check(self, encoder: str, number: int) -> None:
        """Whether it is in this call."""
        is_other = encoder != self.encoder or number != self.numbers.get(encoder)
        if is_other or not self.phase:
            self.bad += 1

    def _enter(self, record: records.Enter) -> None:
        if self.phase or record.n != self.numbers.get(record.e, record.n - 1) + 1:
            self.bad += 1
        self.encoder = record.e
        self.numbers[record.e] = record.n
        if record.training:
            self.training += 1
            self.evaluation = 0
        else:
            self.evaluation += 1
        self.entered.append(record.t)
        kind = "a training" if record.training else "an evaluation"
        self.calls.append(sys.intern(f"{kind} call of {record.e}"))
        self.phase = LENGTH_SYNC
        self.raised = self.stalled = self.told = None

    def _sync(self, record: records.Sync) -> None:
        number = record.round
        if record.n == self.numbers.get(record.e, record.n - 1) + 1:
            # Of a compiled encoder's call nothing else is there
            self.numbers[record.e] = record.n
            self.entered.append(record.t)
            self.encoder = record.e
        else:
            self._check(record.e, record.n)
        self.phase = ids.LAYERS if self.phase else ""
        self.outcome = record.outcome
        self.waited += record.waited
        self.waits.extend((record.t - record.waited, record.t))
        if self.outcome in (records.LOCAL, records.ENDED):
            return
        if self.round and number not in (self.round, self.round + 1, 1):
            self.bad += 1
        if number < self.round:  # of another process group
            self.rounds.clear()
        self.round = number
        if self.in_vain:
            self.gave_up.append(record.t)
            self.vain_rounds.add(number)
        elif self.outcome == records.CAME:
            self.missing = None
            self.rounds[number] = (record.t, record.waited)
            if len(self.rounds) > _KEPT_ROUNDS:
                del self.rounds[next(iter(self.rounds))]


def recognises(name: str, head: bytes) -> bool:
    return head.startswith(_HEAD)


def load(files: Iterable[Path], evidence: Evidence) -> list[RankTrace]:
    """The latest launch's traces, by rank."""
    starts = []
    for path in files:
        try:
            starts.append(_read(path))
        except (OSError, ValueError, RecursionError) as error:
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
        first = file.readline(_LONGEST_LINE)
        number = msgspec.json.decode(first, type=_Format).format
        if number != records.FORMAT:
            raise ValueError(
                f"format {number}; this nemo_patches reads {records.FORMAT}"
            )
        header = msgspec.json.decode(first, type=records.Header)
        if not 0 <= header.rank < header.world_size <= _MOST_RANKS:
            raise ValueError(f"rank {header.rank} of {header.world_size} in its header")
        trace = RankTrace(header, path)
        while line := file.readline(_LONGEST_LINE):
            trace.take(line)
    return trace


class _Format(msgspec.Struct):
    format: int


def _latest(starts: list[RankTrace]) -> list[RankTrace]:
    """Each rank's last start in the newest job. A rank with fewer starts than others may not have
    been in the last launch.
    """
    if not starts:
        return []
    starts = sorted(starts, key=lambda one: one.header.started)
    newest = starts[-1].header
    of_rank: dict[int, list[RankTrace]] = defaultdict(list)
    for one in starts:
        same_job = one.header.job == newest.job
        if same_job and one.header.world_size == newest.world_size:
            of_rank[one.rank].append(one)
    launches = max(map(len, of_rank.values()))
    return [each[-1] for each in of_rank.values() if len(each) == launches]


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
    came = max(max(one.rounds, default=0) for one in traces)
    for one in traces:
        end = ends[one.rank]
        evidence.facts += _of_rank(one, end, came)
        for rank in sorted(one.gone & by_rank.keys()):
            if by_rank[rank].end is None:
                gone = Condition(conditions.GONE)
                evidence.facts.append(_fact(one, gone, one.last, of=rank))
        if end is None or end.kind != conditions.ENDED:
            evidence.facts += _of_reports(one, by_rank)
    _add_entries(traces, evidence, came)
    if any(one.gave_up for one in traces) and not any(one.rounds for one in traces):
        unseen = Condition(conditions.UNSEEN)
        evidence.facts += [
            Fact(rank, unseen, "no trace of it is here", own=False) for rank in absent
        ]
    lags = _lags(traces)
    evidence.findings += [
        *_uneven(traces, list(ends.values())),
        *_straggler(traces, lags),
        *_late(traces),
    ]
    evidence.ranks += [_summary(one, lags[one.rank]) for one in traces]
    if not absent and all(one.went_well for one in traces):
        evidence.is_well = True
        evidence.facts = [
            fact for fact in evidence.facts if not isinstance(fact.value, EncoderCall)
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


def _of_rank(trace: RankTrace, end: Condition | None, came: int) -> Iterator[Fact]:
    member = ProcessRank(trace.header.world_size, trace.header.pid)
    yield _fact(trace, member, trace.last)
    if end is not None:
        ended = trace.raised or trace.end
        yield _fact(trace, end, ended.t if ended is not None else trace.last)
    if trace.is_whole and not trace.is_cut(came):
        call = EncoderCall(trace.title, trace.position)
        yield _fact(trace, call, trace.last)


def _end(trace: RankTrace) -> Condition | None:
    """How its process ended, by its own records; None where they do not say."""
    end = trace.end if not trace.goes_on else None
    # Not every exit code is known to the interpreter.
    code = (end.exit_code or 0) if end is not None else 0
    if code == STALL_EXIT:
        return Condition(conditions.TERMINATED, "stall_exit")
    if trace.raised is not None:
        error = error_of(trace.raised)
    elif end is None:
        return None
    elif end.error:
        error = error_in(end.error)
    else:
        text = f"after {trace.title}" + (f", exit code {code}" if code else "")
        return Condition(conditions.ENDED, text, exit_code=code)
    kind, start = kind_of(error)
    if kind != conditions.RAISED:
        return Condition(kind, start + error.line)
    where = " < ".join(
        shown(function, file, line) for file, line, function in error.frames[:3]
    )
    lines = tuple(map(safe, error.traceback.strip().splitlines()[-4:]))
    return Condition(conditions.RAISED, error.line, safe(where), lines, code)


def _without_end(traces: list[RankTrace], ends: dict[int, Condition | None]) -> None:
    """Where connections closed, or a launcher ended the others, the one rank without an end was
    killed. Of several none is told: SIGTERM leaves no end either.
    """
    unknown = [one for one in traces if ends[one.rank] is None and not _runs(one)]
    cut = [one for one in unknown if one.outcome == records.ENDED]
    unknown = [one for one in unknown if one not in cut]
    known = {end.kind for end in ends.values() if end is not None}
    others_ended = cut or {conditions.CUT, conditions.TERMINATED} & known
    if len(unknown) != 1 or not others_ended or conditions.WAITED in known:
        return
    [one] = unknown
    if one.is_whole:
        ends[one.rank] = Condition(conditions.GONE)
        ends |= {
            each.rank: Condition(conditions.CUT, conditions.SYNC_ENDED) for each in cut
        }


def _runs(trace: RankTrace) -> bool:
    """Whether its process runs on this host now, or goes on without a trace."""
    header = trace.header
    if trace.goes_on or header.host != socket.gethostname():
        return trace.goes_on
    fields = stat_fields(f"/proc/{header.pid}/stat")
    if not fields or fields[0] in "ZX":
        return False
    return 0 < started_at(header.pid) < header.started + CLOCK_SLACK_S


def _of_reports(trace: RankTrace, traces: dict[int, RankTrace]) -> Iterator[Fact]:
    """What its stall reports say of all ranks, if they are about the stall that it is in."""
    if (left := trace.departed) is not None:
        for rank, kind in zip(left.ranks, left.kinds, strict=False):
            has_left = HAS_LEFT if kind == LEFT else Condition(conditions.GONE)
            yield _fact(trace, has_left, left.t, of=rank)
    if trace.stalled is not None:
        yield from _of_all_ranks(trace, trace.stalled, traces)
    elif trace.told is not None and not trace.went_well:
        hint = f"rank {trace.rank}'s last line: {safe(trace.told.text)}"
        yield _fact(trace, Condition(conditions.HINT, hint), trace.told.t)
    report = trace.missing
    if report is None or not trace.in_vain:
        return
    came = {rank for rank, one in traces.items() if one.came_to >= trace.round}
    if report.ranks and came.issuperset(report.ranks):
        return  # who was missing has come by now: it was late
    yield _fact(trace, Place(collective=LENGTH_SYNC), report.t, of=trace.rank)
    for one in traces.values():  # these gave it up as well
        if one.missing is None and one.in_vain and one.round == trace.round:
            yield _fact(one, Place(collective=LENGTH_SYNC), one.gave_up[-1])
    told = zip(
        report.ranks, report.kinds, report.where, report.collectives, strict=False
    )
    for rank, kind, where, collective in told:
        if rank not in came:
            condition = conditions.GONE if where == GONE else _CONDITIONS.get(kind)
            value = (
                Condition(condition)
                if condition
                else Place(safe(where), safe(collective))
            )
            yield _fact(trace, value, report.t, of=rank)


def _of_all_ranks(
    trace: RankTrace, report: ReadStall, traces: dict[int, RankTrace]
) -> Iterator[Fact]:
    """Where the judge knew them to be; by older versions' records, what the line said."""
    at = trace.header.started + report.t
    size = trace.header.world_size
    answer = RankReport(size, "WARNING", report.text, report.groups, trace.rank, at)
    facts = list(facts_of(answer))
    if not facts:
        still_s = report.t - (trace.entered[-1] if trace.entered else 0.0)
        motion = Motion(still_s=still_s, is_hang=True)
        told = told_in(safe(report.text))
        facts = [_fact(trace, value, report.t, of=rank) for rank, value in told]
        facts.append(_fact(trace, motion, report.t))
    for fact in facts:
        other = traces.get(fact.rank)
        if _went_on(other, trace, report.t):
            continue
        if fact.condition_kind == conditions.ENDED and other and other.end is None:
            # It left, and its trace has no end.
            fact = replace(fact, value=Condition(conditions.GONE))
        yield fact


def _went_on(other: RankTrace | None, by: RankTrace, t: float) -> bool:
    """Whether a rank has called an encoder, or ended, after another one's report: by the end of the
    last round that both were in.
    """
    if other is None or other is by:
        return False
    last = max(other.rounds.keys() & by.rounds.keys(), default=None)
    if last is None:
        return other.position > by.position
    moved = max(other.entered[-1], other.end.t if other.end is not None else 0.0)
    return moved - other.rounds[last][0] > t - by.rounds[last][0]


def _add_entries(traces: list[RankTrace], evidence: Evidence, came: int) -> None:
    """The last rounds, if a rank has given up the latest one, or reports a stall in it. Rounds pair
    by number. came: the latest that came on any rank.
    """
    known = [
        one
        for one in traces
        if one.is_whole and one.came_to >= came and not one.is_cut(came)
    ]
    latest = max((one.came_to for one in known), default=0)
    if not any(
        one.came_to == latest and (one.in_vain or (one.phase and one.stalled))
        for one in known
    ):
        return
    members = evidence.groups.setdefault(_GROUP, set())
    if len(known) < evidence.world_size:
        evidence.partly_known.add(_GROUP)
    reports = [one.missing for one in known if one.round == latest and one.missing]
    awaited = {rank for report in reports for rank in report.ranks}
    for one in known:
        if not one.came_to or one.outcome == records.ENDED:
            continue
        if awaited and one.came_to < latest and one.rank not in awaited:
            continue  # the job has asked it: it waits itself, before its encoder
        members.add(one.rank)
        done = {
            number: True for number in (one.round - one.in_vain, one.round) if number
        }
        if one.phase == LENGTH_SYNC:
            done[one.round + 1] = False
        for number, is_done in done.items():
            entry = Entry(
                one.rank, _GROUP, number, LENGTH_SYNC, done=is_done, caller=one.title
            )
            evidence.facts.append(_fact(one, entry, one.last))


def _uneven(traces: list[RankTrace], ends: list[Condition | None]) -> Iterator[Finding]:
    """Of ranks that have all ended."""
    calls = parties((len(one.entered), one.rank) for one in traces if not one.bad)
    parts, step = _parting(traces)
    have_ended = all(
        one.went_well or (end is not None and end.kind == conditions.ENDED)
        for one, end in zip(traces, ends, strict=True)
    )
    if len(calls) > 1 and have_ended:
        told = "; ".join(f"{named(ranks)} {count}" for count, ranks in calls.items())
        text = f"The ranks made unlike numbers of calls: {told}."
        yield finding(ids.UNEVEN_CALLS, f"{text} {parts}".strip(), next_step=step)
    elif parts:
        yield finding(ids.UNEVEN_CALLS, parts, next_step=step)


def _parting(traces: list[RankTrace]) -> tuple[str, str]:
    """Where the ranks' calls part, and what to switch on; empty where they do not, as far as all
    have come. Of a compiled encoder not all calls are recorded.
    """
    whole = [
        one for one in traces if not one.bad and len(one.calls) == len(one.entered)
    ]
    if len(whole) < 2 or len(whole) < len(traces):
        return "", ""
    for number, next_ones in enumerate(
        zip(*(one.calls for one in whole), strict=False)
    ):
        by_call = parties(
            (call, one.rank) for call, one in zip(next_ones, whole, strict=True)
        )
        if len(by_call) < 2:
            continue
        before = whole[0].calls[number - 1] if number else "its start"
        told = "; ".join(f"{named(ranks)} {call}" for call, ranks in by_call.items())
        text = f"Their calls part at call {number + 1}, after {before}: next, {told}."
        evaluates = [
            rank
            for call, ranks in by_call.items()
            for rank in ranks
            if call.startswith("an evaluation")
        ]
        if not 0 < len(evaluates) < len(whole):
            return text, _OTHER_ENCODER
        if before.startswith("an evaluation"):
            return text, capital(f"{OF_EVALUATION}.")
        ran_out = f"{named(evaluates)} ran out of training batches: {OF_TRAINING}."
        return text, capital(ran_out)
    return "", ""


def _lags(traces: list[RankTrace]) -> dict[int, list[float]]:
    """By rank, how long after the first it came, in the last rounds that came in time on all."""
    shared = set.intersection(*(set(one.rounds) for one in traces))
    longest = {n: max(one.rounds[n][1] for one in traces) for n in sorted(shared)}
    return {
        one.rank: [most - one.rounds[n][1] for n, most in longest.items()]
        for one in traces
    }


def _straggler(
    traces: list[RankTrace], lags: dict[int, list[float]]
) -> Iterator[Finding]:
    """The rank that is late to most rounds. None where others come nearly as late: each may have
    waited for the other before the encoder.
    """
    count = len(lags[traces[0].rank])
    if len(traces) < 2 or count < _LEAST_ROUNDS:
        return
    usual = {
        rank: min(median_low(each), median_low(each[-count // 4 :]))
        for rank, each in lags.items()
    }
    *_, next_to_last, most = sorted(usual.values())
    ends = [traces[0].rounds[n][0] for n in sorted(traces[0].rounds)[-count:]]
    waiting = most * count / (ends[-1] - ends[0])
    if most >= max(_LEAST_LAG_S, 2 * next_to_last) and waiting >= _LEAST_WAITING:
        rank = max(usual, key=lambda one: usual[one])
        text = f"rank {rank} comes {most * 1000:.0f} ms after the first (median) to the"
        text += f" last {count} rounds."
        yield finding(ids.STRAGGLER, text, [rank])


def _late(traces: list[RankTrace]) -> Iterator[Finding]:
    """Rounds that some ranks gave up, and others came to late: one finding for all of them."""
    missed: dict[int, int] = {}
    went_on: set[int] = set()
    for one in traces:
        others = [other for other in traces if other.vain_rounds & one.rounds.keys()]
        if others:
            given_up = set.union(*(other.vain_rounds for other in others))
            missed[one.rank] = len(given_up & one.rounds.keys())
            went_on |= {other.rank for other in others}
    if not missed:
        return
    by_count = parties((count, rank) for rank, count in missed.items())
    told = ", ".join(f"{named(ranks)} to {count}" for count, ranks in by_count.items())
    text = f"{named(missed)} came too late to some of the last rounds ({told});"
    text += f" {named(went_on)} went on without them."
    if len(missed) == 1:
        [(rank, count)] = missed.items()
        text = f"rank {rank} came too late to {count} of its last rounds;"
        text += f" {named(went_on)} went on without it."
    yield finding(ids.LATE, text, sorted(missed))


def _summary(trace: RankTrace, lags: list[float]) -> RankSummary:
    at = f"in {trace.title}, {trace.phase}" if trace.phase else f"out of {trace.title}"
    return RankSummary(
        rank=trace.rank,
        host=safe(trace.header.host),
        pid=trace.header.pid,
        calls=len(trace.entered),
        state=at if trace.number else "no call yet",
        ago=None,
        waited=trace.waited,
        lag=median_low(lags) if lags else None,
    )
