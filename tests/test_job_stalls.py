"""Stalls anywhere in the job: where all ranks are, and who is waited for, as every rank's stderr
says it; real DDP, one job for each verdict. When and how loudly what is said: test_stall_decisions.py.
"""

from __future__ import annotations

import contextlib
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

import nemo_patches
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

    def __init__(self, folder: Path, word: str = "") -> None:
        """word: of the line that this rank tells the others of."""
        self.folder, self.word = folder, word
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        folder.mkdir(exist_ok=True)
        self.lines = Lines()
        self.ddp = DistributedDataParallel(encoders.conformer())
        threading.Thread(target=self._tell, daemon=True).start()

    def step(self) -> None:
        """With the loss's backward, as in training."""
        encoders.run(self.ddp, 80).sum().backward()

    def _tell(self) -> None:
        """The training thread may wait in a collective when the line comes."""
        wait_until(
            lambda: any(self.word in text for _, text in self.lines.stalls()), 120
        )
        (self.folder / f"said.{self.rank}").touch()

    def others_have_said_it(self) -> None:
        """Asked seldom: on a slow machine a rank that asks all the time computes."""
        said = [self.folder / f"said.{rank}" for rank in range(self.size)]
        wait_until(lambda: all(each.exists() for each in said), 120, pause_s=0.2)


class SlowDisk(io.BytesIO):
    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer

    def write(self, data: Any) -> int:
        (self.trainer.folder / "writing").touch()
        self.trainer.others_have_said_it()
        return len(data)


def save_checkpoint(trainer: Trainer) -> None:
    torch.save(
        {"w": torch.zeros(4)}, SlowDisk(trainer), _use_new_zipfile_serialization=False
    )


CULPRIT = 1


SAVES = ") writes a checkpoint: "


def saves_a_checkpoint(rank: int, size: int, folder: str) -> list[tuple[int, str]]:
    nemo_patches.apply(stall_timeout=0)
    trainer = Trainer(Path(folder), SAVES)
    for _ in range(3):
        trainer.step()
    wait_until(all_have_come)
    dist.barrier()
    nemo_patches.apply(**AT_ONCE)
    if rank == CULPRIT:
        save_checkpoint(trainer)
    # On a busy machine it computes for long before it writes.
    wait_until((Path(folder) / "writing").exists)
    trainer.step()
    stalls = trainer.lines.stalls()
    # In the first one a rank may wait in vain, whose last round had not come everywhere.
    for _ in range(2):
        trainer.step()
    wait_until(lambda: any("go on" in text for _, text in trainer.lines.found))
    dist.barrier()
    nemo_patches.revert()
    # Calls that are not seen are no stall.
    wait_until(lambda: stall_monitor()._own_facts.make().idle == -1)
    dist.barrier()
    return stalls


IN_A_COLLECTIVE = (
    "DDP's buffer broadcast|length sync|backward, which reduces the gradients"
)


@beside_others(Job(saves_a_checkpoint, 3, Given.FOLDER))
def test_the_rank_that_is_waited_for_is_named_on_every_rank(
    results: list[Result],
) -> None:
    for result in results:
        level, text = result.value[0]
        assert level == logging.INFO
        _, _, groups = text.partition(" s. ")
        first, *others = groups.split(" | ")
        assert first.startswith(f"rank {CULPRIT} ("), text
        assert "save_checkpoint (tests/test_job_stalls.py:" in first
        # Rank 2 has rank 0's buffers, and may go on until it needs rank 1's length or gradients.
        assert all(
            re.fullmatch(
                rf"ranks? 0?(, )?2?( \(.*\))?: ({IN_A_COLLECTIVE}), in .*", other
            )
            for other in others
        ), text


def another_collective(trainer: Trainer) -> None:
    dist.all_gather([torch.zeros(1) for _ in range(trainer.size)], torch.zeros(1))


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


UNDECIDED = "which of them is wrong cannot be told"
# Who is told, and how that is read.
DEADLOCKS: dict[str, tuple[Callable[[Trainer], None], str, str]] = {
    "another collective": (
        another_collective,
        r"rank 1 \(.*\): all_gather, in another_collective.* \| ",
        UNDECIDED,
    ),
    "killed": (
        be_killed,
        r"rank 1 (\(.*\): its process has gone|has not announced)",
        "",
    ),
    "ended": (end, r"rank 1 \(.*\) has left", ""),
}


