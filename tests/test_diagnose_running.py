"""A stock job that runs, under torchrun: its stacks with what lies beside, and the folder that
somebody takes home.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from interpreters import environment, run
from ranks import wait_until

from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.collect.host_jobs import jobs_here
from nemo_patches.tools.diagnose.running import diagnose

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]

RANKS, LIMIT_S = 3, 120.0
JOB = """\
import pathlib, sys, time
import torch, torch.distributed as dist

def read_audio(rank, i):
    if rank == 1 and i == 7:
        pathlib.Path("hangs").touch()
        time.sleep(1000)

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for i in range(1000):
        read_audio(rank, i)
        dist.all_reduce(torch.ones(1))

main()
"""
# What a launch before left in the same file.
EARLIER = """\
[rank2]: Traceback (most recent call last):
[rank2]:   File "/job/train.py", line 41, in read_audio
[rank2]:     raise KeyError("audio")
[rank2]: KeyError: 'audio'
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[int]]]:
    """The folder of a job in which rank 1 has gone to sleep, and its ranks' processes."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(JOB)
    (folder / "train.log").write_text(EARLIER)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={RANKS}",
        "job.py",
    ]
    with (folder / "train.log").open("a") as log:
        launcher = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (folder / "hangs").exists():
            assert launcher.poll() is None and time.monotonic() < deadline, (
                folder / "train.log"
            ).read_text()
            time.sleep(0.1)
        children = (
            Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
            .read_text()
            .split()
        )
        yield folder, [int(pid) for pid in children]
    finally:
        os.killpg(launcher.pid, signal.SIGTERM)
        try:
            launcher.wait(60.0)
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()


def test_the_rank_that_sleeps_is_named_and_an_earlier_launch_in_its_log_accuses_nobody(
    job: tuple[Path, list[int]],
) -> None:
    folder, pids = job
    (ranks,) = jobs_here(pids=pids)
    report = diagnose(ranks, stuck_after_s=1.0)
    first = report.findings[0]
    assert (first.id, first.ranks, report.exit_code) == (ids.MISSING_RANK, (1,), 1), (
        report
    )
    assert (
        "all_reduce of main (job.py:" in first.text
        and "in read_audio (job.py:7)" in first.text
    )
    assert len(report.findings) == 1
    assert any("train.log:4 rank 2 raised" in line for line in report.earlier)
    assert any(f"log {folder}/train.log" in line for line in report.summary)
    assert report.world_size == RANKS


def test_a_stopped_rank_comes_before_the_one_that_the_others_wait_for(
    job: tuple[Path, list[int]],
) -> None:
    _, pids = job
    (ranks,) = jobs_here(pids=pids)
    asleep = next(rank.pid for rank in ranks if rank.rank == 1)
    os.kill(asleep, signal.SIGSTOP)
    try:
        stat = Path(f"/proc/{asleep}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        report = diagnose(ranks, stuck_after_s=1.0)
    finally:
        os.kill(asleep, signal.SIGCONT)
    assert (report.findings[0].id, report.findings[0].ranks) == (ids.STOPPED, (1,)), (
        report
    )
    assert f"kill -CONT {asleep}" in report.next_step


def test_the_commands_as_a_user_types_them(
    job: tuple[Path, list[int]], tmp_path: Path
) -> None:
    folder, pids = job
    nemo_patches = [sys.executable, "-m", "nemo_patches"]
    given = ["--pids", ",".join(map(str, pids))]
    collected = run([*nemo_patches, "stacks", "--json", *given], environment(), LIMIT_S)
    assert collected.returncode == 0, collected.stderr
    (tmp_path / "node1.json").write_text(collected.stdout)
    page = tmp_path / "report.html"
    for arguments in (given, ["--job", str(folder)], [str(tmp_path)]):
        command = [*nemo_patches, "diagnose", *arguments, "--html", str(page)]
        done = run(command, environment(), LIMIT_S)
        assert done.returncode == 1, done
        assert done.stdout.startswith("Rank 1: it is in "), done.stdout
        assert "in read_audio (job.py:7) < " in done.stdout
        shown = page.read_text()
        assert '<rect class="waits-at-end"' in shown
        assert '<b class="ranks">ranks 0, 2</b>' in shown
        assert "<code>read_audio (job.py:7)</code>" in shown
        page.unlink()
    nobody = run(
        [*nemo_patches, "diagnose", "--pids", "999999999"], environment(), LIMIT_S
    )
    assert nobody.returncode == 2 and "999999999" in nobody.stderr
