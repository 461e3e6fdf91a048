"""Process groups in a row in one process, without garbage collection: nothing is left of each."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch.distributed as dist
from exchange_job import Job, Rank
from ranks import free_port, join_group, run_ranks, stall_monitor, wait_until

import nemo_patches
from nemo_patches.watch import subscriber

pytestmark = pytest.mark.one_nemo
GROUPS = 12
EXIT_S = (
    30.0  # it takes a tenth of a second; it took one for each group, once more for each
)


def files() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # the folder itself


def in_a_row(
    rank: int, size: int, ports: list[int]
) -> tuple[list[tuple[int, int]], float]:
    """Open files and threads after three groups and after all, and when this was."""
    gc.disable()
    nemo_patches.apply()
    left = []
    for number, port in enumerate(ports):
        join_group(rank, size, port)
        if number % 3:  # else it is gone before any monitor has seen it
            wait_until(
                lambda: (
                    subscriber.monitor() is not None
                    and stall_monitor().exchange.is_whole
                    and not stall_monitor().group.closed
                )
            )
        dist.barrier()
        dist.destroy_process_group()
        if number in (2, len(ports) - 1):
            left.append(least())
    return left, time.monotonic()


def least() -> tuple[int, int]:
    """Once what ends has ended."""
    found = (files(), threading.active_count())
    end = time.monotonic() + 5
    while time.monotonic() < end:
        time.sleep(0.05)
        found = min(found[0], files()), min(found[1], threading.active_count())
    return found


def test_process_groups_leave_no_file_and_no_thread_and_no_exit_waits_for_them() -> (
    None
):
    ports = [free_port() for _ in range(GROUPS)]
    results = run_ranks(in_a_row, 2, ports, group=False)
    now = time.monotonic()
    for result in results:
        (after_3, after_all), ended = result.value
        assert now - ended < EXIT_S
        assert after_all[0] <= after_3[0]
        assert after_all[1] <= after_3[1]


def exchanges_in_a_row(rank: Rank) -> list[int]:
    gc.disable()
    counts = []
    for _ in range(GROUPS):
        rank.rejoin()
        rank.wait_joined()
        rank.hold_rounds(2)
        counts.append(files())
    return counts


def files_now(rank: Rank) -> int:
    return files()


def test_exchanges_leave_no_file_without_a_collection() -> None:
    with Job(3) as job:
        before = job.do(job.all, files_now)
        job.do(job.all, exchanges_in_a_row)
        wait_until(
            lambda: all(
                now <= then
                for now, then in zip(job.do(job.all, files_now), before, strict=True)
            )
        )
