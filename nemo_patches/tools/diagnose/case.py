"""One encoder on all ranks of a job: what every verdict looks at."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from nemo_patches.stall.rank_text import named, safe
from nemo_patches.tools.diagnose.aligning import Clocks, Rounds, clocks, shared_rounds
from nemo_patches.tools.diagnose.columns import Track
from nemo_patches.tools.diagnose.endings import Ending, endings
from nemo_patches.tools.diagnose.reading import Job
from nemo_patches.tracing import records


@dataclass(frozen=True)
class Case:
    """One encoder. tracks: of the ranks that have called it. endings: of all that have a trace."""

    job: Job
    name: str
    tracks: dict[int, Track]
    rounds: Rounds
    clocks: Clocks
    endings: dict[int, Ending]

    @property
    def sure(self) -> dict[int, Ending]:
        """The endings of ranks whose traces are whole up to the end."""
        return {rank: ending for rank, ending in self.endings.items() if not ending.unsure}

    def call(self, ending: Ending) -> str:
        """Its last call, for a person."""
        return f"{ending.kind}call {ending.call} of {self.name}" if ending.call else "its first encoder call"

    def behind(self, rank: int) -> float | None:
        """Seconds by which a rank's last record is older than the newest one; None where clocks cannot be compared."""
        lasts = [self.clocks.common(other, trace.last) for other, trace in self.job.traces.items()]
        own = self.clocks.common(rank, self.job.traces[rank].last)
        known = [float(last) for last in lasts if last is not None]
        return max(known) - float(own) if own is not None and len(known) > 1 else None

    def last_record(self, rank: int) -> str:
        """What a rank recorded last and when, for a person."""
        trace = self.job.traces[rank]
        ending = self.endings[rank]
        behind = self.behind(rank)
        age = f", {behind:.1f} s before the newest record of all" if behind is not None else ""
        where = f"call {ending.call}: {_WORDS.get(trace.last_kind, trace.last_kind)}" if ending.call else "no call"
        return f"rank {rank}: last record {where}, {trace.last:.1f} s after its start{age}"


_WORDS = {
    "enter": "entered",
    "sync": "its length sync has returned",
    "pre": "pre_encode is done",
    "layer": "the first layer is done",
    "leave": "came out",
    "raised": "ended by an exception",
    "end": "the process ended in good order",
    "stopped": "its trace was stopped",
    "missing": "a stall report",
    "memory": "a memory sample",
    "finding": "a check's finding",
    "grow": "the positional encoding has grown",
    "lost": "records were lost",
}


def cases(job: Job) -> list[Case]:
    """One for each encoder, those with the most calls first."""
    tracks: dict[str, dict[int, Track]] = {}
    for rank, trace in sorted(job.traces.items()):
        for track in trace.tracks.values():
            tracks.setdefault(track.info.name, {})[rank] = track
    if not tracks:
        return []
    most = len(job.traces)
    usual = {name for name, of_name in tracks.items() if 2 * len(of_name) > most} or set(tracks)
    order = sorted(usual, key=lambda name: (-sum(track.last for track in tracks[name].values()), name))
    return [_case(job, name, tracks[name], tracks, usual) for name in order]


def _case(
    job: Job, name: str, of_name: dict[int, Track], all_tracks: dict[str, dict[int, Track]], usual: set[str]
) -> Case:
    with_calls = {rank: track for rank, track in of_name.items() if track.calls.n}
    rounds = shared_rounds(with_calls)
    found = endings(job.traces, of_name, job.moving)
    for other, ranks in all_tracks.items():
        for rank in ranks if other not in usual else ():
            if rank not in of_name and not found[rank].unsure:
                found[rank] = replace(found[rank], unsure=f"it has an encoder named {safe(other)}, and no {safe(name)}")
    return Case(job, safe(name), of_name, rounds, clocks(with_calls), found)


@dataclass(frozen=True)
class StallReports:
    """What the stall monitors found out about the stall that the traces end in.

    kinds and where: of each rank that a report names. complete: whether a report names all that are missing.
    """

    kinds: dict[int, str]
    where: dict[int, str]
    complete: bool


def stall_reports(case: Case) -> StallReports:
    """The latest report of each rank that waits now, where it is about its present stall."""
    kinds: dict[int, str] = {}
    where: dict[int, str] = {}
    complete = False
    for rank, trace in case.job.traces.items():
        track = case.tracks.get(rank)
        if not trace.missing or trace.mixed or track is None:
            continue
        last = trace.missing[-1]
        if last.n and not (safe(last.name) == case.name and _is_of_now(case, rank, track, last)):
            continue
        size = case.job.world_size
        for one, kind, place in zip(last.ranks, last.kinds, last.where, strict=False):
            if 0 <= one < size and one != rank:
                kinds.setdefault(one, safe(kind))
                if place:
                    where.setdefault(one, safe(place))
        complete = complete or (bool(last.ranks) and not last.unknown)
    return StallReports(kinds, where, complete)


def _is_of_now(case: Case, rank: int, track: Track, report: records.Missing) -> bool:
    """Whether the call of a report waits for a round that this rank has not seen come since."""
    ending = case.endings[rank]
    return ending.in_vain and report.n <= ending.call and track.calls.round[_index(track, report.n)] == ending.round


def _index(track: Track, n: int) -> int:
    return max(0, len(track.calls.n) - 1 - max(0, track.last - n))


def usual_call(endings_: list[Ending]) -> Ending:
    """An ending with the call number that most have."""
    number = Counter(ending.call for ending in endings_).most_common(1)[0][0]
    return next(ending for ending in endings_ if ending.call == number)


def whom(ranks: list[int] | tuple[int, ...], verb: str, verbs: str) -> str:
    """ "rank 3 has", "ranks 3, 5 have"."""
    return f"{named(sorted(ranks))} {verb if len(ranks) == 1 else verbs}"
