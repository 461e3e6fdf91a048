"""Real jobs that hang, or do not: small ones of stock torch.distributed and NeMo on CPU, with
nothing of nemo_patches.

A scenario runs on every rank of a Gloo group. `reached` says that a rank is about to do what holds
the others up.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ranks

FOREVER_S = 3600.0
STEP = 2  # of the training, at which something happens
STEPS = 4
FIFO = "audio_0017.wav"


@dataclass(frozen=True)
class Rank:
    number: int
    size: int
    folder: Path

    def reached(self) -> None:
        (self.folder / f"reached{self.number}").touch()


@contextlib.contextmanager
def running(
    scenario: Callable[[Rank], Any], size: int, folder: Path, *reaching: int
) -> Iterator[list[int]]:
    """The process ids of the ranks, once those in `reaching` are where the scenario brings them;
    all are killed.
    """
    port = ranks.free_port()
    os.mkfifo(folder / FIFO)
    processes = [
        ranks.rank_process(_run, (scenario, Rank(number, size, folder), port))
        for number in range(size)
    ]
    try:
        for process in processes:
            process.start()
        ranks.wait_until(
            lambda: all((folder / f"reached{number}").exists() for number in reaching),
            120,
        )
        yield [process.pid or 0 for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                # With its data loader's workers.
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
        for process in processes:
            process.join()


def _run(scenario: Callable[[Rank], Any], rank: Rank, port: int) -> None:
    os.setpgid(0, 0)
    descriptor = os.open(
        rank.folder / f"rank{rank.number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    os.dup2(descriptor, 1), os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGUSR2)
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank.number), LOCAL_RANK=str(rank.number), WORLD_SIZE=str(rank.size)
    )
    if scenario is never_came and rank.number == 1:
        rank.reached()
        ask_metadata_server()
    ranks.join_group(rank.number, rank.size, port, FOREVER_S)
    scenario(rank)


# What a rank is in.


def ask_metadata_server() -> None:
    time.sleep(FOREVER_S)


def decode_with_c_extension() -> None:
    ctypes.PyDLL(None).sleep(int(FOREVER_S))  # of PyDLL, calls keep the GIL


def poll_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def spin() -> None:
    while True:
        pass


def read_audio(path: Path) -> bytes:
    return path.read_bytes()


def take_cache(feed: threading.Lock, cache: threading.Lock) -> None:
    with cache, feed:
        pass


def encode(encoder: Any, i: int) -> Any:
    """One forward, with its length sync."""
    import encoders

    return encoders.run(encoder, 100 + i)


def train(
    rank: Rank, at_step: Callable[[], object], only: int = 1, reaches: bool = True
) -> None:
    """Of the encoder; one rank does something before a step. reaches: then it has reached it; else
    it says so.
    """
    import encoders

    encoder = encoders.conformer()
    for i in range(STEPS):
        if i == STEP and rank.number == only:
            if reaches:
                rank.reached()
            at_step()
        encode(encoder, i)


# Somebody is missing.


def late(rank: Rank) -> None:
    train(rank, ask_metadata_server)


def never_came(rank: Rank) -> None:
    """Rank 1 has not come to init_process_group: see _run."""


def late_for_buffers(rank: Rank) -> None:
    """DDP broadcasts rank 0's buffers before each step."""
    import encoders
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(encoders.conformer())
    for i in range(STEPS):
        if i == STEP and rank.number == 0:
            rank.reached()
            ask_metadata_server()
        encode(model, i).sum().backward()


class Recordings:
    """A dataset of which one file on one rank never comes."""

    def __init__(self, rank: Rank, missing_on: int) -> None:
        self.rank, self.missing_on = rank, missing_on

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> int:
        if index == STEP and self.rank.number == self.missing_on:
            self.rank.reached()
            read_audio(self.rank.folder / FIFO)
        return index


def worker_in_fifo(rank: Rank) -> None:
    import encoders
    from torch.utils.data import DataLoader

    encoder = encoders.conformer()
    for i in DataLoader(
        Recordings(rank, missing_on=2),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
    ):
        encode(encoder, i)


class Unreadable(Recordings):
    """A dataset of which one file on one rank is decoded for ever."""

    def __getitem__(self, index: int) -> int:
        if index == STEP and self.rank.number == self.missing_on:
            self.rank.reached()
            spin()
        return index


