"""Stalls anywhere in the job: where all ranks are, and who is waited for, as every rank's stderr
says it; real DDP.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import json
import logging
import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoders
import pytest
import torch
import torch.distributed as dist
from ranks import (
    Given,
    Job,
    Result,
    all_have_come,
    beside_others,
    say_what_is_left,
    stall_monitor,
    wait_until,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import nemo_patches
from nemo_patches.judging.kinds import ANSWERS_NOTHING
from nemo_patches.sync import rank_log
from nemo_patches.watch.exits import EXIT_CODE
from nemo_patches.watch.log_line import LogLines

# Nothing here depends on NeMo's version.
pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
STALL_TIMEOUT = 3.0
AT_ONCE = {"stall_timeout": STALL_TIMEOUT}


class Lines(logging.Handler):
    """This rank's own lines, as they come, with their levels."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[tuple[int, str]] = []
        rank_log.enable()
        logging.getLogger("nemo_patches").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelno, record.getMessage()))

    def stalls(self) -> list[tuple[int, str]]:
        return [
            (level, text) for level, text in self.found if "no encoder call for" in text
        ]


class Trainer:
    """A Conformer in DDP on this rank, and the files by which the ranks tell each other what they
    have said.
    """

    def __init__(self, folder: Path, broadcast_buffers: bool) -> None:
        self.folder, self.rank, self.size = (
            folder,
            dist.get_rank(),
            dist.get_world_size(),
        )
        folder.mkdir(exist_ok=True)
        self.lines = Lines()
        self.ddp = DistributedDataParallel(
            encoders.conformer(), broadcast_buffers=broadcast_buffers
        )
        threading.Thread(target=self._tell, daemon=True).start()

    def step(self) -> None:
        """With the loss's backward, as in training."""
        encoders.run(self.ddp, 80).sum().backward()

    def _tell(self) -> None:
        """The training thread may wait in a collective when the line comes."""
        wait_until(self.lines.stalls, 120)
        (self.folder / f"said.{self.rank}").touch()

    def others_have_said_it(self, but: int = -1) -> None:
        wait_until(
            lambda: len(list(self.folder.glob("said.*"))) >= self.size - (but >= 0), 120
        )


def read_audio(trainer: Trainer) -> None:
    trainer.others_have_said_it()


def take_the_lock(trainer: Trainer) -> None:
    path = trainer.folder / "lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Thread(
            target=lambda: (
                trainer.others_have_said_it(),
                fcntl.flock(held, fcntl.LOCK_UN),
            )
        ).start()
        with path.open("w") as wanted:
            fcntl.flock(wanted, fcntl.LOCK_EX)


class Shards(Dataset[int]):
    """As from a mount that does not answer: its worker waits in the kernel until go_on can be read."""

    def __init__(self, folder: Path, go_on: int) -> None:
        self.folder, self.go_on = folder, go_on

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        shard = self.folder / "shard_17.tar"
        shard.touch()
        with shard.open():
            os.read(self.go_on, 1)
        return 0


def next_batch(trainer: Trainer) -> None:
    go_on, told = os.pipe()
    loader = DataLoader(
        Shards(trainer.folder, go_on), num_workers=1, multiprocessing_context="fork"
    )
    batches = iter(loader)  # the worker is there
    threading.Thread(
        target=lambda: (trainer.others_have_said_it(), os.write(told, bytes(8)))
    ).start()
    next(batches)


class SlowDisk(io.BytesIO):
    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer

    def write(self, data: Any) -> int:
        self.trainer.others_have_said_it()
        return len(data)


def save_checkpoint(trainer: Trainer) -> None:
    torch.save(
        {"w": torch.zeros(4)}, SlowDisk(trainer), _use_new_zipfile_serialization=False
    )


def once_others_have_said_it(trainer: Trainer, act: Callable[[], object]) -> int:
    """A child, which does it: this rank cannot."""
    child = os.fork()
    if child == 0:
        try:
            trainer.others_have_said_it(but=trainer.rank)
        finally:
            act()
            os._exit(0)
    return child


