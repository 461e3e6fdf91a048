"""`diagnose --job`: a running job is asked through its ranks' sockets, without torch, and left as
it is.
"""

from __future__ import annotations

import contextlib
import io
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
from rich.console import Console
from typer.testing import CliRunner

import nemo_patches
from nemo_patches.cli import app
from nemo_patches.facts import CALLING, MOVING
from nemo_patches.judging.kinds import ELSEWHERE, GONE, LEFT, SILENT
from nemo_patches.judging.rank_groups import WAITING
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose import live, report_text
from nemo_patches.tools.diagnose.findings import Diagnosis
from nemo_patches.tools.diagnose.rank_facts import UnreadableError
from nemo_patches.watch import subscriber
from nemo_patches.watch.job_folder import private_folder
from nemo_patches.watch.job_socket import ENDING, near

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from nemo_patches.cli import main; main()"
)


def ask(folder: Path, temporary: Path) -> Any:
    """The command's JSON, from an interpreter that cannot import torch."""
    command = [
        sys.executable,
        "-c",
        WITHOUT_TORCH,
        "diagnose",
        "--job",
        str(folder),
        "--json",
    ]
    done = run(command, environment(TMPDIR=str(temporary)), limit=120)
    assert done.returncode in (0, 1, 2), done
    return json.loads(done.stdout)


def read_audio(is_done: Path) -> None:
    wait_until(is_done.exists, 200)


def asked(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Every scenario is asked about from a thread of rank 1, while its training thread waits."""
    here = Path(folder)
    os.chdir(here)
    tempfile.tempdir = str(here)
    found: dict[str, Any] = {}
    began = 0.0

    def scenario(
        name: str, question: Callable[[], None], work: Callable[[Path], None]
    ) -> None:
        nonlocal began
        began = time.monotonic()
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
    wait_until(
        lambda: subscriber.monitor() is not None and stall_monitor().exchange.is_whole
    )
    dist.barrier()
    wait_until(lambda: len(list(here.glob(f"nemo_patches-*/*/rank_*{ENDING}"))) == size)
    (job,) = here.glob("nemo_patches-*/*")

    scenario("healthy", lambda: put("healthy", here), lambda _: None)

    def wait_for_the_reader(is_done: Path) -> None:
        read_audio(is_done) if rank == 2 else dist.barrier()
        if rank == 2:
            dist.barrier()

    def when_it_stands(name: str, asked_for: Path) -> None:
        progress = stall_monitor().progress
        wait_until(
            lambda: (
                progress.stepped_at > began and progress.still_s(time.monotonic()) > 4
            ),
            60,
        )
        put(name, asked_for)

    nemo_patches.apply(timeout=4.0, stall_timeout=200.0)
    dist.barrier()
    scenario("early", lambda: when_it_stands("early", job), wait_for_the_reader)

    nemo_patches.apply(timeout=120.0, stall_timeout=6.0)
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
    assert (
        report["findings"],
        report["world_size"],
        report["problems"],
        report["exit_code"],
    ) == ([], 3, [], 0)
    assert "none is known to wait for another" in report["verdict"]
    assert [one["rank"] for one in report["ranks"]] == [0, 1, 2]


def test_a_table_of_barriers_within_the_time_that_counts_as_going_on_is_said_to_be_early(
    answers: dict[str, Any],
) -> None:
    report = answers["early"]
    assert [(one["id"], one["ranks"]) for one in report["findings"]] == [
        (ids.NOT_ENOUGH, [])
    ]
    assert re.fullmatch(
        r"Too early to tell whether the job hangs: .* Ask again in \d+ s\.",
        report["verdict"],
    )
    assert any(one["state"] == "moving: barrier" for one in report["ranks"]), report[
        "ranks"
    ]
    assert report["exit_code"] == 2


def test_the_rank_that_the_others_wait_for_is_named_with_its_place(
    answers: dict[str, Any],
) -> None:
    report = answers["waits"]
    assert [(one["id"], one["ranks"]) for one in report["findings"]] == [
        (ids.MISSING_RANK, [2])
    ]
    assert "< read_audio (tests/test_diagnose_live.py:" in report["verdict"]
    assert report["verdict"].startswith("Rank 2: it is in ")
    place = (
        r"It has not entered barrier of wait_for_the_reader"
        r" \(test_diagnose_live.py:\d+\), which ranks 0-1 have "
    )
    assert re.search(place, report["verdict"])
    assert re.search(
        r"ranks 0-1: barrier, in wait_for_the_reader \(test_diagnose_live.py:\d+\)",
        report["summary"][0],
    )
    assert (report["world_size"], report["exit_code"]) == (3, 1)


def test_of_a_stopped_rank_another_one_tells(answers: dict[str, Any]) -> None:
    report = answers["stopped"]
    assert [(one["id"], one["ranks"]) for one in report["findings"]] == [
        (ids.SILENT, [0])
    ]
    assert [problem.partition(": ")[2] for problem in report["problems"]] == [
        "its process is stopped"
    ]


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
            live.ask_job(given)


def test_a_socket_that_a_killed_process_has_left_is_not_its_successors(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process has the number of the one that made it, and works in the folder."""
    monkeypatch.chdir(folders)
    left = folders / f"nemo_patches-{os.getuid()}" / "job" / f"rank_0.{os.getpid()}.ask"
    left.parent.mkdir(parents=True)
    left.touch()
    with pytest.raises(UnreadableError, match="no rank of the job answers"):
        live.ask_job(folders)
    os.utime(left, (1e9, 1e9))
    with pytest.raises(live.NoSocketError):
        live.ask_job(folders)


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


def group(
    ranks: list[int], kind: str, idle: float = 1.0, **more: Any
) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "kind": kind,
        "host": "node1",
        "pid": 4,
        "calls": 7,
        "idle": idle,
        **PLACE,
        **more,
    }


