"""stall_exit where the training thread is not all that there is: work, waits and hangs in other
threads, before the first step, and ranks of which nothing is known. Real ranks, without an encoder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import Given, Job, Result, beside_others, stall_monitor, wait_until

import nemo_patches
from nemo_patches.watch import exits, progress, subscriber
from nemo_patches.watch.exits import EXIT_CODE

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
STALL_TIMEOUT, STALL_EXIT = 0.6, 1.5
# After ten times stall_timeout, what may end by itself counts as a hang.
LONG_S = 12 * STALL_TIMEOUT
STEPS, STEP_S = 60, 0.06


def begin(rank: int, stall_timeout: float = STALL_TIMEOUT) -> None:
    """All ranks can ask each other, and none has taken a step."""
    progress._HELD_UP_S, exits._TOGETHER_S = 0.3, 0.3
    stall_exit = STALL_EXIT if stall_timeout else 0
    nemo_patches.apply(stall_timeout=stall_timeout, stall_exit=stall_exit)
    wait_until(lambda: subscriber.monitor() is not None)
    wait_until(lambda: stall_monitor().exchange.is_whole)


def step_often() -> None:
    """Each rank waits for the other in turn: which thread trains is known once it is seen there."""
    for step in range(STEPS):
        dist.barrier()
        time.sleep(STEP_S * (1 + (step + dist.get_rank()) % 2))


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def wait(seconds: float) -> None:
    """As for another host's answer: no CPU time."""
    threading.Event().wait(seconds)


def before_the_first_step(rank: int) -> None:
    begin(rank)
    if rank == 0:
        wait(LONG_S)
    dist.barrier()


def in_a_thread(rank: int) -> None:
    """Its main thread only waits for it."""
    begin(rank)

    def train() -> None:
        step_often()
        if rank == 0:
            compute(LONG_S)
        dist.barrier()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


def in_a_thread_after_a_long_set_up(rank: int) -> None:
    """In which the main thread was in collectives."""
    begin(rank)
    if rank == 0:
        wait(STALL_TIMEOUT)
    dist.barrier()
    in_a_thread(rank)


def not_known_on_one_rank(rank: int) -> None:
    """It has no stall reports."""
    begin(rank, stall_timeout=STALL_TIMEOUT if rank else 0)
    step_often()
    if rank == 0:
        wait(LONG_S)
    dist.barrier()


HEALTHY: dict[str, Callable[[int], None]] = {
    one.__name__: one
    for one in (
        before_the_first_step,
        in_a_thread,
        in_a_thread_after_a_long_set_up,
        not_known_on_one_rank,
    )
}


def healthy(rank: int, size: int, name: str) -> str:
    HEALTHY[name](rank)
    return "goes on"


@beside_others(*(Job(healthy, 2, name, limit=90, dies=(0, 1)) for name in HEALTHY))
def test_no_healthy_job_is_ended(results: list[Result]) -> None:
    for result in results:
        assert result.value == "goes on", result.stderr[-3000:]


def hangs_in_a_thread(rank: int, size: int, folder: str) -> None:
    """What it has started is a shell, and that's own child: each holds this rank's stdout."""
    begin(rank)
    with subprocess.Popen(
        ["sh", "-c", "trap '' TERM; sleep 600 & echo $$ $!; wait"],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        Path(folder, str(rank)).write_bytes(process.stdout.readline())

        def train() -> None:
            step_often()
            if rank == 0:
                wait(600)
            dist.barrier()

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()


@beside_others(Job(hangs_in_a_thread, 2, Given.FOLDER, limit=90, dies=(0, 1)))
def test_a_hang_in_a_thread_is_ended_with_all_that_the_rank_has_started(
    results: list[Result], folder: Path
) -> None:
    ended = [rank for rank in range(2) if results[rank].exit_code == EXIT_CODE]
    assert ended, [(result.exit_code, result.stderr[-2000:]) for result in results]
    for rank in range(2):
        pids = list(map(int, (folder / str(rank)).read_text().split()))
        if rank in ended:
            assert results[rank].lines("what this rank has started (pids ", "is ended")
            assert not any(map(runs, pids))
        for pid in filter(runs, pids):
            os.kill(pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    return False