def hold_the_gil(trainer: Trainer) -> None:
    go_on, told = os.pipe()
    child = once_others_have_said_it(trainer, lambda: os.write(told, b"."))
    # PyDLL keeps the lock during the call.
    ctypes.PyDLL(None).read(go_on, ctypes.create_string_buffer(1), 1)
    os.waitpid(child, 0)


def be_stopped(trainer: Trainer) -> None:
    rank = os.getpid()
    child = once_others_have_said_it(trainer, lambda: os.kill(rank, signal.SIGCONT))
    os.kill(rank, signal.SIGSTOP)
    os.waitpid(child, 0)


CULPRIT = 1
WAYS: dict[str, tuple[Callable[[Trainer], None], str]] = {
    "data reading": (read_audio, "read_audio (tests/test_job_stalls.py:"),
    "a file lock": (take_the_lock, "take_the_lock (tests/test_job_stalls.py:"),
    "a loader's worker": (next_batch, "next_batch (tests/test_job_stalls.py:"),
    "a checkpoint": (save_checkpoint, "save_checkpoint (tests/test_job_stalls.py:"),
    "holds the GIL": (hold_the_gil, ANSWERS_NOTHING),
    "stopped": (be_stopped, ANSWERS_NOTHING),
}


def each_way(
    rank: int, size: int, folder: str, broadcast_buffers: bool, *only: str
) -> dict[str, Any]:
    found = {}
    for way in only or WAYS:
        nemo_patches.apply(stall_timeout=0)
        trainer = Trainer(Path(folder, way.replace(" ", "_")), broadcast_buffers)
        for _ in range(3):
            trainer.step()
        wait_until(all_have_come)
        dist.barrier()
        nemo_patches.apply(**AT_ONCE)
        if rank == CULPRIT:
            WAYS[way][0](trainer)
        trainer.step()
        stalls = trainer.lines.stalls()
        # In the first one a rank may wait in vain, whose last round had not come everywhere.
        for _ in range(2):
            trainer.step()
        wait_until(
            lambda t=trainer: (
                not t.lines.stalls()
                or any("go on" in text for _, text in t.lines.found)
            )
        )
        dist.barrier()
        found[way] = stalls
        logging.getLogger("nemo_patches").removeHandler(trainer.lines)
    nemo_patches.revert()
    # Calls that are not seen are no stall.
    wait_until(lambda: stall_monitor()._own_facts.make().idle == -1)
    dist.barrier()
    return found


# Under DDP's defaults, which broadcast buffers; and where the length sync comes first, two of them.
HALVES = (tuple(WAYS)[:3], tuple(WAYS)[3:])
BROADCAST = [Job(each_way, 3, Given.FOLDER, True, *half) for half in HALVES]
IN_THE_LENGTH_SYNC = ("data reading", "holds the GIL")
GRADIENTS_ONLY = Job(each_way, 3, Given.FOLDER, False, *IN_THE_LENGTH_SYNC)
IN_A_COLLECTIVE = (
    "DDP's buffer broadcast|length sync|backward, which reduces the gradients"
)


@beside_others(*BROADCAST, GRADIENTS_ONLY)
def test_the_rank_that_is_waited_for_is_named_on_every_rank(
    results: list[Result],
) -> None:
    told = [
        (way, rank, result.value[way])
        for rank, result in enumerate(results)
        for way in result.value
    ]
    for way, rank, stalls in told:
        if rank == CULPRIT and WAYS[way][1] == ANSWERS_NOTHING:
            continue  # it can say nothing meanwhile
        level, text = stalls[0]
        assert level == (logging.INFO if way == "a checkpoint" else logging.WARNING)
        _, _, groups = text.partition(" s. ")
        first, *others = groups.split(" | ")
        assert first.startswith(f"rank {CULPRIT} ("), text
        assert WAYS[way][1] in first
        # Rank 2 has rank 0's buffers, and may go on until it needs rank 1's length or gradients.
        assert all(
            re.fullmatch(
                rf"ranks? 0?(, )?2?( \(.*\))?: ({IN_A_COLLECTIVE}), in .*", other
            )
            for other in others
        ), text


def a_barrier_too_many(trainer: Trainer) -> None:
    dist.barrier()


def another_collective(trainer: Trainer) -> None:
    dist.all_gather([torch.zeros(1) for _ in range(trainer.size)], torch.zeros(1))


