"""What `nvidia-smi` says of each rank's GPU, where that program is:
how busy it is, and its memory.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator

from nemo_patches.tools.diagnose.collect.host_ranks import HostRank

_LIMIT_S = 2.0  # of both questions: a broken driver does not answer


def of_ranks(ranks: Iterable[HostRank]) -> list[str]:
    """A line for each rank whose GPU is known; in a container it may be known of none."""
    columns = ("uuid", "utilization.gpu", "memory.used", "memory.total")
    gpus = {
        uuid: f"{busy} % busy, {used} of {whole} MiB used"  # by all processes on it
        for uuid, busy, used, whole in _rows("gpu", *columns)
    }
    of_pids = dict(_rows("compute-apps", "pid", "gpu_uuid")) if gpus else {}
    known = ((rank.rank, gpus.get(of_pids.get(str(rank.pid), ""))) for rank in ranks)
    return [f"GPU of rank {rank}: {gpu}." for rank, gpu in known if gpu]


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
