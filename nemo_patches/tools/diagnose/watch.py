"""Read a folder twice to see whether its job is running, or again and again to follow it."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np

from nemo_patches.text import safe
from nemo_patches.tools.diagnose.collect.proc_files import CLOCK_SLACK_S, started_at, stat_fields
from nemo_patches.tools.diagnose.diagnosis import diagnose
from nemo_patches.tools.diagnose.findings import Diagnosis
from nemo_patches.tools.diagnose.folder import Folder, TracedJob, UnreadableError
from nemo_patches.tracing.records import Header

REFRESH = timedelta(seconds=2)
_FRESH = timedelta(minutes=10)  # a file that was written to since may still grow
_SHORTEST, _LONGEST = timedelta(seconds=1), timedelta(seconds=10)  # between the two looks
_CALLS = 3  # a running job writes within the time of so many calls


def once(
    path: Path, sleep: Callable[[float], None] = time.sleep, launch: int | None = None
) -> tuple[TracedJob, Diagnosis]:
    """Read a folder and diagnose it; if its job may be running, read it twice. Raises UnreadableError."""
    folder = Folder(path, launch)
    job = folder.read()
    if _may_grow(job):
        sleep(_patience(job).total_seconds())
        job = folder.read()
        _see_what_runs(job)
    return job, diagnose(job)


def follow(
    path: Path, sleep: Callable[[float], None] = time.sleep, launch: int | None = None
) -> Iterator[tuple[TracedJob, Diagnosis]]:
    """Yield the job and its report at first and at every change of the verdict, until the caller stops.

    Waits for the first trace, and says so on stderr. Raises UnreadableError if the folder is none.
    """
    folder = Folder(path, launch)
    last_verdict = last_problem = ""
    quiet_looks = 0
    while True:
        try:
            job = folder.read()
        except UnreadableError as error:
            if not path.is_dir():
                raise
            if str(error) != last_problem:
                last_problem = str(error)
                print(f"nemo-patches diagnose: {safe(last_problem)}; waiting for a trace", file=sys.stderr)
            sleep(REFRESH.total_seconds())
            continue
        # A job with slow steps does not write between all looks.
        quiet_looks = 0 if job.moving else quiet_looks + 1
        job.moving = quiet_looks * REFRESH < max(_patience(job), REFRESH * 1.5)
        _see_what_runs(job)
        report = diagnose(job)
        if report.verdict != last_verdict:
            last_verdict = report.verdict
            yield job, report
        sleep(REFRESH.total_seconds())


def _see_what_runs(job: TracedJob) -> None:
    job.alive = {rank for rank, trace in job.traces.items() if _runs(trace.header)}
    if job.moving or job.alive:
        job.ago = {rank: max(0.0, time.time() - written) for rank, written in job.written.items()}


def _may_grow(job: TracedJob) -> bool:
    if all(trace.is_over for trace in job.traces.values()):
        return False
    return abs(time.time() - max(job.written.values())) < _FRESH.total_seconds()


def _runs(header: Header) -> bool:
    """Whether the process that wrote this header runs on this host now."""
    if header.host != socket.gethostname():
        return False
    fields = stat_fields(f"/proc/{header.pid}/stat")
    is_there = bool(fields) and fields[0] not in "ZX"
    return is_there and 0 < started_at(header.pid) < header.started + CLOCK_SLACK_S  # else the pid was reused


def _patience(job: TracedJob) -> timedelta:
    """How long to wait before a job that has written nothing counts as not running."""
    periods = [
        float(np.median(np.diff(np.array(track.calls.entered[-64:]))))
        for trace in job.traces.values()
        for track in trace.tracks.values()
        if len(track.calls.entered) > 1
    ]
    return min(max(_CALLS * timedelta(seconds=max(periods, default=0.0)), _SHORTEST), _LONGEST)
