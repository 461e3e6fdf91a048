"""The demo's processes:
one import of NeMo, the ranks that are forked from it, their time limits and their ends.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from nemo_patches.tools.demo import job_logs
from nemo_patches.tools.demo.jobs import COMPLETED, DemoError, RankJob, RunOutcome, Task

LOOK_EVERY_S = 0.25
# One thread per rank, because they share this machine's cores; no GPU, so that the demo is the same
# everywhere.
RANK_ENVIRONMENT = {
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
    ),
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "NEMO_PATCHES_DISABLE"), ""),
}
_context = multiprocessing.get_context("fork")


def prepare() -> None:
    """Set this process's environment, before anything of NeMo's is imported. Raises DemoError
    without NeMo.
    """
    os.environ.update(RANK_ENVIRONMENT)
    if importlib.util.find_spec("nemo") is None:
        raise DemoError(
            "NeMo is not installed; the demo needs it: pip install 'nemo_toolkit[asr]'"
        )


def import_nemo(log: Path) -> None:
    """In this process, once for all ranks. What it prints goes to the log."""
    try:
        with job_logs.written_to(log):
            importlib.import_module("nemo_patches.tools.demo.rank")
    except Exception as error:
        raise DemoError(
            f"importing NeMo: {type(error).__name__}: {error} (log: {log})"
        ) from None


def run(
    task: Task, patched: bool, devices: int, folder: Path, stall_s: float
) -> RunOutcome:
    """Start one process per rank and see them to their end: their own, or the time limit. Needs
    import_nemo().
    """
    began = time.monotonic()
    port = free_port()
    jobs = tuple(
        RankJob(task, patched, rank, devices, port, folder, stall_s)
        for rank in range(devices)
    )
    ranks = [
        _context.Process(target=_run_rank, args=(job,), daemon=True) for job in jobs
    ]
    verdict = ""
    try:
        for rank in ranks:
            rank.start()
        ended = _wait(jobs, ranks)
        if _stock_hangs(jobs) and all(rank.exitcode is None for rank in ranks):
            verdict = _verdict_on([rank.pid or 0 for rank in ranks], stall_s)
    finally:
        for rank in ranks:  # also on Ctrl-C and errors
            if rank.pid is not None:
                rank.kill()
                rank.join()
    return RunOutcome(
        jobs,
        tuple(job.progress() for job in jobs),
        ended,
        time.monotonic() - began,
        verdict,
    )


def _wait(jobs: Sequence[RankJob], ranks: Sequence[BaseProcess]) -> str:
    """Until all have ended that are to end, one has died, or the time is over: how it ended."""
    limit_s = jobs[0].limit_s
    since = time.monotonic()
    is_hanging = False
    while time.monotonic() < since + limit_s:
        wait(
            [rank.sentinel for rank in ranks if rank.exitcode is None],
            timeout=LOOK_EVERY_S,
        )
        for job, rank in zip(jobs, ranks, strict=True):
            if rank.exitcode:
                return f"rank {job.rank} died: {job_logs.cause_of_exit(rank.exitcode, job.log)}"
        if all(
            rank.exitcode == 0 or job.stays_away
            for job, rank in zip(jobs, ranks, strict=True)
        ):
            return COMPLETED
        if not is_hanging and _stock_hangs(jobs):
            is_hanging = True
            limit_s = jobs[0].stall_s
            since = time.monotonic()
    return f"still waiting after {limit_s:g} s, ended by the demo"


def _stock_hangs(jobs: Sequence[RankJob]) -> bool:
    return not jobs[0].patched and any(job.progress().is_away for job in jobs)


def _verdict_on(pids: Sequence[int], waited_s: float) -> str:
    """As by `nemo-patches diagnose --pids`."""
    from nemo_patches.text import safe
    from nemo_patches.tools.diagnose import running  # only where a run hangs
    from nemo_patches.tools.diagnose.collect.host_jobs import (
        NothingToLookAtError,
        jobs_here,
    )

    try:
        (ranks,) = jobs_here(pids=pids)
    except NothingToLookAtError as error:
        return safe(str(error))
    return safe(running.diagnose(ranks, stuck_after_s=waited_s / 2).verdict)


def _run_rank(job: RankJob) -> None:
    importlib.import_module("nemo_patches.tools.demo.rank").run(job)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
