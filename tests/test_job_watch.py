"""Hangs of real NeMo, Lightning and DDP with the checkout on PYTHONPATH and nothing else: none is
silent.

Whatever the config is, and whenever it hangs: a line on every rank that can speak, its stall report
in the job's folder, the page, exit code 83.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from diagnosing import diagnosed
from interpreters import CHECKOUT, environment
from ranks import beside_others, free_port, wait_until

from nemo_patches.tools.diagnose import findings as ids

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
STALL_TIMEOUT, STALL_EXIT = 4.0, 6.0
LINE_S = 5.0  # after stall_timeout, on an idle machine
ROOM_S = 15.0  # what a busy one may add
JOB_S = 150.0
LIMITS = {
    "NEMO_PATCHES_STALL_TIMEOUT": f"{STALL_TIMEOUT:g}",
    "NEMO_PATCHES_STALL_EXIT": f"{STALL_EXIT:g}",
    "NEMO_PATCHES_ON_STALL": "sh -c 'cat >> $JOB_FOLDER/page.json'",
}
EXIT_CODE = 83
READS = r"rank 1 \(.*\): read_audio \(tests/watched_jobs.py:\d+\)"


@dataclass(frozen=True)
class Expected:
    """line: what every rank that can speak says; those in `mute` cannot. codes: exit codes that
    differ from ours.
    """

    line: str
    mute: tuple[int, ...] = ()
    codes: tuple[tuple[int, int], ...] = ()
    level: str = "WARNING"
    limit_s: float = JOB_S  # then its ranks are killed
    # Of the reports in the job's folder.
    verdict: tuple[str, tuple[int, ...]] = (ids.MISSING_RANK, (1,))


EXPECTED = {
    "the flag is false": Expected(
        READS + r".* \| rank 0 \(.*\): DDP's buffer broadcast, in run \(encoders.py:"
    ),
    "sync=local": Expected(READS),
    "no encoder": Expected(
        READS
        + r".* \| rank 0 \(.*\): backward, which reduces the gradients, in train \("
    ),
    # Setting up may take any time: it is told, and not ended.
    "before the first step": Expected(
        READS + r".* \| rank 0 \(.*\): DDP's buffer broadcast",
        codes=((0, -signal.SIGKILL), (1, -signal.SIGKILL)),
        limit_s=12 * STALL_TIMEOUT,
    ),
    "before the second step": Expected(
        READS + r".* \| rank 0 \(.*\): DDP's second step, which makes its buckets anew"
    ),
    "a checkpoint on a dead mount": Expected(
        r"rank 0 \(.*\) writes a checkpoint: .* \| rank 1 \(.*\): barrier, in .*, while"
        r" saving a checkpoint",
        level="INFO",
        verdict=(ids.MISSING_RANK, (0,)),
    ),
    "all ranks read": Expected(
        r"no rank moves: ranks 0-1: read_audio \(tests/watched_jobs.py:\d+\)",
        verdict=(ids.NO_RANK_MOVES, ()),
    ),
    "the store's host is gone": Expected(
        r"rank 0 .*: its process has gone",
        mute=(0,),
        codes=((0, -signal.SIGKILL),),
        verdict=(ids.KILLED, (0,)),
    ),
    "the interface is wrong": Expected(READS),
    "the interface is wrong, and the store goes": Expected(READS),
    "the root is stopped": Expected(
        r"rank 0 \(.*\) answers nothing, its connection stands: stopped",
        mute=(0,),
        codes=((0, -signal.SIGKILL),),
        verdict=(ids.SILENT, (0,)),
    ),
    "an inner rank is stopped": Expected(
        r"rank 1 \(.*\) answers nothing, its connection stands: stopped",
        mute=(1,),
        codes=((1, -signal.SIGKILL),),
        verdict=(ids.SILENT, (1,)),
    ),
}
# `make test` has each of these hangs in another form: "the flag is false", a backward that is
# skipped and a dead mount (tests/hangs), a wrong interface where the store goes, too, and what is
# said before the first step in simulated time (test_stall_decisions.py): it waits for that for long.
WEEKLY = {
    "before the first step",
    "sync=local",
    "no encoder",
    "a checkpoint on a dead mount",
    "the interface is wrong",
}


class Ended:
    """A job that is over: its ranks' exit codes, and what they have written."""

    def __init__(self, folder: Path, codes: list[int]) -> None:
        self.folder, self.codes = folder, codes
        self.logs = [
            (folder / f"stderr.{rank}").read_text(errors="replace")
            for rank in range(len(codes))
        ]

    def stalls(self, rank: int) -> list[str]:
        return [
            line
            for line in self.logs[rank].splitlines()
            if re.search(r" no (encoder call|step) for ", line)
        ]

    def hang_began(self) -> float:
        return max(float(file.read_text()) for file in self.folder.glob("hangs.*"))


