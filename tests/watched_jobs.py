"""Jobs that hang, for test_job_watch.py: real NeMo, Lightning and DDP, without a word of
nemo_patches.

Started with the checkout on PYTHONPATH, and nothing else; imports NeMo once and forks the ranks of
each job.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import asr_models
import encoders
import nemo.collections.asr  # noqa: F401  # once, for all ranks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

CULPRIT = 1
HANGS_S = 200  # far longer than any job is given
STEPS, STEP_S = 4, 0.05
STEPS_WATCHED = 40


class Job:
    """On one rank. folder: all ranks', for what they tell each other and the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, dist.get_rank()

    def hangs(self, rank: int) -> None:
        """The file by which the test knows when the hang began."""
        (self.folder / f"hangs.{rank}").write_text(str(time.time()))


def read_audio(job: Job) -> None:
    """From a mount that does not answer: a FIFO that nobody writes to."""
    job.hangs(job.rank)
    fifo = job.folder / f"audio.{job.rank}"
    with contextlib.suppress(FileExistsError):
        os.mkfifo(fifo)
    with fifo.open("rb") as audio:
        audio.read()


def train(
    job: Job,
    model: torch.nn.Module,
    step: Callable[[Any], Any],
    *,
    hang_at: int = STEPS,
) -> None:
    """With DDP; the culprit hangs before its step number `hang_at`."""
    ddp = DistributedDataParallel(model)
    for number in range(HANGS_S):
        if number == hang_at and job.rank == CULPRIT:
            read_audio(job)
        step(ddp).sum().backward()
        time.sleep(STEP_S)


def conformer_step(ddp: Any) -> Any:
    return encoders.run(ddp, 80)


def flag_is_false(job: Job) -> None:
    train(job, encoders.conformer(sync_max_audio_length=False), conformer_step)


def a_conformer(job: Job) -> None:
    train(job, encoders.conformer(), conformer_step)


def no_encoder(job: Job) -> None:
    train(job, torch.nn.Linear(4, 4), lambda ddp: ddp(torch.ones(2, 4)))


def before_the_first_step(job: Job) -> None:
    train(
        job, encoders.conformer(sync_max_audio_length=False), conformer_step, hang_at=0
    )


def before_the_second_step(job: Job) -> None:
    train(
        job, encoders.conformer(sync_max_audio_length=False), conformer_step, hang_at=1
    )


def all_ranks_read(job: Job) -> None:
    ddp = DistributedDataParallel(encoders.conformer())
    for _ in range(STEPS):
        conformer_step(ddp).sum().backward()
    read_audio(job)


def a_checkpoint_on_a_dead_mount(job: Job) -> None:
    """Lightning's own, of a NeMo model."""
    import dead_mount
    import lightning.pytorch as pl

    asr_models.prepare()
    path = dead_mount.path_on_it(job.folder)

    class Slow(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int
        ) -> None:
            if number == STEPS:
                job.hangs(trainer.global_rank)
                trainer.save_checkpoint(path)

    trainer = asr_models.trainer_of(
        callbacks=[Slow()],
        limit_val_batches=0,
        num_sanity_val_steps=0,
        max_steps=HANGS_S,
    )
    model = asr_models.ctc(trainer)
    batches = asr_models.loader([asr_models.batch(number) for number in range(8)])
    trainer.fit(model, train_dataloaders=batches)


def stop(job: Job, *ranks: int) -> None:
    """These ranks stop at once; the others go on, and wait for them."""
    ddp = DistributedDataParallel(encoders.conformer(sync_max_audio_length=False))
    for number in watched_steps(job):
        if number == STEPS_WATCHED and job.rank in ranks:
            job.hangs(job.rank)
            os.kill(os.getpid(), signal.SIGSTOP)
        conformer_step(ddp).sum().backward()


def watched_steps(job: Job) -> Iterator[int]:
    """Steps, counted from when nemo_patches has said on rank 0 that all ranks have joined."""
    number = 0
    for _ in range(HANGS_S * 10):
        number += (
            number > 0 or "patched on all" in (job.folder / "stderr.0").read_text()
        )
        yield number
        time.sleep(STEP_S)


