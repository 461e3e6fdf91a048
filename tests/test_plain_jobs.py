"""Jobs that have nothing to do with NeMo or Lightning: they are watched, and their stalls are told,
by steps.

Real processes, as torchrun starts them, with auto-apply and without a word of nemo_patches in the
script.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from interpreters import CHECKOUT, environment, run
from ranks import free_port, wait_until, waits_beside_others

from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.watch.job_socket import near

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
STALL_TIMEOUT, STALL_EXIT = 2, 6
EXIT_CODE = 83
LONG_S = 120.0  # for what must come, on a busy machine


class Job:
    """Its two ranks, and what they have written."""

    def __init__(
        self,
        script: str,
        way: str,
        folder: Path,
        *,
        by_run: bool,
        stall_timeout: int,
        stall_exit: int,
        checkout: Path,
    ) -> None:
        self.folder = folder
        work = [
            sys.executable,
            "-u",
            str(Path(__file__).parent / "plain_job.py"),
            script,
            way,
            str(folder),
        ]
        command = (
            [sys.executable, "-m", "nemo_patches", "run", "--", *work]
            if by_run
            else work
        )
        port = str(free_port())
        settings = {
            "NEMO_PATCHES_STALL_TIMEOUT": str(stall_timeout),
            "NEMO_PATCHES_STALL_EXIT": str(stall_exit),
            "NEMO_PATCHES_ON_STALL": f"tee {folder / 'page'}",
            "TMPDIR": str(folder),
        }
        self.ranks = []
        for rank in range(2):
            named = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables = environment(checkout, **settings, **named, **meets)
            with (folder / f"stderr.{rank}").open("w") as log:
                process = subprocess.Popen(
                    command,
                    env=variables,
                    cwd=checkout,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self.ranks.append(process)

    def stalls(self, rank: int) -> list[str]:
        lines = (
            (self.folder / f"stderr.{rank}").read_text(errors="replace").splitlines()
        )
        return [
            line
            for line in lines
            if " no step for " in line and "stall_exit" not in line
        ]

    def levels(self, rank: int) -> list[str]:
        return [line.split("nemo_patches ")[1].split()[0] for line in self.stalls(rank)]

    def log(self) -> str:
        return "\n".join(
            file.read_text(errors="replace")[-2000:]
            for file in self.folder.glob("stderr.*")
        )


@contextmanager
def running(
    script: str,
    way: str,
    folder: Path,
    *,
    by_run: bool = False,
    stall_timeout: int = STALL_TIMEOUT,
    stall_exit: int = STALL_EXIT,
    checkout: Path = CHECKOUT,
) -> Iterator[Job]:
    """checkout: where ours is, which its processes use."""
    job = Job(
        script,
        way,
        folder,
        by_run=by_run,
        stall_timeout=stall_timeout,
        stall_exit=stall_exit,
        checkout=checkout,
    )
    try:
        wait_until((folder / "hangs").exists, LONG_S)
        yield job
    except BaseException:
        print(job.log())
        raise
    finally:
        for process in job.ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def asked(path: Path) -> object:
    """What a rank says over its socket."""
    with socket.socket(socket.AF_UNIX) as own, near(path.parent, path.name) as name:
        own.settimeout(LONG_S)
        own.connect(name)
        return json.loads(b"".join(iter(lambda: own.recv(1 << 16), b"")))


@waits_beside_others(
    ("trainer", "retries", True),
    ("ddp", "fetches_ahead", False),
    ("ddp", "makes_no_group", False),
)
def test_a_rank_that_only_polls_is_a_warning_at_once_and_is_paged_and_ended(
    script: str, way: str, by_run: bool, tmp_path: Path
) -> None:
    with running(script, way, tmp_path, by_run=by_run) as job:
        wait_until(
            lambda: EXIT_CODE in [process.poll() for process in job.ranks], LONG_S
        )
        # The other one may lose its connection to the one that ends first.
        assert all(process.wait(LONG_S) for process in job.ranks)
        told = [rank for rank in range(2) if job.stalls(rank)]
        assert told
        for rank in told:
            # Before it, on a busy machine, that the other rank has not answered yet, or has just
            # taken a step.
            assert "WARNING" in job.levels(rank)[:2]
            warning = next(line for line in job.stalls(rank) if " WARNING " in line)
            place = "retries" if way == "retries" else "sleeps"
            assert (
                f"{place} (tests/plain_job.py:"
                in warning.split(" s. rank 1 (")[1].split(" | ")[0]
            )
        logs = [file.read_text(errors="replace") for file in tmp_path.glob("stderr.*")]
        assert any(
            "more than stall_exit=6 s, and some wait in a collective: this process"
            in log
            for log in logs
        )
        page: Any = json.loads((tmp_path / "page").read_text())
        assert page["level"] == "WARNING"
        assert [one["rank"] for one in page["missing"]] == [1]
        report: Any = json.loads(
            next(tmp_path.glob("nemo_patches-*/*/stall_rank_0.json")).read_text()
        )
        # Torch's own: of Gloo since 2.13.
        latest = report["flight_recorder"]["entries"][-1]
        assert latest["profiling_name"] == "gloo:all_reduce"
        assert latest["retired"] == (way == "makes_no_group")


@waits_beside_others()
def test_who_waits_for_another_ranks_batches_says_so(tmp_path: Path) -> None:
    """NeMo 3.0 under tensor parallelism: one rank reads for all of its group."""
    with running("tensor_parallel", "sleeps", tmp_path, stall_exit=0) as job:
        wait_until(lambda: "WARNING" in job.levels(1), LONG_S)
        line = job.stalls(1)[-1]
        assert "sleeps (tests/plain_job.py:" in line.split(" s. rank 0 (")[1]
        waits = (
            "): a batch from another rank's BroadcastingDataLoader, in broadcast_batch"
        )
        assert waits in line.split(" | rank 1 (")[1]


@waits_beside_others()
def test_of_ranks_in_different_collectives_the_job_is_asked_and_looked_at_from_outside(
    tmp_path: Path,
) -> None:
    """Its own words cannot tell which of two is wrong; their stacks show which is further on."""
    with running("ddp", "skips_a_collective", tmp_path, stall_exit=0) as job:
        wait_until(lambda: "WARNING" in job.levels(0), LONG_S)
        assert (
            "the ranks wait in different collectives; which of them is wrong cannot be"
            " told" in job.stalls(0)[-1]
        )
        (folder,) = tmp_path.glob("nemo_patches-*/*")
        answer: Any = asked(next(folder.glob("rank_0.*.ask")))
        (latest,) = answer["flight_recorder"]["entries"][-1:]
        assert latest["profiling_name"] == "gloo:all_reduce"
        command = [
            sys.executable,
            "-m",
            "nemo_patches",
            "diagnose",
            "--job",
            str(folder),
            "--json",
        ]
        done = run(command, environment(CHECKOUT, TMPDIR=str(tmp_path)), limit=LONG_S)
        report = json.loads(done.stdout)
        assert report["findings"][0]["id"] == ids.OUT_OF_STEP
        lines = (
            r"Rank 1 is at line \d+ of skips_a_collective \(plain_job.py\), rank 0 at line"
            r" \d+"
        )
        assert re.search(lines, report["verdict"])