class Server:
    """tests/watched_jobs.py, with these variables."""

    def __init__(self, temporary: Path, **variables: str) -> None:
        command = [sys.executable, "-u", str(Path(__file__).parent / "watched_jobs.py")]
        all_ = {**LIMITS, "TMPDIR": str(temporary), **variables}
        self.process = subprocess.Popen(
            command,
            env=environment(CHECKOUT, **all_),
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, name: str, folder: Path, limit_s: float) -> Ended:
        assert self.process.stdin is not None
        request = json.dumps([name, free_port(), str(folder), limit_s])
        self.process.stdin.write(f"{request}\n")
        self.process.stdin.flush()
        # NeMo is imported before the first.
        wait_until((folder / "codes").exists, 2 * JOB_S)
        return Ended(folder, json.loads((folder / "codes").read_text()))

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


SERVERS: dict[str, Server] = {}  # by what NEMO_PATCHES_SYNC is
MAKING = threading.Lock()


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    yield
    for each in SERVERS.values():
        each.end()
    SERVERS.clear()


@dataclass(frozen=True)
class Watched:
    """A job of tests/watched_jobs.py."""

    name: str

    def __str__(self) -> str:
        return self.name

    def run(self, folder: Path) -> Ended:
        sync = "local" if self.name == "sync=local" else "bounded"
        with MAKING:
            if sync not in SERVERS:
                temporary = folder.parent / f"temporary-{sync}"
                temporary.mkdir()
                SERVERS[sync] = Server(temporary, NEMO_PATCHES_SYNC=sync)
        return SERVERS[sync].run(self.name, folder, EXPECTED[self.name].limit_s)


@beside_others(
    *(
        pytest.param(Watched(name), marks=[pytest.mark.weekly] * (name in WEEKLY))
        for name in EXPECTED
    )
)
def test_no_hang_is_silent_whatever_the_config(results: Ended, job: Watched) -> None:
    name, expected = job.name, EXPECTED[job.name]
    speak = [rank for rank in range(len(results.codes)) if rank not in expected.mute]
    for rank in speak:
        assert results.stalls(rank), results.logs[rank][-3000:]
        said = [
            line
            for line in results.stalls(rank)
            if f" {expected.level} " in line and re.search(expected.line, line)
        ]
        assert said, results.stalls(rank)
        # Before it, on a busy machine, that another rank has not answered yet.
        first = said[0]
        after_s = (
            datetime.strptime(first[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            - results.hang_began()
        )
        assert after_s < STALL_TIMEOUT + LINE_S + ROOM_S, (after_s, first)
        print(f"{name}: rank {rank} said it after {after_s:.1f} s")
        assert any(" WARNING " in line for line in results.stalls(rank))
    codes = dict(expected.codes)
    assert results.codes == [
        codes.get(rank, EXIT_CODE) for rank in range(len(results.codes))
    ], "\n".join(results.logs)[-5000:]
    page: Any = json.loads(
        (results.folder / "page.json").read_text()
    )  # one rank for all
    assert page["level"] == "WARNING"
    assert any(
        page["text"] in line
        for log in results.logs
        for line in log.splitlines()
        if " WARNING " in line
    )
    for rank in speak:
        (folder,) = re.findall(
            r" INFO .*; `nemo-patches diagnose (\S+)` reads those of all ranks",
            results.logs[rank],
        )
        report: Any = json.loads(Path(folder, f"stall_rank_{rank}.json").read_text())
        assert (report["rank"], report["level"]) == (rank, "WARNING")
        assert any(report["text"] in line for line in results.stalls(rank))
    first = diagnosed(Path(folder)).findings[0]
    assert (first.id, first.ranks) == expected.verdict, first