def root_stopped(job: Job) -> None:
    stop(job, 0)


def inner_rank_stopped(job: Job) -> None:
    stop(job, 1)


def store_host_gone(job: Job) -> None:
    """Rank 0, which serves the job's store, dies; a forked child of its keeps its connections open."""
    ddp = DistributedDataParallel(encoders.conformer(sync_max_audio_length=False))
    for number in watched_steps(job):
        if number == STEPS_WATCHED and job.rank == 0:
            job.hangs(0)
            if os.fork() == 0:
                time.sleep(HANGS_S)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        conformer_step(ddp).sum().backward()


JOBS: dict[str, tuple[Callable[[Job], None], int]] = {
    "the flag is false": (flag_is_false, 2),
    "sync=local": (a_conformer, 2),
    "no encoder": (no_encoder, 2),
    "before the first step": (before_the_first_step, 2),
    "before the second step": (before_the_second_step, 2),
    "a checkpoint on a dead mount": (a_checkpoint_on_a_dead_mount, 2),
    "all ranks read": (all_ranks_read, 2),
    "the store's host is gone": (store_host_gone, 3),
    "the interface is wrong": (flag_is_false, 2),
    "the interface is wrong, and the store goes": (flag_is_false, 2),
    "the root is stopped": (root_stopped, 4),
    "an inner rank is stopped": (inner_rank_stopped, 4),
}


def no_address(server: Any) -> Any:
    """As with a wrong GLOO_SOCKET_IFNAME: no rank takes part in rounds, and questions find their
    way on this host.
    """
    raise ValueError("blocked by the test")


def rank_of(name: str, rank: int, port: int, folder: Path) -> None:
    """Run this rank; the exit code is what nemo_patches makes it."""
    work, size = JOBS[name]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        JOB_FOLDER=str(folder),
    )
    log = os.open(folder / f"stderr.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    if name.startswith("the interface is wrong"):
        from nemo_patches.channel import meeting

        meeting.own_addresses = no_address
    if name.endswith("and the store goes") and rank == CULPRIT:
        from nemo_patches.sync import length_sync

        # Rank 0, which has the store, ends long before.
        late = datetime.timedelta(seconds=15)
        length_sync.use(dataclasses.replace(length_sync.current(), stall_exit=late))
    limit = datetime.timedelta(seconds=HANGS_S)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=limit,
    )
    work(Job(folder))


def serve() -> None:
    """A job for each line of standard input, beside the others: its name, port, folder and limit.
    The ranks' exit codes come to its folder.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            name, port, folder, limit_s = json.loads(line)
            run_job(name, port, Path(folder), limit_s)
            os._exit(0)


def run_job(name: str, port: int, folder: Path, limit_s: float) -> None:
    ranks = {}
    for rank in range(JOBS[name][1]):
        if (pid := os.fork()) == 0:
            os.setsid()
            try:
                rank_of(name, rank, port, folder)
            except BaseException:
                traceback.print_exc()
            atexit._run_exitfuncs()
            os._exit(1)
        ranks[pid] = rank
    codes = collect(dict(ranks), limit_s)
    text = json.dumps([codes.get(rank) for rank in range(len(ranks))])
    (folder / "codes.new").write_text(text)
    (folder / "codes.new").rename(folder / "codes")


def collect(ranks: dict[int, int], limit_s: float) -> dict[int, int]:
    """By rank: its exit code, or minus the signal that ended it; whoever runs at the limit is
    killed, and who is stopped when all others have ended."""
    killer = threading.Timer(limit_s, lambda: kill(ranks))
    killer.start()
    codes, stopped = {}, set[int]()
    while ranks:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            stopped.add(pid)
        elif pid in ranks:
            codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
        if stopped.issuperset(ranks):
            kill(ranks)
    killer.cancel()
    return codes


def kill(ranks: Iterable[int]) -> None:
    for pid in list(ranks):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()
