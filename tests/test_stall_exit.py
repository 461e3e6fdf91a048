"""stall_exit on real ranks: healthy schedules without an encoder call, in an order drawn by chance,
which it must not end; and hangs, which it must. What it decides by what, test_stall_decisions.py has.

Everything is in the small: a stall of a second and a half ends the process. A schedule lasts two to
three times as long, and no rank is without a sign of motion for more than half of it.
RUNS=200 draws 1,000 of them.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import encoders
import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import (
    Result,
    all_have_come,
    beside_others,
    stall_monitor,
    wait_until,
)
from torch.nn.parallel import DistributedDataParallel

import nemo_patches
from nemo_patches.watch import exits, progress
from nemo_patches.watch.exits import EXIT_CODE

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
HELD_UP_S, TOGETHER_S = 0.3, 0.3  # in place of 2 s each
STALL_TIMEOUT, STALL_EXIT = 0.6, 1.5
LONG_S = 2.2 * STALL_EXIT
LONGEST_S = (
    12 * STALL_TIMEOUT
)  # after ten times, what may end by itself counts as a hang
PIECE_S = STALL_EXIT / 5  # of work, in which nothing is seen to move
RANKS = 3
RUNS = int(os.environ.get("RUNS", "1"))


class Job:
    """What this rank has, and the draws that all ranks make alike."""

    def __init__(self, rank: int, size: int) -> None:
        progress._HELD_UP_S, exits._TOGETHER_S = HELD_UP_S, TOGETHER_S
        self.rank, self.size = rank, size
        seed = [random.SystemRandom().randrange(1 << 30)]
        dist.broadcast_object_list(seed)
        print(f"by seed {seed[0]}", file=sys.stderr)
        self.chance = random.Random(seed[0])
        nemo_patches.apply(stall_timeout=0)
        self.encoder = encoders.conformer()
        torch.manual_seed(0)
        self.other_model = DistributedDataParallel(torch.nn.Linear(4, 4))
        self.pairs = [dist.new_group([one, (one + 1) % size]) for one in range(size)]
        self.processes: list[Any] = [None] * size
        dist.all_gather_object(self.processes, os.getpid())
        self.encode()
        wait_until(all_have_come)
        dist.barrier()
        nemo_patches.apply(stall_timeout=STALL_TIMEOUT, stall_exit=STALL_EXIT)

    def encode(self) -> None:
        for _ in range(2):
            encoders.sync(self.encoder, 80)
        dist.barrier()

    def someone(self) -> int:
        return self.chance.randrange(self.size)

    def long_s(self) -> float:
        """Enough to be looked at."""
        return self.chance.uniform(1.5 * STALL_EXIT, LONG_S)

    def pieces(self, long_s: float = LONG_S) -> list[float]:
        """Seconds, of pieces of work."""
        found: list[float] = []
        while sum(found) < long_s:
            found.append(self.chance.uniform(PIECE_S / 4, PIECE_S))
        return found

    def other_step(self) -> None:
        self.other_model(torch.ones(2, 4)).sum().backward()


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(50, 50).sum().item()


def one_decodes(job: Job) -> None:
    """And is often seen in .item(), or where it reads; the others wait for it."""
    who, pieces = job.someone(), job.pieces()
    if job.rank == who:
        for piece in pieces:
            compute(0.8 * piece)
            time.sleep(0.2 * piece)
    dist.barrier()


def is_at_one_place(seconds: float) -> None:
    """As in one long call of a library."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def other_models_steps(job: Job) -> None:
    """Without the encoder; each time another rank is slow."""
    slow = [(job.someone(), piece) for piece in job.pieces()]
    while slow:  # with neither a loop's variable nor a counter
        who, piece = slow.pop()
        if job.rank == who:
            time.sleep(piece)
        job.other_step()