def evaluation_in_place_of_training(trainer: Trainer) -> None:
    trainer.ddp.eval()
    with torch.no_grad():
        for _ in range(3):
            encoders.run(trainer.ddp.module, 80)
    score = [None] * trainer.size
    dist.all_gather_object(score, trainer.rank)


def end_of_the_epoch(trainer: Trainer) -> None:
    """It has a batch less than the others."""
    dist.monitored_barrier()


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ValueError("in backward")


def an_exception_in_backward(trainer: Trainer) -> None:
    """It is caught, for a last word; others wait for its gradients."""
    try:
        FailingBackward.apply(encoders.run(trainer.ddp, 80)).sum().backward()
    except ValueError:
        write_a_report()


def write_a_report() -> None:
    threading.Event().wait(200)


def keep_the_connections(trainer: Trainer) -> None:
    """As a data loader's worker does, which was forked: so the others' collectives do not fail when
    this rank dies. Until these have ended.
    """
    if os.fork() == 0:
        pids = [file.read_text() for file in trainer.folder.glob("pid.*")]
        try:
            wait_until(lambda: not any(Path("/proc", pid).exists() for pid in pids), 90)
        finally:
            os._exit(0)


def be_killed(trainer: Trainer) -> None:
    keep_the_connections(trainer)
    os.kill(os.getpid(), signal.SIGKILL)


def end(trainer: Trainer) -> None:
    keep_the_connections(trainer)
    logging.shutdown()
    say_what_is_left()
    os._exit(0)


DEADLOCKS: dict[str, tuple[Callable[[Trainer], None], int, str]] = {
    "a barrier on one rank": (
        a_barrier_too_many,
        EXIT_CODE,
        r"rank 1 \(.*\): barrier, in a_barrier_too_many",
    ),
    "another collective": (
        another_collective,
        EXIT_CODE,
        r"rank 1 \(.*\): all_gather, in another_collective",
    ),
    "evaluation": (
        evaluation_in_place_of_training,
        EXIT_CODE,
        r"rank 1 \(.*\): all_gather_object, in eval.*, after enco",
    ),
    "uneven batches": (
        end_of_the_epoch,
        EXIT_CODE,
        r"rank 1 \(.*\): monitored_barrier, in end_of_the_epoch",
    ),
    "an exception": (
        an_exception_in_backward,
        EXIT_CODE,
        r"rank 1 \(.*\): write_a_report \(tests/test_job_stalls.py",
    ),
    "killed": (
        be_killed,
        -signal.SIGKILL,
        r"rank 1 \(.*\): its process has gone|rank 1 has not announced",
    ),
    "ended": (end, 0, r"rank 1 \(.*\) has left"),
}


def deadlock(
    rank: int, size: int, folder: str, way: str, broadcast_buffers: bool
) -> None:
    nemo_patches.apply(stall_timeout=0)
    trainer = Trainer(Path(folder), broadcast_buffers)
    Path(folder, f"pid.{rank}").write_text(str(os.getpid()))
    for _ in range(3):
        trainer.step()
    wait_until(all_have_come)
    dist.barrier()
    report = shlex.quote(str(Path(folder, f"report.{rank}.json")))
    nemo_patches.apply(
        **AT_ONCE,
        timeout=1.0,
        stall_exit=STALL_TIMEOUT + 2,
        on_stall=f"tee -a {report}",
    )
    if rank == CULPRIT:
        DEADLOCKS[way][0](trainer)
    trainer.step()
    trainer.step()


CASES = [(way, True) for way in DEADLOCKS]
CASES += [("uneven batches", False), ("an exception", False), ("killed", False)]


