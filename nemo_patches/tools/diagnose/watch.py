"""Read a folder of traces, twice where its job may be running."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np

from nemo_patches.tools.diagnose.collect.proc_files import (
    CLOCK_SLACK_S,
    started_at,
    stat_fields,
)
from nemo_patches.tools.diagnose.diagnosis import diagnose
from nemo_patches.tools.diagnose.findings import Diagnosis
from nemo_patches.tools.diagnose.folder import Folder, TracedJob
from nemo_patches.tracing.records import Header

_FRESH = timedelta(minutes=10)  # a file that was written to since may still grow
_SHORTEST, _LONGEST = (
    timedelta(seconds=1),
    timedelta(seconds=10),
)  # between the two looks
_CALLS = 3  # a running job writes within the time of so many calls


def once(
    path: Path, sleep: Callable[[float], None] = time.sleep
) -> tuple[TracedJob, Diagnosis]:
    """Read a folder and diagnose it; if its job may be running, read it twice. Raises
    UnreadableError.
    """
    folder = Folder(path)
    job = folder.read()
    if _may_grow(job):
        sleep(_patience(job).total_seconds())
        job = folder.read()
        _see_what_runs(job)
    return job, diagnose(job)


def _see_what_runs(job: TracedJob) -> None:
    job.alive = {rank for rank, trace in job.traces.items() if _runs(trace.header)}
    if job.moving or job.alive:
        job.ago = {
            rank: max(0.0, time.time() - written)
            for rank, written in job.written.items()
        }


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
    return (
        is_there and 0 < started_at(header.pid) < header.started + CLOCK_SLACK_S
    )  # else the pid was reused


def _patience(job: TracedJob) -> timedelta:
    """How long to wait before a job that has written nothing counts as not running."""
    periods = [
        float(np.median(np.diff(np.array(track.calls.entered[-64:]))))
        for trace in job.traces.values()
        for track in trace.tracks.values()
        if len(track.calls.entered) > 1
    ]
    return min(
        max(_CALLS * timedelta(seconds=max(periods, default=0.0)), _SHORTEST), _LONGEST
    )
