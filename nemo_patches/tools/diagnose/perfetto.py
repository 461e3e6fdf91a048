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

from nemo_patches.sync.safe_text import safe
from nemo_patches.tools.diagnose.alignment import Clocks, clocks
from nemo_patches.tools.diagnose.case import Case, cases
from nemo_patches.tools.diagnose.folder import Job
from nemo_patches.tools.diagnose.rank_trace import ENDED, OPEN, OUTCOMES, RAISED, TIMEOUT, UNSYNCED, RankTrace, Track

MOST_CALLS = 120_000  # of all ranks together, the latest ones; the viewer takes about that many with ease
Event = dict[str, Any]


def write(job: Job, file: Path) -> None:
    """Write the file. Raises OSError."""
    encoders = cases(job)
    scale = max((case.clocks for case in encoders), key=lambda candidate: len(candidate.knots), default=clocks({}))
    calls = MOST_CALLS // max(1, sum(len(case.tracks) for case in encoders))
    origin = min((_at(scale, rank, first) for rank, first in _firsts(job, calls)), default=0.0)
    with file.open("w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        first = True
        for event in _events(job, encoders, scale, origin, calls):
            out.write(("" if first else ",\n") + json.dumps(event, separators=(",", ":")))
            first = False
        out.write("\n]}\n")


def _firsts(job: Job, most: int) -> Iterator[tuple[int, float]]:
    for rank, trace in job.traces.items():
        for track in trace.tracks.values():
            if track.calls.n:
                yield rank, track.calls.entered[-min(most, len(track.calls.n))]


def _at(scale: Clocks, rank: int, own: float) -> float:
    """Seconds on the common scale; on the rank's own if it shares no round with the others."""
    common = scale.common(rank, own)
    return float(common) if common is not None else own


def _events(job: Job, encoders: list[Case], scale: Clocks, origin: float, most: int) -> Iterator[Event]:
    for rank, trace in sorted(job.traces.items()):
        aligned = "" if rank in scale.knots else ", own clock"
        title = f"rank {rank} ({safe(trace.header.host)}, pid {trace.header.pid}){aligned}"
        yield _meta("process_name", rank, 0, name=title)
        yield _meta("process_sort_index", rank, 0, sort_index=rank)

        def micro(own: float, rank: int = rank) -> float:
            return round((_at(scale, rank, own) - origin) * 1e6, 3)

        for thread, case in enumerate(encoders, 1):
            track = case.tracks.get(rank)
            if track is not None and track.calls.n:
                yield _meta("thread_name", rank, thread, name=case.name)
                yield from _calls(track, case.name, rank, thread, micro, most)
        yield from _moments(trace, rank, micro)


def _calls(track: Track, name: str, rank: int, thread: int, micro: Any, most: int) -> Iterator[Event]:
    calls = track.calls
    for index in range(max(0, len(calls.n) - most), len(calls.n)):
        begin, open_ = calls.entered[index], calls.ended[index] == OPEN
        kind = {1: "training", 0: "evaluation"}.get(calls.training[index], "")
        details = {
            "call": calls.n[index],
            "round": calls.round[index],
            "outcome": "none" if calls.outcome[index] == UNSYNCED else OUTCOMES[calls.outcome[index]],
            "waited_ms": round(calls.waited[index] * 1000, 3),
        }
        title = f"{name} {kind} call {calls.n[index]}" + (", not finished" if open_ else "")
        ends = [column[index] for column in (calls.synced, calls.pre, calls.layer, calls.left)]
        length = max((end for end in ends if not math.isnan(end)), default=0.0)
        common = {"pid": rank, "tid": thread, "ts": micro(begin), "args": details}
        if open_:
            yield {"name": title, "cat": "call", "ph": "B", **common}
        else:
            yield {"name": title, "cat": "call", "ph": "X", "dur": round(length * 1e6, 3), **common}
        since = 0.0
        phases = ("length sync", "pre_encode", "first layer", "layers")
        for phase, end in zip(phases, ends, strict=True):
            if not math.isnan(end) and end >= since:
                yield _slice(phase, rank, thread, micro(begin + since), end - since)
                since = end
        if calls.outcome[index] in (TIMEOUT, ENDED):
            what = "gave up waiting" if calls.outcome[index] == TIMEOUT else "the length sync has ended"
            yield _instant(what, rank, thread, micro(begin + ends[0]))
        if calls.ended[index] == RAISED:
            yield _instant("exception", rank, thread, micro(begin + ends[3]))


def _moments(trace: RankTrace, rank: int, micro: Any) -> Iterable[Event]:
    for at, rss, allocated, reserved in trace.memory:
        sizes = {"rss": rss / (1 << 30), "allocated": allocated / (1 << 30), "reserved": reserved / (1 << 30)}
        if micro(at) >= 0:
            yield {"name": "memory, GiB", "ph": "C", "pid": rank, "tid": 0, "ts": micro(at), "args": sizes}
    for report in trace.missing:
        if micro(report.t) >= 0:
            yield _instant("stall report", rank, 0, micro(report.t), missing=str(report.ranks[:64]))
    for finding in trace.findings:
        if micro(finding.t) >= 0:
            yield _instant(f"check {safe(finding.check)}", rank, 0, micro(finding.t), text=safe(finding.text))
    if trace.ended is not None and micro(trace.ended) >= 0:
        yield _instant("the process ended", rank, 0, micro(trace.ended))


def _slice(name: str, rank: int, thread: int, at: float, seconds: float) -> Event:
    duration = round(seconds * 1e6, 3)
    return {"name": name, "cat": "phase", "ph": "X", "pid": rank, "tid": thread, "ts": at, "dur": duration}


def _instant(name: str, rank: int, thread: int, at: float, **details: object) -> Event:
    return {"name": name, "ph": "i", "s": "t", "pid": rank, "tid": thread, "ts": at, "args": details}


def _meta(kind: str, rank: int, thread: int, **values: object) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "ts": 0, "args": values}