@beside_others(
    *(Job(deadlock, 3, Given.FOLDER, *case, dies=(0, 1, 2)) for case in CASES)
)
def test_a_deadlock_is_told_handed_to_the_command_and_ended(
    results: list[Result], job: Job, folder: Path
) -> None:
    way, _ = job.settings
    _, exit_code, culprit = DEADLOCKS[way]
    for rank in (0, 2):
        lines = results[rank].lines("no encoder call for", " | ")
        assert lines
        # Another one where what the culprit did last was later than its last encoder call
        for line in lines:
            assert " WARNING " in line
            _, _, groups = line.partition(" s. ")
            suspects = [
                group for group in groups.split(" | ") if re.match(culprit, group)
            ]
            assert len(suspects) == 1, line
            if exit_code != EXIT_CODE or way == "an exception":
                assert groups.startswith(suspects[0])
            else:
                assert "which of them is wrong cannot be told" in groups
    # Who is not the first to end may have lost its connection to the one that was.
    first_to_end = [result for result in results if result.exit_code == EXIT_CODE]
    assert first_to_end
    assert all(
        result.lines("more than stall_exit=", f"exit code {EXIT_CODE}")
        for result in first_to_end
    )
    (report,) = folder.glob("report.*.json")  # one rank for all
    told = json.loads(report.read_text())
    assert told["world_size"] == 3
    assert told["missing"] or "cannot be told" in told["remark"]
    assert any(
        re.match(culprit, group)
        for group in told["text"].partition(" s. ")[2].split(" | ")
    )
    assert sorted(rank for group in told["groups"] for rank in group["ranks"]) == [
        0,
        1,
        2,
    ]


def stderr_that_nobody_reads(rank: int, size: int, folder: str) -> None:
    """A launcher that hangs has it: the progress bar of one rank blocks, and so do the lines about
    that.
    """
    trace = "-" if rank == CULPRIT else ""  # its thread blocks, too
    nemo_patches.apply(stall_timeout=0, trace=trace)
    trainer = Trainer(Path(folder), broadcast_buffers=True)
    for _ in range(3):
        trainer.step()
    wait_until(all_have_come)
    dist.barrier()
    nemo_patches.apply(
        **AT_ONCE, timeout=1.0, stall_exit=STALL_TIMEOUT + 1, trace=trace
    )
    if rank == CULPRIT:
        _, pipe = os.pipe()
        os.set_blocking(pipe, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe, bytes(4096))
        os.set_blocking(pipe, True)
        os.dup2(pipe, 2)
        os.write(2, b"Epoch 3:  14%")
    trainer.step()
    trainer.step()


@beside_others(Job(stderr_that_nobody_reads, 2, Given.FOLDER, limit=90, dies=(0, 1)))
def test_stall_exit_ends_a_rank_whose_stderr_nobody_reads(
    results: list[Result],
) -> None:
    waiting, culprit = results
    assert any(
        "stderr_that_nobody_reads (tests/test_job_stalls.py" in line
        for line in waiting.lines("no encoder call")
    )
    assert culprit.exit_code == EXIT_CODE


