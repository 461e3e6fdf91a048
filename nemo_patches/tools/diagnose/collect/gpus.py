"""What `nvidia-smi` says of each rank's GPU, where that program is:
how busy it is, and its memory.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nemo_patches.tools.diagnose.collect.host_ranks import HostRank

_LIMIT_S = 2.0  # of both questions: a broken driver does not answer


@dataclass(frozen=True)
class Gpu:
    """used_mib, of_mib: memory of all processes on it."""

    busy_percent: str
    used_mib: str
    of_mib: str

    def __str__(self) -> str:
        return f"{self.busy_percent} % busy, {self.used_mib} of {self.of_mib} MiB used"


def of_ranks(ranks: Iterable[HostRank]) -> list[str]:
    """A line for each rank whose GPU is known; in a container it may be known of none."""
    gpus = {
        row[0]: Gpu(*row[1:])
        for row in _rows(
            "gpu", "uuid", "utilization.gpu", "memory.used", "memory.total"
        )
    }
    by_pid = (
        {
            pid: gpus[uuid]
            for pid, uuid in _rows("compute-apps", "pid", "gpu_uuid")
            if uuid in gpus
        }
        if gpus
        else {}
    )
    known = (
        (rank.rank, by_pid[str(rank.pid)]) for rank in ranks if str(rank.pid) in by_pid
    )
    return [f"GPU of rank {rank}: {gpu}." for rank, gpu in known]


def _rows(table: str, *columns: str) -> Iterator[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    command = [
        program,
        f"--query-{table}={','.join(columns)}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S / 2,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    for line in done.stdout.splitlines():
        row = [value.strip()[:60] for value in line.split(",")]
        if len(row) == len(columns):
            yield row
