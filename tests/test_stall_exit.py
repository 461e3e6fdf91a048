"""stall_exit on real ranks: healthy schedules without an encoder call, in an order drawn by chance,
which it must not end; and hangs, which it must. What it decides by what, test_stall_decisions.py has.

Everything is in the small: a stall of a second and a half ends the process. A schedule lasts two to
three times as long, and no rank is without a sign of motion for more than half of it.
SCHEDULES=1000 runs so many, a seed for each 9, instead of a few.
"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
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
    run_ranks,
    stall_monitor,
    wait_until,
    waits_beside_others,
)
from store_proxy import Proxy, change
from store_proxy import proxy as proxy
from torch.nn.parallel import DistributedDataParallel

import nemo_patches
from nemo_patches.channel import meeting
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
MOST_RUNS = 4
SCHEDULES = int(os.environ.get("SCHEDULES", "0"))


class Job:
    """What this rank has, and the draws that all ranks make alike."""

    def __init__(
        self, rank: int, size: int, seed: int, is_connected: bool = True
    ) -> None:
        progress._HELD_UP_S, exits._TOGETHER_S = HELD_UP_S, TOGETHER_S
        self.rank, self.size, self.chance = rank, size, random.Random(seed)
        nemo_patches.apply(stall_timeout=0)
        self.encoder = encoders.conformer()
        torch.manual_seed(0)
        self.other_model = DistributedDataParallel(torch.nn.Linear(4, 4))
        self.pairs = [dist.new_group([one, (one + 1) % size]) for one in range(size)]
        self.processes: list[Any] = [None] * size
        dist.all_gather_object(self.processes, os.getpid())
        self.encode()
        wait_until(lambda: all_have_come() or not is_connected)
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


def one_is_far_ahead(job: Job) -> None:
    """It begins collectives that the others come to later."""
    who, pieces = job.someone(), job.pieces()
    works = []
    while job.rank == who and len(works) < len(pieces):
        time.sleep(pieces[len(works)])
        works.append(dist.all_reduce(torch.ones(1), async_op=True))
    for _ in pieces[len(works) :]:
        dist.all_reduce(torch.ones(1))
    while works:
        works.pop().wait()


class Gpu:
    """Its method is all that is seen of it, as of a tensor's: it has no Python frame, and waits for
    no time.
    """

    busy = threading.Lock()
    busy.acquire()
    item = functools.partial(busy.acquire, True)


def all_but_one_wait_for_their_gpus(job: Job) -> None:
    """That it is the GPU, and what for, is a guess; the one is in a long call."""
    who, long_s = job.someone(), job.long_s()
    if job.rank == who:
        time.sleep(long_s)
    else:
        Gpu.item(long_s)


class SlowDisk(io.BytesIO):
    def __init__(self, long_s: float) -> None:
        super().__init__()
        self.long_s = long_s

    def write(self, data: Any) -> int:
        time.sleep(self.long_s)
        self.long_s = 0.0
        return len(data)


def one_saves(job: Job) -> None:
    who, long_s = job.someone(), job.long_s()
    if job.rank == who:
        torch.save(
            {"w": torch.zeros(4)},
            SlowDisk(long_s),
            _use_new_zipfile_serialization=False,
        )
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


def a_thread_pool(seconds: float) -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(compute, seconds).result()


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
    besides(a_thread_pool),
    besides(a_process_pool),
    besides(a_commands_output),
    one_decodes,
    two_reduce_while_the_others_wait,
    one_is_far_ahead,
    all_but_one_wait_for_their_gpus,
    one_saves,
    the_job_is_suspended,
)
# In these every rank takes steps: nobody looks.
WITH_STEPS = {
    schedule.__name__
    for schedule in (
        two_reduce_while_the_others_wait,
        one_is_far_ahead,
        the_job_is_suspended,
    )
}


def healthy(
    rank: int, size: int, seed: int, numbers: tuple[int, ...]
) -> list[tuple[str, bool]]:
    """Each schedule's name, and whether it was looked at for stall_exit; at last one rank alone
    computes for long.
    """
    job = Job(rank, size, seed)
    found = []
    for number in job.chance.sample(numbers, len(numbers)):
        schedule = HEALTHY[number]
        job.encode()
        schedule(job)
        stall = stall_monitor().stall.stall
        was_looked_at = stall is not None and stall.look_at > 0
        found.append((schedule.__name__, was_looked_at))
    job.encode()
    if rank == 0:
        is_at_one_place(LONGEST_S)
    dist.barrier()
    return found


def run_healthy(seed: int, numbers: tuple[int, ...]) -> list[tuple[str, bool]]:
    """numbers: of the schedules in HEALTHY."""
    print(f"{len(numbers)} schedules by seed {seed}", flush=True)
    limit_s = 60 + 12 * LONG_S * len(numbers)
    results = run_ranks(healthy, RANKS, seed, numbers, limit=limit_s)
    return [one for result in results for one in result.value]


CULPRIT = 1


def end_with_the_others(job: Job) -> None:
    """A child of this rank sees to that. It has the connections too, as a data loader's worker: no
    collective fails.
    """
    rank = os.getpid()
    others = [process for process in job.processes if process != rank]
    if os.fork() == 0:
        end = time.monotonic() + 60
        while all(map(_is_alive, others)) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(1)  # for the one that has not ended yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
        os._exit(0)


def _is_alive(process: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return (
            Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
            != "Z"
        )
    return False


def no_root(*_: Any) -> Any:
    raise ConnectionError("as where the store does not answer")


def without_a_store(rank: int, size: int, port: int, mode: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    meeting.find_root = no_root  # else the ranks could ask each other
    meeting.leave_root = no_root
    job = Job(rank, size, 0, is_connected=False)
    job.encode()
    if rank == CULPRIT:
        change(Path(mode), "silent")
    other_models_steps(job)
    if rank == CULPRIT:
        end_with_the_others(job)
        threading.Event().wait(100)
    dist.barrier()


@pytest.mark.usefixtures("jobs_of_this_file")  # which are beside these
def test_where_nobody_can_be_asked_a_rank_ends_that_waits_and_none_that_goes_on(
    proxy: Proxy,
) -> None:
    results = run_ranks(
        without_a_store,
        RANKS,
        proxy.port,
        str(proxy._mode),
        limit=90,
        dies=(0, 1, 2),
        group=False,
    )
    ended = [result for result in results if result.exit_code == EXIT_CODE]
    assert ended, [(result.exit_code, result.stderr[-2000:]) for result in results]
    for result in ended:
        (line,) = result.lines(
            "more than stall_exit=1.5 s",
            "waits in barrier, and the others cannot be asked",
        )
        # So long it went on.
        assert int(re.findall(r"no encoder call for (\d+) s", line)[0]) >= int(LONG_S)
    assert results[CULPRIT].exit_code != EXIT_CODE


def retries_for_ever(job: Job) -> None:
    """A livelock: as a data set whose file is damaged."""
    attempt = 0
    while True:
        attempt += 1
        time.sleep(0.01)


def hung(rank: int, size: int) -> None:
    job = Job(rank, size, 0)
    job.encode()
    if rank == CULPRIT:
        end_with_the_others(job)
        retries_for_ever(job)
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


@waits_beside_others()
def test_no_healthy_schedule_is_ended(folder: Path) -> None:
    first = random.SystemRandom().randrange(1 << 30)
    every = tuple(range(len(HEALTHY)))
    if SCHEDULES:
        with ThreadPoolExecutor(7) as pool:
            seeds = range(first, first + -(-SCHEDULES // len(every)))
            runs = list(pool.map(lambda seed: run_healthy(seed, every), seeds))
    else:
        runs = [run_healthy(first, every)]
    # Else nothing was tried.
    while unseen := {one.__name__ for one in HEALTHY} - WITH_STEPS - looked_at(runs):
        assert len(runs) < MOST_RUNS, unseen
        again = tuple(n for n in every if HEALTHY[n].__name__ in unseen)
        runs.append(run_healthy(first + len(runs), again))


def looked_at(runs: list[list[tuple[str, bool]]]) -> set[str]:
    return {name for run in runs for name, was_looked_at in run if was_looked_at}