class Hanging(logging.Handler):
    """As one to a log server that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = threading.Event()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.answer.wait(60)
        self.texts.append(record.getMessage())


def test_a_log_handler_that_hangs_holds_up_the_monitor_once() -> None:
    handler, lines = Hanging(), LogLines()
    rank_log.logger.addHandler(handler)
    try:
        began = time.monotonic()
        for _ in range(100):
            lines.report(logging.WARNING, "a rank is late")
        took_s = time.monotonic() - began
        handler.answer.set()
        wait_until(lambda: not any(thread.is_alive() for thread in lines._blocked))
        lines.report(logging.WARNING, "it has come")
        wait_until(lambda: len(handler.texts) == 65)
    finally:
        handler.answer.set()
        rank_log.logger.removeHandler(handler)
    assert took_s < 15  # not half a second for each line
    assert handler.texts[-1].endswith(
        "it has come | 36 lines before this one are lost: nobody took them"
    )


def no_alarm(rank: int, size: int, folder: str) -> list[tuple[int, str]]:
    """Every rank is busy with the same, or has not begun, or is in a debugger: nobody waits for
    another.
    """
    nemo_patches.apply(**AT_ONCE)
    trainer = Trainer(Path(folder), broadcast_buffers=True)
    trainer.step()
    dist.barrier()
    time.sleep(1.5 * STALL_TIMEOUT)  # the set-up itself, not a wait of the test's
    # Before its second call a job may take any time.
    assert trainer.lines.stalls() == []
    for _ in range(2):
        trainer.step()
    wait_until(all_have_come)
    score_the_set(trainer)
    trainer.step()
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(1.5 * STALL_TIMEOUT)  # the training is over
    return trainer.lines.stalls()


def score_the_set(trainer: Trainer) -> None:
    """Long enough for a second report, were there one."""
    trainer.others_have_said_it()
    end = time.monotonic() + 2 * STALL_TIMEOUT
    while time.monotonic() < end:
        torch.ones(50, 50).sum().item()


@beside_others(Job(no_alarm, 2, Given.FOLDER))
def test_ranks_that_are_busy_with_the_same_are_no_stall(results: list[Result]) -> None:
    for result in results:
        ((level, text),) = result.value
        assert level == logging.INFO
        assert re.search(
            r" s\. ranks 0-1: wait_until .* < score_the_set .* | no rank is known to"
            r" wait for another",
            text,
        )
        assert not result.lines("nemo_patches WARNING")


def retries(trainer: Trainer) -> None:
    """A livelock, as of a data set whose file is damaged: it counts, and sleeps."""
    attempt = 0
    while not has_warned(trainer):
        attempt += 1
        time.sleep(0.01)


def computes(trainer: Trainer) -> None:
    """Far longer than stall_exit."""
    while not has_warned(trainer):
        for _ in range(1000):
            torch.ones(50, 50).sum().item()


def has_warned(trainer: Trainer) -> bool:
    return (trainer.folder / "warned").exists()


def one_goes_on_alone(
    rank: int, size: int, folder: str, goes_on: Callable[[Trainer], None]
) -> list[tuple[int, str]]:
    """The stall's lines on the rank that waits, until the first warning and a while after it."""
    nemo_patches.apply(stall_timeout=0)
    trainer = Trainer(Path(folder, "ranks"), broadcast_buffers=True)
    for _ in range(3):
        trainer.step()
    wait_until(all_have_come)
    dist.barrier()
    stall_exit = 2 * STALL_TIMEOUT if goes_on is computes else 0
    page = shlex.quote(str(Path(folder, "page")))
    nemo_patches.apply(
        stall_timeout=STALL_TIMEOUT, stall_exit=stall_exit, on_stall=f"tee {page}"
    )
    if rank == CULPRIT:
        goes_on(trainer)
    else:
        threading.Thread(target=tell_of_a_warning, args=(trainer,), daemon=True).start()
    trainer.step()
    dist.barrier()
    if rank != CULPRIT:
        wait_until(Path(folder, "page").exists)
    return trainer.lines.stalls()


def tell_of_a_warning(trainer: Trainer) -> None:
    wait_until(
        lambda: any(level == logging.WARNING for level, _ in trainer.lines.stalls()),
        120,
    )
    (trainer.folder / "warned").touch()


@beside_others(Job(one_goes_on_alone, 2, Given.FOLDER, retries))
def test_a_rank_that_retries_for_ever_is_a_warning_at_once(
    results: list[Result], folder: Path
) -> None:
    levels = [level for level, _ in results[0].value]
    # Before it, that the other rank has not stood still for long enough.
    assert logging.WARNING in levels[:2]
    first = next(text for level, text in results[0].value if level == logging.WARNING)
    # Or it is seen in the function by which it knows when to end.
    assert re.search(
        r" s\. rank 1 \(.*\): (has_warned \(.* < )?retries"
        r" \(tests/test_job_stalls.py:.* \| rank 0 \(",
        first,
    )
    assert (folder / "page").exists()


@beside_others(Job(one_goes_on_alone, 2, Given.FOLDER, computes))
def test_a_rank_that_computes_is_info_twice_and_then_a_warning_and_is_not_ended(
    results: list[Result], folder: Path
) -> None:
    levels = [level for level, _ in results[0].value]
    assert levels[:3] == [logging.INFO, logging.INFO, logging.WARNING]
    for _, text in results[0].value[:3]:
        assert re.search(
            r" s\. rank 1 \(.*\): computes but takes no step, now in \w+"
            r" \(tests/test_job_stalls",
            text,
        )
    assert results[0].value[2][1].endswith("; no rank takes a step")
    assert (folder / "page").exists()
    assert not results[0].lines("more than stall_exit")
