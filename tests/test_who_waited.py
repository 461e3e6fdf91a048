"""Real ranks under DDP's defaults hang, each in its way, and die: their traces alone, their stall
reports alone, their log alone, all of these, and what one rank has left, name who is waited for, as
the live line does, and nobody else.
"""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import encoders
import pytest
import torch
import torch.distributed as dist
from diagnosing import report_of
from ranks import (
    CONNECTING_S,
    Given,
    Job,
    Result,
    beside_others,
    come_in,
    wait_until,
)

import nemo_patches
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.findings import CRITICAL

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
SIZE, TIMEOUT, STALL = 3, 1.5, 2.0
WAITED = b'"waited":true'  # of a warning: the first ones may be INFO, on a busy machine
REPORTS = "tmp"  # the parent of the job's folder
LOCK = "lock"  # the file that the test holds locked


@dataclass(frozen=True)
class Place:
    rank: int
    folder: Path

    def pid_of(self, rank: int) -> Path:
        return self.folder / f"pid.{rank}"


def be_stopped(place: Place) -> None:
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def acquire_manifest_lock(place: Place) -> None:
    if place.rank == 2:
        with (place.folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)


def gather_metrics(place: Place) -> None:
    if place.rank == 1:
        dist.all_gather([torch.zeros(1) for _ in range(SIZE)], torch.zeros(1))
    else:
        dist.all_reduce(torch.zeros(1))


def read_batch(place: Place) -> None:
    if place.rank == 1:
        raise ValueError("no such audio")


WAYS: tuple[Callable[[Place], None], ...] = (
    be_stopped,
    acquire_manifest_lock,
    gather_metrics,
    read_batch,
)


def hang(rank: int, size: int, folder: str, way: Callable[[Place], None]) -> None:
    place = Place(rank, Path(folder))
    tempfile.tempdir = str(place.folder / REPORTS)
    # A rank that raises takes long to end on a busy machine: that is no stall.
    stall_timeout = CONNECTING_S if way is read_batch else STALL
    settings = {"stall_timeout": stall_timeout, "trace": place.folder / "traces"}
    nemo_patches.apply(timeout=CONNECTING_S, **settings)
    encoder = encoders.conformer()
    model = torch.nn.parallel.DistributedDataParallel(encoder)

    def step() -> None:
        encoders.run(model, 100).sum().backward()

    for _ in range(3):
        step()
        come_in(encoder)
    nemo_patches.apply(timeout=TIMEOUT, **settings)
    place.pid_of(rank).write_text(str(os.getpid()))
    dist.barrier()
    if rank == 2 and way is not read_batch:  # the others end then
        threading.Thread(target=kill_all, args=(place,), daemon=True).start()
    way(place)
    step()
    step()


def kill_all(place: Place) -> None:
    """Once two ranks have warned that the job stalls, and one of them again, so that the log has it,
    too; as a scheduler does, without a trace.
    """
    traces = place.folder / "traces"

    def have_warned() -> bool:
        told = [one.read_bytes().count(WAITED) for one in traces.glob("*.jsonl")]
        return sum(map(bool, told)) >= 2 and sum(told) >= 3

    wait_until(have_warned, 150)
    for rank in sorted(range(SIZE), key=lambda one: one == place.rank):
        os.kill(int(place.pid_of(rank).read_text()), signal.SIGKILL)


class Hung(Job):
    """Its folder has its traces, its stall reports and its log."""

    def __init__(self, way: Callable[[Place], None]) -> None:
        options = {"dies": (0, 1, 2), "group_timeout": 200.0}
        super().__init__(hang, SIZE, Given.FOLDER, way, **options)

    def run(self, folder: Path) -> list[Result]:
        (folder / REPORTS).mkdir()
        with (folder / LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            results = super().run(folder)
        (folder / "train.log").write_text("".join(one.stderr for one in results))
        return results


HUNG = tuple(map(Hung, WAYS))
EXPECTED = {
    be_stopped: (ids.SILENT, (1,), "Rank 1: it does not answer"),
    acquire_manifest_lock: (
        ids.MISSING_RANK,
        (2,),
        "Rank 2: it is in acquire_manifest_lock (",
    ),
    gather_metrics: (
        ids.OUT_OF_STEP,
        (),
        "rank 1 in all_gather of gather_metrics (",
    ),
    read_batch: (ids.EXCEPTION, (1,), "Rank 1 raised ValueError: no such audio"),
}


@beside_others(*HUNG)
@pytest.mark.parametrize(
    "sources",
    [
        ("traces",),
        ("train.log",),
        (REPORTS,),
        ("traces", "train.log"),
        ("traces", "train.log", REPORTS),
    ],
    ids="+".join,
)
def test_who_is_waited_for(
    results: list[Result], job: Hung, folder: Path, sources: tuple[str, ...]
) -> None:
    (way,) = job.settings
    id_, ranks, said = EXPECTED[way]
    if way is read_batch and REPORTS in sources:
        assert not list((folder / REPORTS).rglob("*.json"))  # nothing stalled
        return
    report = report_of(*(folder / one for one in sources))
    first = report.findings[0]
    if way is read_batch and sources == ("train.log",):
        # No line ties the traceback to a rank; that it has left, others may not have told.
        assert set(first.ranks) <= {1}, report
        return
    assert (first.id, first.ranks) == (id_, ranks), report
    assert said in first.text
    others = [one for one in report.findings[1:] if one.severity == CRITICAL]
    assert all(one.because for one in others), report


@beside_others(*HUNG)
def test_what_one_rank_has_left_says_what_its_line_said(
    results: list[Result], job: Hung, folder: Path
) -> None:
    """A rank that has warned names the same ranks in its trace alone, and in its stall report
    alone. One that has not accuses nobody, but for one that had left.
    """
    (way,) = job.settings
    id_, ranks, said = EXPECTED[way]
    warned = 0
    for file in (folder / "traces").iterdir():
        report = report_of(file)
        accused = {rank for one in report.findings for rank in one.ranks}
        if WAITED not in file.read_bytes():
            assert accused <= ({1} if way is read_batch else set()), report
            continue
        warned += 1
        first = report.findings[0]
        assert (first.id, first.ranks) == (id_, ranks), report
        assert said in first.text
    for file in (folder / REPORTS).rglob("stall_rank_*.json"):
        first = report_of(file).findings[0]
        assert (first.id, first.ranks) == (id_, ranks), first
        assert said.lower() in first.text.lower()
    assert warned >= 2 or way is read_batch