def worker_spins(rank: Rank) -> None:
    import encoders
    from torch.utils.data import DataLoader

    encoder = encoders.conformer()
    for i in DataLoader(
        Unreadable(rank, missing_on=2),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
    ):
        encode(encoder, i)


def child_of_a_pool_is_killed(rank: Rank) -> None:
    """As the kernel does for want of memory: multiprocessing.Pool starts another one, and its task
    is lost.
    """

    def at_step() -> None:
        with multiprocessing.get_context("fork").Pool(2) as processes:
            lost = processes.map_async(
                killed_while_it_decodes, [rank.folder / "decodes"]
            )
            ranks.wait_until((rank.folder / "decodes").exists, 60)
            rank.reached()
            lost.get()

    train(rank, at_step, reaches=False)


def killed_while_it_decodes(begun: Path) -> None:
    begun.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def keeps_gil(rank: Rank) -> None:
    train(rank, decode_with_c_extension)


def stopped(rank: Rank) -> None:
    train(rank, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def deadlock(rank: Rank) -> None:
    def at_step() -> None:
        feed, cache, has_feed = threading.Lock(), threading.Lock(), threading.Event()

        def take_feed() -> None:
            with feed:
                has_feed.set()
                with cache:
                    pass

        cache.acquire()
        threading.Thread(target=take_feed, name="prefetcher", daemon=True).start()
        has_feed.wait()
        take_lock(feed)

    train(rank, at_step)


def take_lock(lock: threading.Lock) -> None:
    with lock:
        pass


def spins(rank: Rank) -> None:
    train(rank, spin)


def polls(rank: Rank) -> None:
    train(rank, lambda: poll_for(rank.folder / "never.done"))


def pool(rank: Rank) -> None:
    def at_step() -> None:
        with ThreadPoolExecutor(1, "reader") as threads:
            threads.submit(read_audio, rank.folder / FIFO).result()

    train(rank, at_step)


def logger_at_the_end(rank: Rank) -> None:
    import torch
    import torch.distributed as dist

    train(rank, lambda: None, only=-1)
    if rank.number == 1:
        uploader = threading.Thread(
            target=read_audio, args=(rank.folder / FIFO,), name="uploader", daemon=True
        )
        uploader.start()
        rank.reached()
        uploader.join()
    dist.all_reduce(torch.ones(1))


def child(rank: Rank) -> None:
    """A decoder that it has started waits for its input, in a shell."""
    train(rank, lambda: decode_with_sox(rank.folder / FIFO))


def decode_with_sox(path: Path) -> None:
    subprocess.run(f"cat {path} | cat", shell=True, check=True)


def collective_of_a_thread(rank: Rank) -> None:
    """Each rank's main thread waits for one that is in a collective."""
    import torch
    import torch.distributed as dist

    train(rank, lambda: None, only=-1)
    if rank.number == 1:
        rank.reached()
        ask_metadata_server()
    saving = threading.Thread(
        target=lambda: dist.all_reduce(torch.ones(1)),
        name="async checkpoint",
        daemon=True,
    )
    saving.start()
    saving.join()


def thread_left(rank: Rank) -> None:
    """Rank 1's script has come to its end, and a thread of it goes on."""
    train(rank, lambda: None, only=-1)
    if rank.number == 1:
        threading.Thread(target=ask_metadata_server, name="uploader").start()
        rank.reached()
    else:
        validate()


def two_missing(rank: Rank) -> None:
    """Rank 1 asks a server, rank 3 polls."""
    import encoders

    encoder = encoders.conformer()
    for i in range(STEPS):
        if i == STEP and rank.number in (1, 3):
            rank.reached()
            ask_metadata_server() if rank.number == 1 else poll_for(
                rank.folder / "never.done"
            )
        encode(encoder, i)


# All wait.


def save_checkpoint() -> None:
    import torch.distributed as dist

    dist.barrier()


def checkpoint_on_rank_0(rank: Rank) -> None:
    train(rank, save_checkpoint, only=0)


def writes_checkpoint(rank: Rank) -> None:
    """Rank 0 alone, for long, while the others wait."""
    import torch.distributed as dist

    train(rank, lambda: None, only=-1)
    if rank.number == 0:
        rank.reached()
        save_to(rank.folder / "last.ckpt")
    dist.barrier()


def save_to(path: Path) -> None:
    """To a slow file system."""
    part = bytes(1 << 16)
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(part)
            file.seek(0)
            time.sleep(0.05)


def barrier_on_one(rank: Rank) -> None:
    import torch.distributed as dist

    train(rank, lambda: dist.barrier())


def other_order(rank: Rank) -> None:
    """A broadcast by rank 1, which is in an all_gather."""
    import torch
    import torch.distributed as dist

    train(rank, lambda: None, only=-1)
    rank.reached()
    if rank.number == 1:
        dist.all_gather([torch.ones(1) for _ in range(rank.size)], torch.ones(1))
    else:
        dist.broadcast(torch.ones(1), 1)


def objects(rank: Rank) -> None:
    import torch.distributed as dist

    train(
        rank, lambda: dist.all_gather_object([None] * rank.size, {"rank": rank.number})
    )


def swallowed(rank: Rank) -> None:
    """An exception between forward and backward, which is caught: rank 1 goes on.

    The gradients have a group of their own: in the same one, Gloo sees that the sizes differ, and
    ends the job.
    """
    import encoders
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(
        encoders.conformer(), broadcast_buffers=False, process_group=dist.new_group()
    )
    for i in range(STEPS):
        loss = encode(model, i).sum()
        try:
            if i == STEP and rank.number == 1:
                rank.reached()
                raise ValueError("a transcript is empty")
            loss.backward()
        except ValueError:
            continue


def fewer_batches(rank: Rank) -> None:
    import encoders

    encoder = encoders.conformer()
    for i in range(STEPS - (rank.number == 1)):
        encode(encoder, i)
    rank.reached()
    validate()


def validate() -> None:
    import torch
    import torch.distributed as dist

    dist.all_gather(
        [torch.ones(1) for _ in range(dist.get_world_size())], torch.ones(1)
    )


def one_evaluation_batch_more(rank: Rank) -> None:
    """Rank 0 evaluates once more; the others train again."""
    import encoders

    encoder = encoders.conformer()
    for i in range(STEPS):
        encode(encoder, i)
        if i == STEP:
            rank.reached()
            evaluate(STEPS + (rank.number == 0))


def evaluate(batches: int) -> None:
    for j in range(batches):
        validate()
        print("evaluated", j)


def fewer_in_nemos_validation(rank: Rank) -> None:
    """WER's all_gather, and Lightning's all_reduce at its end."""
    import asr_models

    asr_models.prepare()
    trainer = asr_models.trainer_of()
    model = asr_models.ctc(trainer)
    rank.reached()
    trainer.validate(
        model,
        asr_models.loader(asr_models.Batches(range(3 - (rank.number == 1)))),
        verbose=False,
    )


def loader_without_len(rank: Rank) -> None:
    """Lightning reduces the lengths of the loaders, on the ranks whose loader has one."""
    import asr_models

    asr_models.prepare()
    trainer = asr_models.trainer_of()
    model = asr_models.ctc(trainer)
    dataset = (
        asr_models.Stream(range(3))
        if rank.number == 1
        else asr_models.Batches(range(3))
    )
    rank.reached()
    trainer.validate(model, asr_models.loader(dataset), verbose=False)


# Nobody is stuck.


def healthy(rank: Rank) -> None:
    endless(rank, lambda i: None)


def straggling(rank: Rank) -> None:
    endless(rank, lambda i: time.sleep(0.05) if rank.number == 1 else None)


def pausing(rank: Rank) -> None:
    endless(
        rank, lambda i: time.sleep(1.5) if rank.number == 0 and i % 20 == 19 else None
    )


def endless(rank: Rank, before: Callable[[int], object]) -> None:
    import encoders

    encoder = encoders.conformer()
    i = 0
    while True:
        before(i)
        encode(encoder, i % 50)
        i += 1
        if i == STEP:
            rank.reached()


# Scripts of their own, as launchers start them.


def ends_with_a_collective_pending() -> None:
    """`python stock_hangs.py FOLDER`, with a launcher's variables: rank 1 does not come to rank 0's
    last collective.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = Rank(dist.get_rank(), dist.get_world_size(), Path(sys.argv[1]))
    dist.barrier()
    rank.reached()
    if rank.number == 1:
        ask_metadata_server()
    rank_0s_last = dist.all_reduce(torch.ones(1), async_op=True)
    assert rank_0s_last is not None


if __name__ == "__main__":
    ends_with_a_collective_pending()
