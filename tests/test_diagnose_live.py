"""`diagnose --job`: a running job is asked through its ranks' sockets, without torch, and left as it is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from interpreters import environment, run
from ranks import run_ranks, stall_monitor, wait_until
from typer.testing import CliRunner

import nemo_patches
from nemo_patches.cli import app
from nemo_patches.stall import subscriber
from nemo_patches.stall.job_folder import private_folder
from nemo_patches.stall.job_socket import ENDING, near
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose import live
from nemo_patches.tools.diagnose.folder import UnreadableError

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from nemo_patches.cli import main; main()"


def ask(folder: Path, temporary: Path) -> Any:
    """The command's JSON, from an interpreter that cannot import torch."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "diagnose", "--job", str(folder), "--json"]
    done = run(command, environment(TMPDIR=str(temporary)), limit=120)
    assert done.returncode in (0, 1), done
    return json.loads(done.stdout)


def read_audio(is_done: Path) -> None:
    wait_until(is_done.exists, 200)


def asked(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Every scenario is asked about from a thread of rank 1, while its training thread waits."""
    here = Path(folder)
    os.chdir(here)
    tempfile.tempdir = str(here)
    found: dict[str, Any] = {}

    def scenario(name: str, question: Callable[[], None], work: Callable[[Path], None]) -> None:
        is_done = here / f"{name}.done"
        threading.Thread(target=question).start() if rank == 1 else None
        work(is_done)
        wait_until(is_done.exists, 200)
        dist.barrier()

    def put(name: str, asked_for: Path) -> None:
        try:
            found[name] = ask(asked_for, here)
        finally:
            (here / f"{name}.done").touch()

    nemo_patches.apply(timeout=120.0, stall_timeout=120.0)
    wait_until(lambda: subscriber.monitor() is not None and stall_monitor().channel.is_whole)
    dist.barrier()
    wait_until(lambda: len(list(here.glob(f"nemo_patches-*/*/rank_*{ENDING}"))) == size)
    (job,) = here.glob("nemo_patches-*/*")

    scenario("healthy", lambda: put("healthy", here), lambda _: None)

    def wait_for_the_reader(is_done: Path) -> None:
        read_audio(is_done) if rank == 2 else dist.barrier()
        if rank == 2:
            dist.barrier()

    def when_it_stands(name: str, asked_for: Path) -> None:
        began = time.monotonic()
        progress = stall_monitor().progress
        wait_until(lambda: progress.stepped_at > began - 1 and progress.still_s(time.monotonic()) > 4, 60)
        put(name, asked_for)

    nemo_patches.apply(timeout=120.0, stall_timeout=6.0, call_timeout=0.0)
    dist.barrier()
    scenario("waits", lambda: when_it_stands("waits", job), wait_for_the_reader)

    def stop_rank_0() -> None:
        (pid,) = (live.process_of(file) for file in job.glob(f"rank_0.*{ENDING}"))
        os.kill(pid, signal.SIGSTOP)
        try:
            when_it_stands("stopped", here)
        finally:
            os.kill(pid, signal.SIGCONT)

    def wait_for_the_stopped(is_done: Path) -> None:
        if rank == 0:
            wait_until(is_done.exists, 200)
        dist.barrier()

    scenario("stopped", stop_rank_0, wait_for_the_stopped)
    nemo_patches.apply(stall_timeout=0)
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = run_ranks(asked, 3, str(tmp_path_factory.mktemp("jobs")))
    return dict(results[1].value)


def test_a_job_that_goes_on_accuses_nobody(answers: dict[str, Any]) -> None:
    report = answers["healthy"]
    assert (report["findings"], report["world_size"], report["problems"], report["exit_code"]) == ([], 3, [], 0)
    assert "none is known to wait for another" in report["verdict"]
    assert [one["rank"] for one in report["ranks"]] == [0, 1, 2]


def test_the_rank_that_the_others_wait_for_is_named_with_its_place(answers: dict[str, Any]) -> None:
    report = answers["waits"]
    assert [(one["id"], one["ranks"]) for one in report["findings"]] == [(ids.BEFORE_ENCODER, [2])]
    assert "read_audio (tests/test_diagnose_live.py:" in report["verdict"]
    assert re.search(r"ranks 0-1: barrier, in wait_for_the_reader \(test_diagnose_live.py:\d+\)", report["verdict"])
    assert (report["world_size"], report["exit_code"]) == (3, 1)


def test_of_a_stopped_rank_another_one_tells(answers: dict[str, Any]) -> None:
    report = answers["stopped"]
    assert [(one["id"], one["ranks"]) for one in report["findings"]] == [(ids.SILENT, [0])]
    assert [problem.partition(": ")[2] for problem in report["problems"]] == ["its process is stopped"]


# What is not a job, or answers nonsense.


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_is_no_job_is_said(folders: Path) -> None:
    for name, said in {
        "missing": "is no folder",
        "a" * 5000: "is no folder",
        "\udcff": "is no folder",
        "": "no rank of",
    }.items():
        given = folders / name
        with pytest.raises(UnreadableError, match=re.escape(str(given)) + ".*" + said):
            live.diagnose_job(given)


@contextlib.contextmanager
def answering(folder: Path, name: str, answer: bytes | None) -> Iterator[None]:
    """A socket like a rank's, of this process. answer: None: it says nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        with near(folder, name) as path:
            listener.bind(path)
        listener.listen(4)
        visitors = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    visitor, _ = listener.accept()
                    visitors.append(visitor)
                    if answer is not None:
                        visitor.sendall(answer)
                        visitor.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for visitor in visitors:
                visitor.close()
            (folder / name).unlink()


GOOD = {"world_size": 1, "level": "INFO", "text": "all is well", "missing": [], "groups": []}


@pytest.mark.parametrize("answer", [None, b"", b"[", b"[]", b"{}", b"[" * 100_000, b'{"world_size": "many"}', b"\xff"])
def test_what_answers_nonsense_or_nothing_is_left_out(
    answer: bytes | None, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_ANSWER_S", 1.0)
    own = os.getpid()
    with answering(folders, f"rank_0.{own}{ENDING}", answer):
        with pytest.raises(UnreadableError, match=f"no rank of the job answers here: rank_0.{own}"):
            live.diagnose_job(folders)
        with answering(folders, f"rank_1.{own}{ENDING}", json.dumps(GOOD).encode()):
            report = live.diagnose_job(folders)
    assert report.verdict.endswith("all is well") and len(report.problems) == 1


def test_several_jobs_in_one_folder_are_named(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()
    with contextlib.ExitStack() as stack:
        jobs = [private_folder(port) for port in (1, 2)]
        for job in jobs:
            stack.enter_context(answering(job, f"rank_0.{own}{ENDING}", json.dumps(GOOD).encode()))
        monkeypatch.chdir(folders)
        with pytest.raises(UnreadableError, match=f"several jobs; give one of {jobs[0]}, {jobs[1]}"):
            live.diagnose_job(folders)
        assert live.diagnose_job(jobs[1]).verdict.endswith("all is well")


def test_the_command_takes_one_thing_to_look_at(tmp_path: Path) -> None:
    for arguments in ([], [".", "--job", str(tmp_path)], ["--job", str(tmp_path), "--watch"], ["--job", str(tmp_path)]):
        assert CliRunner().invoke(app, ["diagnose", *arguments]).exit_code == 2