def two_reduce_while_the_others_wait(job: Job) -> None:
    first, pieces = job.someone(), job.pieces()
    if job.rank in (first, (first + 1) % job.size):
        for piece in pieces:
            time.sleep(piece)
            dist.all_reduce(torch.ones(1), group=job.pairs[first])
    dist.barrier()


def the_job_is_suspended(job: Job) -> None:
    """With one rank at work, and the others in a barrier; it goes on one rank after the other."""
    who, long_s = job.someone(), job.long_s()
    order = job.chance.sample(range(job.size), job.size)
    if job.rank == who and os.fork() == 0:
        for one in order:
            os.kill(job.processes[one], signal.SIGSTOP)
        time.sleep(long_s)
        for one in order:
            os.kill(job.processes[one], signal.SIGCONT)
            time.sleep(0.05)
        os._exit(0)
    if job.rank == who:
        time.sleep(STALL_EXIT / 2)
        os.wait()
    dist.barrier()
    pieces = job.pieces()
    while pieces:
        time.sleep(pieces.pop())
        job.other_step()


FORKED = multiprocessing.get_context("fork")


def a_process_pool(seconds: float) -> None:
    with ProcessPoolExecutor(1, mp_context=FORKED) as pool:
        pool.submit(count, seconds).result()


def count(seconds: float) -> None:
    """Without torch, whose threads a forked process has not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def loop_of(seconds: float) -> str:
    """A command that starts at once, as Python does not on a busy machine."""
    end = time.time() + seconds
    return f"while [ $(date +%s%N) -lt {int(end * 1e9)} ]; do :; done"


def a_commands_output(seconds: float) -> None:
    """Of a process that the shell has left behind."""
    command = f"({loop_of(seconds)}) & :"
    subprocess.run(command, shell=True, check=True, stdout=subprocess.PIPE)


def besides(work: Callable[[float], None]) -> Callable[[Job], None]:
    """A schedule: one rank waits for what works beside its training thread."""

    def schedule(job: Job) -> None:
        who, long_s = job.someone(), job.long_s()
        if job.rank == who:
            work(long_s)
        dist.barrier()

    schedule.__name__ = work.__name__
    return schedule


HEALTHY: tuple[Callable[[Job], None], ...] = (
    besides(a_process_pool),
    besides(a_commands_output),
    one_decodes,
    two_reduce_while_the_others_wait,
    the_job_is_suspended,
)


def healthy(rank: int, size: int, run: int) -> int:
    """How many schedules were looked at for stall_exit; at last one rank alone computes for long."""
    job = Job(rank, size)
    looked_at = 0
    for schedule in job.chance.sample(HEALTHY, len(HEALTHY)):
        job.encode()
        schedule(job)
        stall = stall_monitor().stall.stall
        looked_at += stall is not None and stall.look_at > 0
    job.encode()
    if rank == 0:
        is_at_one_place(LONGEST_S)
    dist.barrier()
    return looked_at


def hung(rank: int, size: int) -> None:
    """A livelock: one rank retries for ever, as a data set whose file is damaged."""
    job = Job(rank, size)
    job.encode()
    attempt = 0
    while rank == 1:
        attempt += 1
        time.sleep(0.01)
    dist.barrier()


@beside_others(ranks.Job(hung, RANKS, limit=90, dies=(0, 1, 2)))
def test_a_livelock_is_ended(results: list[Result]) -> None:
    # The others may lose their connection.
    ended = [result for result in results if result.exit_code == EXIT_CODE]
    assert ended, [(result.exit_code, result.stderr[-2000:]) for result in results]
    assert all(
        result.lines("more than stall_exit=1.5 s", " in a collective")
        for result in ended
    )
    # Who ends later may see who was first.
    assert any(result.lines("some wait in a collective") for result in ended)


@beside_others(*(ranks.Job(healthy, RANKS, run) for run in range(RUNS)))
def test_no_healthy_schedule_is_ended(results: list[Result]) -> None:
    assert any(result.value for result in results)  # else nothing was tried