def deadlock(rank: int, size: int, folder: str, way: str) -> None:
    nemo_patches.apply(stall_timeout=0)
    trainer = Trainer(Path(folder))
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


@beside_others(
    *(Job(deadlock, 3, Given.FOLDER, way, dies=(0, 1, 2)) for way in DEADLOCKS)
)
def test_a_deadlock_is_told_handed_to_the_command_and_ended(
    results: list[Result], job: Job, folder: Path
) -> None:
    (way,) = job.settings
    _, culprit, remark = DEADLOCKS[way]
    for rank in (0, 2):
        # A later one may tell that another rank has ended, too.
        line = results[rank].lines("no encoder call for", " | ")[0]
        assert " WARNING " in line
        first = ".*" if remark else ""  # else it is named first
        assert re.search(rf" s\. {first}{culprit}", line), line
        assert (UNDECIDED in line) == bool(remark)
    # Who is not the first to end may have lost its connection to the one that was.
    first_to_end = [result for result in results if result.exit_code == EXIT_CODE]
    assert first_to_end
    for result in first_to_end:
        assert result.lines("more than stall_exit=", f"exit code {EXIT_CODE}")
    (report,) = folder.glob("report.*.json")  # one rank for all
    told = json.loads(report.read_text())
    assert re.search(culprit, told["text"])
    assert [one["rank"] for one in told["missing"]] == ([] if remark else [1])
    in_groups = [rank for group in told["groups"] for rank in group["ranks"]]
    assert sorted(in_groups) == [0, 1, 2]


def stderr_that_nobody_reads(rank: int, size: int, folder: str) -> None:
    """A launcher that hangs has it: the progress bar of one rank blocks, and so do the lines about
    that.
    """
    trace = "-" if rank == CULPRIT else ""  # its thread blocks, too
    nemo_patches.apply(stall_timeout=0, trace=trace)
    trainer = Trainer(Path(folder))
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
    """Every rank is busy with the same, or the training is over: nobody waits for another."""
    nemo_patches.apply(**AT_ONCE)
    trainer = Trainer(Path(folder))
    for _ in range(3):
        trainer.step()
    wait_until(all_have_come)
    trainer.others_have_said_it()
    trainer.step()
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(1.5 * STALL_TIMEOUT)  # the end itself, not a wait of the test's
    return trainer.lines.stalls()


@beside_others(Job(no_alarm, 2, Given.FOLDER))
def test_ranks_that_are_busy_with_the_same_are_no_stall(results: list[Result]) -> None:
    for result in results:
        ((level, text),) = result.value
        assert level == logging.INFO
        assert re.search(
            r" s\. ranks 0-1: wait_until .* < no_alarm .* | no rank is known to"
            r" wait for another",
            text,
        )
        assert not result.lines("nemo_patches WARNING")


COMPUTES = "): computes but takes no step, now in "


def one_computes(rank: int, size: int, folder: str) -> list[tuple[int, str]]:
    """Until the other rank has said so, and no longer."""
    nemo_patches.apply(stall_timeout=0)
    trainer = Trainer(Path(folder))
    for _ in range(3):
        trainer.step()
    wait_until(all_have_come)
    dist.barrier()
    nemo_patches.apply(**AT_ONCE)
    said = Path(folder, "said")
    if rank != CULPRIT:
        threading.Thread(target=tell_of_it, args=(trainer, said), daemon=True).start()
    while rank == CULPRIT and not said.exists():
        for _ in range(1000):
            torch.ones(50, 50).sum().item()
    trainer.step()
    dist.barrier()
    return trainer.lines.stalls()


def tell_of_it(trainer: Trainer, said: Path) -> None:
    wait_until(lambda: any(COMPUTES in text for _, text in trainer.lines.stalls()), 120)
    said.touch()


@beside_others(Job(one_computes, 2, Given.FOLDER))
def test_a_rank_that_computes_is_told_as_such(results: list[Result]) -> None:
    """On a busy machine another line may be first."""
    level, text = next(one for one in results[0].value if COMPUTES in one[1])
    assert level == logging.INFO
    assert re.search(r" s\. rank 1 \(.* now in \w+ \(tests/test_job_stalls", text)
