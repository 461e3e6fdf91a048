"""Looking again: whether a job's files grow, and following them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np

from nemo_patches.tools.diagnose.diagnosis import diagnose
from nemo_patches.tools.diagnose.findings import Report
from nemo_patches.tools.diagnose.reading import Folder, Job, UnreadableError

REFRESH = timedelta(seconds=2)
_FRESH = timedelta(minutes=10)  # a file that was written to within this time may still grow
_SHORTEST, _LONGEST = 1.0, 10.0  # seconds between the two looks
_CALLS = 3  # in which time a running job would have written


def once(path: Path, sleep: Callable[[float], None] = time.sleep) -> tuple[Job, Report]:
    """Read a folder and diagnose it. Whether its job is running, a second look tells: it has grown, or it has not.

    Raises UnreadableError.
    """
    folder = Folder(path)
    job = folder.read()
    if _may_grow(job):
        sleep(_patience(job))
        job = folder.read()
    return job, diagnose(job)


def follow(path: Path, sleep: Callable[[float], None] = time.sleep) -> Iterator[tuple[Job, Report]]:
    """The job and its report, first and at every change of the verdict, until the caller has had enough.

    Where there is no trace yet, one is waited for.
    """
    folder = Folder(path)
    before = ""
    patience = 0
    while True:
        try:
            job = folder.read()
        except UnreadableError:
            if not path.is_dir():
                raise
            sleep(REFRESH.total_seconds())
            continue
        # A job that steps slowly does not write at every look.
        patience = 0 if job.moving else patience + 1
        job.moving = patience * REFRESH.total_seconds() < max(_patience(job), REFRESH.total_seconds() * 1.5)
        report = diagnose(job)
        if report.verdict != before:
            before = report.verdict
            yield job, report
        sleep(REFRESH.total_seconds())


def _may_grow(job: Job) -> bool:
    if all(trace.is_over for trace in job.traces.values()):
        return False
    now = time.time()
    try:
        newest = max(file.stat().st_mtime for file in job.folder.iterdir())
    except (OSError, ValueError):
        return False
    return abs(now - newest) < _FRESH.total_seconds()


def _patience(job: Job) -> float:
    """Seconds in which a running job would have written something."""
    periods = [
        float(np.median(np.diff(np.array(track.calls.entered[-64:]))))
        for trace in job.traces.values()
        for track in trace.tracks.values()
        if len(track.calls.entered) > 1
    ]
    return min(max(_CALLS * max(periods, default=0.0), _SHORTEST), _LONGEST)
