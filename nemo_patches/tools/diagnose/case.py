"""A case: one encoder on all ranks of a job, the material of every verdict."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat

from nemo_patches.judging.kinds import LEFT
from nemo_patches.text import safe
from nemo_patches.tools.diagnose.alignment import Clocks, Rounds, clocks, shared_rounds
from nemo_patches.tools.diagnose.endings import Ending, endings
from nemo_patches.tools.diagnose.folder import TracedJob
from nemo_patches.tools.diagnose.rank_trace import Track
from nemo_patches.tracing.records import Stalled


@dataclass(frozen=True)
class Case:
    """One encoder. tracks: of the ranks that have called it. endings: of all ranks that have a
    trace.
    """

    job: TracedJob
    name: str
    tracks: dict[int, Track]
    rounds: Rounds
    clocks: Clocks
    endings: dict[int, Ending]

    @property
    def sure(self) -> dict[int, Ending]:
        """The endings of the ranks whose traces are whole at their end."""
        return {
            rank: ending for rank, ending in self.endings.items() if not ending.unsure
        }

    @property
    def ended_well(self) -> bool:
        """Whether all ranks ended in good order: whatever they waited for came."""
        return len(self.endings) >= self.job.world_size and all(
            map(self.has_gone_on, self.endings)
        )

    def has_gone_on(self, rank: int) -> bool:
        """Whether what a rank waited for came: it ended in good order, or went on without a
        trace.
        """
        return self.endings[rank].in_good_order or bool(self.job.traces[rank].stopped)

    def call(self, ending: Ending) -> str:
        return (
            f"{ending.kind}call {ending.call} of {self.name}"
            if ending.call
            else "its first encoder call"
        )

    def behind(self, rank: int) -> float | None:
        """Seconds by which a rank's last record is older than the newest one; None if clocks cannot
        be compared.
        """
        own = self._last_records.get(rank)
        return (
            max(self._last_records.values()) - own
            if own is not None and len(self._last_records) > 1
            else None
        )

    @cached_property
    def _last_records(self) -> dict[int, float]:
        """By rank, when its last record was made on the common scale, of ranks that are on it."""
        common = {
            rank: self.clocks.common(rank, trace.last)
            for rank, trace in self.job.traces.items()
        }
        return {
            rank: seconds for rank, seconds in common.items() if seconds is not None
        }

    @cached_property
    def stall_reports(self) -> StallReports:
        return _stall_reports(self)

    def last_record(self, rank: int) -> str:
        """What a rank recorded last, and when, in words."""
        trace, call, behind = (
            self.job.traces[rank],
            self.endings[rank].call,
            self.behind(rank),
        )
        age = (
            f", {behind:.1f} s before the newest record of all"
            if behind is not None
            else ""
        )
        where = (
            f"call {call}: {_KINDS_IN_WORDS.get(trace.last_kind, trace.last_kind)}"
            if call
            else "no call"
        )
        return (
            f"rank {rank}: last record {where}, {trace.last:.1f} s after its start{age}"
        )


_KINDS_IN_WORDS = {
    "enter": "entered",
    "sync": "its length sync has returned",
    "leave": "came out",
    "raised": "an exception",
    "stalled": "a stall report",
    "grow": "the positional encoding has grown",
    "end": "its end",
}


def cases(job: TracedJob) -> list[Case]:
    """One case for each encoder, those with the most calls first."""
    tracks: dict[str, dict[int, Track]] = {}
    for rank, trace in sorted(job.traces.items()):
        for track in trace.tracks.values():
            tracks.setdefault(track.name, {})[rank] = track
    if not tracks:
        return []
    on_most_ranks = {
        name for name, of_name in tracks.items() if 2 * len(of_name) > len(job.traces)
    } or set(tracks)
    order = sorted(
        on_most_ranks,
        key=lambda name: (-sum(track.last for track in tracks[name].values()), name),
    )
    return [_case(job, name, tracks, on_most_ranks) for name in order]


def without_encoders(job: TracedJob) -> Case:
    """The case of a job in which no rank has called an encoder."""
    return _case(job, "", {"": {}}, {""})


def _case(
    job: TracedJob,
    name: str,
    tracks: dict[str, dict[int, Track]],
    on_most_ranks: set[str],
) -> Case:
    own = tracks[name]
    with_calls = {rank: track for rank, track in own.items() if track.calls.n}
    ends = endings(job.traces, own, job.moving)
    for other in sorted(tracks.keys() - on_most_ranks):
        for rank in tracks[other].keys() - own.keys():
            if not ends[rank].unsure:
                ends[rank] = replace(
                    ends[rank],
                    unsure=(
                        f"it has an encoder named {safe(other)}, and no {safe(name)}"
                    ),
                )
    scale = clocks(with_calls)  # before the rounds, which take much memory as well
    return Case(job, safe(name), own, shared_rounds(with_calls), scale, ends)


def outcomes_of(cases: list[Case]) -> set[int]:
    """Of all length syncs of all ranks."""
    return {
        code
        for case in cases
        for track in case.tracks.values()
        for code in track.calls.outcome
    }


@dataclass(frozen=True)
class Told:
    """What one rank's stall report says of another rank. by: the reporter; t: when, by its trace.

    is_past: the reporter has ended in good order since, so it has left that stall.
    """

    rank: int
    by: int
    t: float
    kind: str
    where: str
    collective: str
    is_past: bool


@dataclass
class StallReports:
    """What the stall monitors reported of the stall that the traces end in.

    missing, waiting: by rank what is told of it: that others wait for it, or that it waits itself.
    texts: by reporter, where all ranks were. saw_a_wait: some rank waited in a collective. Both as
    ranks that have not ended saw it.
    """

    missing: dict[int, list[Told]] = field(default_factory=dict)
    waiting: dict[int, list[Told]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    saw_a_wait: bool = False


def _stall_reports(case: Case) -> StallReports:
    """The latest reports of each rank, if they are about the stall that the rank is in now."""
    found = StallReports()
    traces = {rank: trace for rank, trace in case.job.traces.items() if not trace.mixed}
    of_job = {
        rank: trace.stalled[-1]
        for rank, trace in traces.items()
        if trace.stalled and trace.stalled[-1].t > last_entered(case.job, rank)
    }
    # By its own report, which is later than that of a call.
    waits = {
        rank
        for rank, report in of_job.items()
        if report.waited and rank not in report.ranks
    }
    for rank, trace in traces.items():
        told = (
            _told_of_others(case, rank, of_job[rank]) if rank in of_job else []
        )  # it looks at every rank
        for report in trace.missing[-1:]:
            if _is_of_now(case, rank, report):
                told += [
                    one
                    for one in _told_of_others(case, rank, report)
                    if one.rank not in waits or one.collective
                ]
        for one in told:
            (found.waiting if one.collective else found.missing).setdefault(
                one.rank, []
            ).append(one)
        if rank in of_job and not case.has_gone_on(rank):
            found.texts[rank] = safe(of_job[rank].text)
            found.saw_a_wait |= of_job[rank].waited
    return found


def _told_of_others(case: Case, rank: int, report: Stalled) -> list[Told]:
    """Of the ranks that a report names, and that have not come since."""
    collectives = chain(report.collectives if report.e else [], repeat(""))
    is_past = case.has_gone_on(rank)
    told = []
    for other, kind, place, collective in zip(
        report.ranks, report.kinds, report.where, collectives, strict=False
    ):
        has_ended = (
            kind != LEFT and other in case.endings and case.endings[other].in_good_order
        )
        is_rank = 0 <= other < case.job.world_size and other != rank
        if is_rank and not has_ended and not _has_come_since(case, rank, report, other):
            told.append(
                Told(
                    other,
                    rank,
                    report.t,
                    safe(kind),
                    safe(place),
                    safe(collective),
                    is_past,
                )
            )
    return told


def last_entered(job: TracedJob, rank: int) -> float:
    """When a rank entered its last encoder call, in seconds of its own trace; 0 if it has made
    none.
    """
    tracks = job.traces[rank].tracks.values()
    return max(
        (track.calls.entered[-1] for track in tracks if track.calls.n), default=0.0
    )


def _is_of_now(case: Case, rank: int, report: Stalled) -> bool:
    """Whether the reporting rank still lacks the round that the report is about."""
    track = case.tracks.get(rank)
    if not report.n or track is None or safe(report.e) != case.name:
        return not report.n and track is not None
    ending = case.endings[rank]
    if ending.raised:  # on_timeout="raise"
        return report.n == ending.call
    return (
        ending.in_vain
        and report.n <= ending.call
        and track.calls.round[_index(track, report.n)] == ending.round
    )


def _has_come_since(case: Case, rank: int, report: Stalled, missing: int) -> bool:
    """Whether the reported rank has reached that round, or called an encoder, after the report."""
    ending = case.endings.get(missing)
    if ending is None or not ending.call:
        return False
    if report.e:
        return (
            bool(report.n)
            and not ending.unsure
            and ending.came_to >= case.endings[rank].round
        )
    entered = case.clocks.common(missing, last_entered(case.job, missing))
    reported = case.clocks.common(rank, report.t)
    return entered is not None and reported is not None and entered > reported


def _index(track: Track, n: int) -> int:
    return max(0, len(track.calls.n) - 1 - max(0, track.last - n))
