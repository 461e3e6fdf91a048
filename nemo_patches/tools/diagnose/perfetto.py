"""The file for ui.perfetto.dev: the calls of all ranks in Chrome's trace event format, one process for each rank.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format. Times are on one
scale, aligned by the rounds, in microseconds from the first event.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nemo_patches.text import safe
from nemo_patches.tools.diagnose.alignment import Clocks, clocks
from nemo_patches.tools.diagnose.case import Case, cases
from nemo_patches.tools.diagnose.folder import TracedJob
from nemo_patches.tools.diagnose.rank_trace import ENDED, OPEN, OUTCOMES, RAISED, TIMEOUT, UNSYNCED, RankTrace, Track

MOST_CALLS = 120_000  # of all ranks together, the latest ones; the viewer takes about that many with ease
Event = dict[str, Any]


def write(job: TracedJob, file: Path) -> None:
    """Write the file. Raises OSError."""
    encoders = cases(job)
    scale = max((case.clocks for case in encoders), key=lambda candidate: len(candidate.knots), default=clocks({}))
    calls = MOST_CALLS // max(1, sum(len(case.tracks) for case in encoders))
    origin = min((scale.common_or_own(rank, first) for rank, first in _firsts(job, calls)), default=0.0)
    with file.open("w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        first = True
        for event in _events(job, encoders, scale, origin, calls):
            out.write(("" if first else ",\n") + json.dumps(event, separators=(",", ":")))
            first = False
        out.write("\n]}\n")


def _firsts(job: TracedJob, most: int) -> Iterator[tuple[int, float]]:
    for rank, trace in job.traces.items():
        for track in trace.tracks.values():
            if track.calls.n:
                yield rank, track.calls.entered[-min(most, len(track.calls.n))]


def _events(job: TracedJob, encoders: list[Case], scale: Clocks, origin: float, most: int) -> Iterator[Event]:
    for rank, trace in sorted(job.traces.items()):
        aligned = "" if rank in scale.knots else ", own clock"
        title = f"rank {rank} ({safe(trace.header.host)}, pid {trace.header.pid}){aligned}"
        yield _meta("process_name", rank, 0, name=title)
        yield _meta("process_sort_index", rank, 0, sort_index=rank)

        # Whole microseconds: the viewer drops slices that overlap by a nanosecond, and fractions do.
        def micro(own: float, rank: int = rank) -> int:
            return round((scale.common_or_own(rank, own) - origin) * 1e6)

        for thread, case in enumerate(encoders, 1):
            track = case.tracks.get(rank)
            if track is not None and track.calls.n:
                yield _meta("thread_name", rank, thread, name=case.name)
                yield from _calls(track, case.name, rank, thread, micro, most)
        yield from _moments(trace, rank, micro)


def _calls(track: Track, name: str, rank: int, thread: int, micro: Any, most: int) -> Iterator[Event]:
    calls = track.calls
    for index in range(max(0, len(calls.n) - most), len(calls.n)):
        entered, open_ = calls.entered[index], calls.ended[index] == OPEN
        begin = micro(entered)
        latest = max(micro(calls.entered[index + 1]), begin) if index + 1 < len(calls.n) else math.inf
        kind = {1: "training", 0: "evaluation"}.get(calls.training[index], "")
        details = {
            "call": calls.n[index],
            "round": calls.round[index],
            "outcome": "none" if calls.outcome[index] == UNSYNCED else OUTCOMES[calls.outcome[index]],
            "waited_ms": round(calls.waited[index] * 1000, 3),
        }
        title = f"{name} {kind} call {calls.n[index]}" + (", not finished" if open_ else "")
        ends = [column[index] for column in (calls.synced, calls.left)]
        # The columns are of single precision, so an end may be past the next call's begin.
        moments = [min(max(micro(entered + end), begin), latest) if not math.isnan(end) else None for end in ends]
        last = max((moment for moment in moments if moment is not None), default=begin)
        place = {"pid": rank, "tid": thread}
        lasts = {"ph": "B"} if open_ else {"ph": "X", "dur": last - begin}
        yield {"name": title, "cat": "call", **lasts, **place, "ts": begin, "args": details}
        since = begin
        phases = ("length sync", "layers")
        for phase, moment in zip(phases, moments, strict=True):
            if moment is not None and moment >= since:
                yield {"name": phase, "cat": "phase", "ph": "X", **place, "ts": since, "dur": moment - since}
                since = moment
        if calls.outcome[index] in (TIMEOUT, ENDED) and moments[0] is not None:
            what = "gave up waiting" if calls.outcome[index] == TIMEOUT else "the length sync has ended"
            yield _instant(what, rank, thread, moments[0])
        if calls.ended[index] == RAISED and moments[1] is not None:
            yield _instant("exception", rank, thread, moments[1])


def _moments(trace: RankTrace, rank: int, micro: Any) -> Iterable[Event]:
    for report in trace.missing:
        if micro(report.t) >= 0:
            yield _instant("stall report", rank, 0, micro(report.t), missing=str(report.ranks[:64]))
    if trace.ended is not None and micro(trace.ended) >= 0:
        yield _instant("the process ended", rank, 0, micro(trace.ended))


def _instant(name: str, rank: int, thread: int, at: int, **details: object) -> Event:
    return {"name": name, "ph": "i", "s": "t", "pid": rank, "tid": thread, "ts": at, "args": details}


def _meta(kind: str, rank: int, thread: int, **values: object) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "ts": 0, "args": values}