PLACE = {"where": "", "collective": ""}
BARRIER = {
    "where": "train (train.py:80)",
    "collective": "barrier",
    "caller": "save (train.py:77)",
}
GOOD = {
    "world_size": 1,
    "level": "INFO",
    "text": "all is well",
    "groups": [group([0], CALLING)],
}


@pytest.mark.parametrize(
    "answer",
    [None, b"", b"[", b"[]", b"{}", b"[" * 100_000, b'{"world_size": "many"}', b"\xff"],
)
def test_what_answers_nonsense_or_nothing_is_left_out(
    answer: bytes | None, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_ANSWER_S", 1.0)
    own = os.getpid()
    with answering(folders, f"rank_0.{own}{ENDING}", answer):
        with pytest.raises(
            UnreadableError, match=f"no rank of the job answers here: rank_0.{own}"
        ):
            live.ask_job(folders)
        with answering(folders, f"rank_1.{own}{ENDING}", json.dumps(GOOD).encode()):
            report = live.ask_job(folders)[0]
    assert report.verdict.endswith("all is well") and len(report.problems) == 1


def told(folder: Path, level: str, *groups: dict[str, Any]) -> Diagnosis:
    """The report on a job that answers so."""
    size = sum(len(one["ranks"]) for one in groups)
    answer = json.dumps(
        {"world_size": size, "level": level, "text": "the job's line", "groups": groups}
    ).encode()
    with answering(folder, f"rank_0.{os.getpid()}{ENDING}", answer):
        return live.ask_job(folder)[0]


def test_ranks_that_called_lately_and_wait_now_are_judged_later(folders: Path) -> None:
    """They count as going on for half of stall_timeout, which the table of barriers does not look
    like.
    """
    report = told(
        folders, "INFO", group([0, 1, 2], CALLING, 12.0, goes_on_for=17.4, **BARRIER)
    )
    assert (report.findings[0].id, report.findings[0].ranks, report.exit_code) == (
        ids.NOT_ENOUGH,
        (),
        2,
    )
    assert (
        report.verdict
        == "Too early to tell whether the job hangs: the last encoder call began 12 s"
        " ago. Ask again in 18 s."
    )
    assert report.findings[0].evidence == ("ranks 0-2: calling: barrier",)
    moving = group([0, 1], MOVING, 60.0, goes_on_for=3.0, **BARRIER)
    assert told(folders, "INFO", moving).next_step == "Ask again in 3 s."
    decodes = group([0, 1], MOVING, 60.0, goes_on_for=3.0, where="decode (metric.py:9)")
    assert (
        told(folders, "INFO", decodes).findings,
        told(folders, "INFO", decodes).exit_code,
    ) == ((), 0)


def test_that_no_rank_came_to_an_encoder_call_is_said(folders: Path) -> None:
    report = told(
        folders, "INFO", group([0, 1], ELSEWHERE, 41.0, where="read (data.py:1)")
    )
    assert (report.findings[0].id, report.exit_code) == (ids.NOT_ENOUGH, 2)
    assert report.verdict.startswith(
        "No rank has come to an encoder call for 41 s, and none is known to wait"
    )


def test_a_running_job_has_the_ids_and_texts_of_every_other_source(
    folders: Path,
) -> None:
    waiting = group([0, 2], WAITING, 60.0, still=50.0, **BARRIER)
    stuck = told(
        folders,
        "WARNING",
        group([1], ELSEWHERE, 60.0, where="read (data.py:41)"),
        waiting,
    )
    assert (stuck.findings[0].id, stuck.findings[0].ranks) == (ids.MISSING_RANK, (1,))
    assert (
        stuck.verdict
        == "Rank 1: it is in read (data.py:41). It has not entered barrier of save"
        " (train.py:77), which ranks 0, 2 have waited in for 50 s."
    )
    for kind, where, id_ in (
        (SILENT, "", ids.SILENT),
        (SILENT, GONE, ids.KILLED),
        (LEFT, "", ids.ENDED),
    ):
        report = told(
            folders, "WARNING", group([1], kind, where=where, calls=0), waiting
        )
        # What is not known is no number.
        assert [one.calls for one in report.ranks] == [7, None, 7]
        printed = io.StringIO()
        report_text.show(report, Console(file=printed, width=200))
        (row,) = (
            line for line in printed.getvalue().splitlines() if re.match(r" *1 ", line)
        )
        assert row.split()[:4] == ["1", "node1", "4", "-"]
        assert [(one.id, one.ranks) for one in report.findings] == [(id_, (1,))]
    other = group(
        [1], WAITING, 60.0, still=50.0, where="score (m.py:9)", collective="all_gather"
    )
    assert [
        (one.id, one.ranks) for one in told(folders, "WARNING", other, waiting).findings
    ] == [(ids.OUT_OF_STEP, ())]
    assert (
        told(folders, "WARNING", {**waiting, "ranks": [0, 1]}).findings[0].id
        == ids.ALL_IN
    )
    saves = group([1], ELSEWHERE, 60.0, where="save (t.py:5)", activity="a checkpoint")
    assert told(folders, "INFO", saves, waiting).findings[0].severity == "warning"


def test_several_jobs_in_one_folder_are_named(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.getpid()
    with contextlib.ExitStack() as stack:
        jobs = [private_folder(port) for port in (1, 2)]
        for job in jobs:
            stack.enter_context(
                answering(job, f"rank_0.{own}{ENDING}", json.dumps(GOOD).encode())
            )
        monkeypatch.chdir(folders)
        with pytest.raises(
            UnreadableError, match=f"several jobs; give one of {jobs[0]}, {jobs[1]}"
        ):
            live.ask_job(folders)
        assert live.ask_job(jobs[1])[0].verdict.endswith("all is well")
        page = folders / "report.html"
        asked = ["diagnose", "--job", str(jobs[1]), "--html", str(page)]
        assert CliRunner().invoke(app, asked).exit_code == 0
        assert "all is well</h1>" in page.read_text()


def test_jobs_of_one_run_id_are_told_apart_by_the_stores_address(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "RUN")
    monkeypatch.setenv("MASTER_ADDR", "node-a")
    name = f"rank_0.{os.getpid()}{ENDING}"
    with contextlib.ExitStack() as stack:
        for port in (1, 2):
            there = answering(private_folder(port), name, json.dumps(GOOD).encode())
            stack.enter_context(there)
            if port == 1:  # the only one that has this name, as far as it is known
                report = live.ask_job(Path("RUN"))[0]
                assert report.verdict.endswith("all is well")
        with pytest.raises(UnreadableError, match="--job=RUN: several jobs; give one"):
            live.ask_job(Path("RUN"))


def test_the_command_takes_one_thing_to_look_at(tmp_path: Path) -> None:
    for arguments in ([".", "--job", str(tmp_path)], ["--job", str(tmp_path)]):
        assert CliRunner().invoke(app, ["diagnose", *arguments]).exit_code == 2
