"""Other evidence of a job on its host: logs, traces, stall reports, Flight Recorder dumps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nemo_patches.tools.diagnose.collect.host_ranks import HostRank
from nemo_patches.tools.diagnose.collect.proc_files import (
    link,
    seen_by,
    started_at,
    variables,
)

LOG = "log"
TRACES = "traces"
REPORTS = "stall reports"  # the job's folder
FLIGHT_RECORDER = "Flight Recorder dump"
# Followed by the rank.
_FLIGHT_RECORDER_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_FLIGHT_RECORDER_DEFAULTS = ("/tmp/nccl_trace_rank_", "/tmp/comm_lib_trace_rank_")


@dataclass(frozen=True)
class Belonging:
    """kind: LOG, TRACES, REPORTS, FLIGHT_RECORDER. path: of this host."""

    kind: str
    path: str


def belongings(ranks: Iterable[HostRank]) -> tuple[Belonging, ...]:
    """Each once, in the order of the ranks."""
    return tuple(dict.fromkeys(one for rank in ranks for one in _of_rank(rank)))


def _of_rank(rank: HostRank) -> Iterator[Belonging]:
    process, given = f"/proc/{rank.pid}", variables(rank.pid)
    for descriptor in ("1", "2"):
        path = link(f"{process}/fd/{descriptor}")
        path = seen_by(rank.pid, path) if path.startswith("/") else ""
        if os.path.isfile(path):
            yield Belonging(LOG, path)
    folder = link(f"{process}/cwd")
    if trace := given.get("NEMO_PATCHES_TRACE"):
        path = seen_by(rank.pid, os.path.join(folder, trace))
        if os.path.isdir(path):
            yield Belonging(TRACES, path)
    if own := _folder_of_job(rank.pid, given.get("TMPDIR", "/tmp")):
        yield Belonging(REPORTS, own)
    began = started_at(rank.pid)
    defaults = [*_FLIGHT_RECORDER_DEFAULTS]
    if home := given.get("HOME"):
        defaults.append(os.path.join(home, ".cache/torch/comm_lib_trace_rank_"))
    for start in (*filter(None, map(given.get, _FLIGHT_RECORDER_FILES)), *defaults):
        path = seen_by(rank.pid, os.path.join(folder, f"{start}{rank.rank}"))
        # An earlier job's may lie there still.
        if os.path.isfile(path) and _changed(path) >= began:
            yield Belonging(FLIGHT_RECORDER, path)


def _folder_of_job(pid: int, temporary: str) -> str:
    """The job's own (watch/job_folder.py), in which sockets have this pid in their names; or
    empty.
    """
    try:
        own = os.path.join(temporary, f"nemo_patches-{os.stat(f'/proc/{pid}').st_uid}")
        own = seen_by(pid, own)
        for job in os.scandir(own):
            if any(str(pid) in name.split(".") for name in os.listdir(job.path)):
                return job.path
    except OSError:
        pass
    return ""


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
