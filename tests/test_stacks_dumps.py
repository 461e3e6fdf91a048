"""Stacks that somebody has made by hand, of a stock job that hangs: each form is read, and none
ends the reader.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import ranks as real_ranks
import stock_hangs as jobs
from test_stacks import LENGTH_SYNC, STUCK_AFTER_S, looked_at, of, waits

from nemo_patches.tools.diagnose import conditions, thread_places
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.collect.host_jobs import (
    FORMAT,
    WHAT,
    HostFile,
    jobs_here,
    look,
)
from nemo_patches.tools.diagnose.collect.samples import Frame, py_spy
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.rank_facts import (
    NOT_TOLD,
    Condition,
    Evidence,
    Fact,
    Motion,
    Place,
    ProcessRank,
)
from nemo_patches.tools.diagnose.sources.stack_files import of_samples, read, recognises
from nemo_patches.tools.diagnose.verdicts import ENDING

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]


def told_by(*files: Path) -> Evidence:
    """Of files that the reader recognises."""
    evidence = Evidence()
    for file in files:
        assert recognises(str(file), file.read_bytes()[: 1 << 16]), file
    read(list(files), evidence)
    return evidence


@pytest.fixture(scope="module")
def late_job(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, list[int], HostFile]]:
    """Its folder, its ranks' processes, and what was collected of it, once it hangs."""
    folder = tmp_path_factory.mktemp("late")
    with jobs.running(jobs.late, 3, folder, 1) as pids:
        job, facts = looked_at(pids, lambda facts: waits(facts, 0) and waits(facts, 2))
        assert waits(facts, 0)
        yield folder, pids, HostFile(WHAT, FORMAT, (job,))


def dump(pid: int, *options: str) -> str:
    command = [py_spy(), "dump", "--pid", str(pid), *options]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120
    ).stdout


def faulthandlers(folder: Path, rank: int, pid: int) -> str:
    log = folder / f"rank{rank}.log"
    before = log.stat().st_size
    os.kill(pid, signal.SIGUSR2)
    # Its outermost frame: a part of a stack is one of another process's, too
    real_ranks.wait_until(lambda: "<module>\n" in log.read_text()[before:])
    return log.read_text()[before:]


def in_forms(job: tuple[Path, list[int], HostFile], out: Path) -> dict[str, list[Path]]:
    folder, pids, host_file = job
    made: dict[str, list[Path]] = {}

    def put(form: str, name: str, text: str) -> None:
        file = out / form / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        made.setdefault(form, []).append(file)

    texts = [dump(pid) for pid in pids]
    for rank, pid in enumerate(pids):
        put("py-spy", f"rank{rank}.txt", texts[rank])
        put("py-spy json", f"{rank}.json", dump(pid, "--json"))
        put("py-spy native json", f"dump-{rank}.json", dump(pid, "--json", "--native"))
        put(
            "faulthandler",
            f"{rank}/stderr.log",
            f"step 1\n{faulthandlers(folder, rank, pid)}step 2\n",
        )
        put("no rank told", f"{'abc'[rank]}.txt", texts[rank])
    put(
        "debug server",
        "stacks.dump",
        "".join(
            f"=== Rank {rank}: node1:1 ===\n{text}" for rank, text in enumerate(texts)
        ),
    )
    lines = [
        [f"[rank{rank}]: {line}" for line in text.splitlines()]
        for rank, text in enumerate(texts)
    ]
    longest = max(map(len, lines))
    mixed = [
        of_rank[number]
        for number in range(longest)
        for of_rank in lines
        if number < len(of_rank)
    ]
    put(
        "prefixes, mixed",
        "job.log",
        "\n".join(["[rank0]: begins", *mixed, "12:30:01 ends"]),
    )
    put("own json", "node1.json", host_file.as_json())
    return made


def test_every_form_tells_the_same(
    late_job: tuple[Path, list[int], HostFile], tmp_path: Path
) -> None:
    for form, files in in_forms(late_job, tmp_path).items():
        facts = told_by(*files).facts
        for rank in (0, 2):
            assert of(facts, rank, Place).wait.startswith(LENGTH_SYNC), form
        late = of(facts, 1, Place)
        assert not late.collective, form
        assert late.where.startswith("ask_metadata_server (stock_hangs.py:"), form
        assert {fact.rank for fact in facts} == {0, 1, 2}, form
        report = judge(Evidence(facts, world_size=3), stuck_after_s=STUCK_AFTER_S)
        assert report.findings[0].id == ids.MISSING_RANK, form
        assert report.findings[0].ranks == (1,), form
        if form not in ("own json", "no rank told"):
            assert "moment" in report.verdict, form


def test_a_citation_leads_to_the_place(
    late_job: tuple[Path, list[int], HostFile], tmp_path: Path
) -> None:
    forms = in_forms(late_job, tmp_path)
    cites = {fact.rank: fact.cite for fact in told_by(*forms["py-spy"]).facts}
    assert cites[1] == "rank1.txt:4"  # after the process, its Python and an empty line
    assert {fact.cite for fact in told_by(*forms["py-spy json"]).facts} == {
        "0.json",
        "1.json",
        "2.json",
    }
    cites = {fact.rank: fact.cite for fact in told_by(*forms["faulthandler"]).facts}
    assert cites[2].startswith("2/stderr.log:")
    problems = told_by(*forms["no rank told"]).problems
    assert problems == [
        "no file name or line tells a rank: they are numbered in the order of the files"
    ]


def test_faulthandlers_stack_does_not_say_that_a_process_runs(
    late_job: tuple[Path, list[int], HostFile], tmp_path: Path
) -> None:
    forms = in_forms(late_job, tmp_path)
    assert of(told_by(*forms["faulthandler"]).facts, 1, Condition) is None
    facts = told_by(*forms["py-spy"]).facts
    assert of(facts, 1, Condition) == Condition(conditions.RUNS)
    assert of(facts, 1, ProcessRank).pid == late_job[1][1]


def test_hosts_are_read_together_and_a_second_job_apart(
    late_job: tuple[Path, list[int], HostFile], tmp_path: Path
) -> None:
    job = late_job[2].jobs[0]

    def on(host: str, job_name: str, *numbers: int) -> Path:
        some = [
            replace(one, rank=replace(one.rank, job=job_name, local_world_size=2))
            for one in job.ranks
        ]
        part = replace(job, host=host, ranks=tuple(some[number] for number in numbers))
        file = tmp_path / f"{host}.json"
        file.write_text(HostFile(WHAT, FORMAT, (part,)).as_json())
        return file

    evidence = told_by(
        on("node1", "a:1", 0, 1), on("node2", "a:1", 2), on("node3", "b:1", 1)
    )
    assert {fact.rank: fact.host for fact in evidence.facts} == {
        0: "node1",
        1: "node1",
        2: "node2",
    }
    assert evidence.world_size == 3
    assert "stacks of 2 jobs (a:1, b:1)" in evidence.problems[0]
    report = judge(
        Evidence(told_by(tmp_path / "node1.json").facts, world_size=3),
        stuck_after_s=STUCK_AFTER_S,
    )
    assert report.findings[0].ranks == (1,)


def test_two_dumps_of_a_rank_are_two_looks(
    late_job: tuple[Path, list[int], HostFile], tmp_path: Path
) -> None:
    folder, pids, _ = late_job
    first, second, third = (
        tmp_path / name for name in ("rank1.txt", "rank1.2.txt", "rank0.txt")
    )
    for file in (first, second):
        file.write_text(dump(pids[1]))
    third.write_text(
        dump(pids[0])
        + "\n"
        + dump(pids[0]).replace("update_max_seq_length", "another_function")
    )
    facts = told_by(first, second, third).facts
    assert of(facts, 1, Motion) == Motion(False)
    assert of(facts, 0, Motion) == Motion(True, "another place")
    again = (
        faulthandlers(folder, 1, pids[1])
        + "step 2\n"
        + faulthandlers(folder, 1, pids[1])
    )
    third.write_text(again)
    assert of(told_by(third).facts, 0, Motion) == Motion(False)
    # Another process of this rank, after a restart, is none of it.
    second.write_text(first.read_text().replace(f"Process {pids[1]}:", "Process 4711:"))
    assert of(told_by(first, second).facts, 1, Motion) is None


GDB = """\
Thread 2 (Thread 0x7f12 (LWP 4712) "python"):
Traceback (most recent call first):
  File "/job/data.py", line 41, in read
    return open(path).read()

Thread 1 (Thread 0x7f11 (LWP 4711) "python"):
Traceback (most recent call first):
  <built-in method wait of Work object at remote 0x7f00>
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
    work.wait()
  File "/job/train.py", line 80, in main
    encoder(batch)
"""


@pytest.mark.parametrize("folder", ["/venv", "/opt/torch/.venv", "/data/nemo/env"])
def test_gdb(folder: str, tmp_path: Path) -> None:
    """An environment in a folder that is named after a package is not that package."""
    file = tmp_path / "rank3.txt"
    text = GDB.replace("/venv", folder)
    file.write_text(text[text.index("Thread 1") :])
    assert of(told_by(file).facts, 3, Place).wait == "all_reduce of main (train.py:80)"


@pytest.mark.parametrize(
    ("torch", "is_torchs"),
    [
        ("/opt/torch/.venv/lib/python3.12/site-packages/torch", True),
        ("/usr/lib/python3/dist-packages/torch", True),
        ("/opt/pytorch/torch", True),  # its sources
        ("/tmp/site/torch", True),  # pip's --target
        ("torch", True),  # py-spy, within a folder of sys.path
        ("/home/me/torch/asr", False),
        ("/opt/torch/.venv/lib/python3.12/site-packages/asr", False),
    ],
)
def test_a_file_is_torchs_in_its_package_and_not_in_any_folder_of_that_name(
    torch: str, is_torchs: bool
) -> None:
    backward = Frame("_engine_run_backward", f"{torch}/autograd/graph.py", 869)
    assert bool(thread_places.place([backward]).collective) == is_torchs


SEGFAULT = """\
epoch 1
Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/job/data.py", line 41 in read
  File "/job/train.py", line 80 in main
Traceback (most recent call last):
  File "/job/other.py", line 1 in nothing
"""


def test_the_standard_library_is_not_the_users_own_code_on_any_distribution() -> None:
    for folder in (
        "/usr/lib/python3.11",
        "/usr/lib64/python3.12",
        "/opt/conda/lib/python3.10/site-packages/torch",
    ):
        assert thread_places.is_library(Frame("wait", f"{folder}/threading.py", 320))
    assert not thread_places.is_library(Frame("wait", "/home/me/lib64/train.py", 320))


def test_a_traceback_behind_a_stack_is_none_of_its_frames(tmp_path: Path) -> None:
    file = tmp_path / "rank0.log"
    file.write_text(SEGFAULT)
    assert of(told_by(file).facts, 0, Place).way == (
        "main (train.py:80)",
        "read (data.py:41)",
    )


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.txt", 3),
        ("rank3.2.txt", 3),
        ("r12.log", 12),
        ("3.json", 3),
        ("spy-7.txt", 7),
        ("5/stderr.log", 5),
        ("slurm-4711.out", NOT_TOLD),
        ("node12.txt", NOT_TOLD),
    ],
)
def test_the_rank_by_a_files_name(name: str, rank: int, tmp_path: Path) -> None:
    """Of one that tells none, the only stack is no rank 0's."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(GDB[GDB.index("Thread 1") :])
    assert {fact.rank for fact in told_by(file).facts} == {rank}


def test_nothing_in_a_file_ends_the_reader(
    late_job: tuple[Path, list[int], HostFile], tmp_path: Path
) -> None:
    whole = late_job[2].as_json()
    file = tmp_path / "node1.json"
    hostile = [whole[:cut] for cut in range(0, len(whole), max(1, len(whole) // 60))]
    hostile += [
        whole.replace('"rank": 1,', '"rank": -1,'),
        whole.replace('"world_size": 3', '"world_size": 1000000000').replace(
            'size": 3', 'size": 1000000000'
        ),
        whole.replace('"rank": 1,', '"rank": 99999999999999999999,'),
        whole.replace('"format": 1', '"format": 2'),
        whole.replace('"uptime_s": ', '"uptime_s": 1e999'),
        '{"what": "stacks", "format": 1, "jobs": ' + "[" * 100_000,
        "[" * 100_000,
        '[{"owns_gil": true, "frames": 1}]',
        "Thread 0x1 (idle)\n" * 10_000,
        "=== Rank 9999999: x\nProcess 1: x\nThread 1 (idle)\n    f (x.py:1)\n",
        "\0\xff" * 1000,
    ]
    for text in hostile:
        file.write_text(text, errors="replace")
        evidence = Evidence()
        read([file, tmp_path / "is_not_there"], evidence)
        assert any("is_not_there" in problem for problem in evidence.problems)
        assert len(evidence.facts) < 20
        assert all(0 <= fact.rank < 1 << 20 for fact in evidence.facts)
        judge(evidence)  # goes through all ranks: not through a billion
    file.write_text(whole[: len(whole) // 2])
    evidence = Evidence()
    read([file], evidence)
    assert "node1.json: its stacks cannot be read" in evidence.problems[0]


@contextlib.contextmanager
def scripts(folder: Path, *commands: Sequence[str]) -> Iterator[list[int]]:
    """Each a rank, as its launcher starts it; all are killed."""
    port = real_ranks.free_port()
    started = []
    try:
        for rank, command in enumerate(commands):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(commands)),
                "LOCAL_WORLD_SIZE": str(len(commands)),
            }
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with open(folder / f"rank{rank}.log", "wb") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        env={**os.environ, **variables},
                        cwd=folder,
                        stdout=log,
                        stderr=log,
                    )
                )
        yield [one.pid for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()


def test_a_script_that_has_ended_with_a_collective_pending(tmp_path: Path) -> None:
    command = (jobs.__file__, str(tmp_path))
    with scripts(tmp_path, command, command) as pids:
        real_ranks.wait_until(
            lambda: all((tmp_path / f"reached{rank}").exists() for rank in (0, 1)), 120
        )
        deadline = time.monotonic() + 90
        ending: list[Fact] = []
        while time.monotonic() < deadline and not (ending and waits(ending, 0, 0.1)):
            ranks = [one for job in jobs_here(str(tmp_path)) for one in job]
            assert [one.pid for one in ranks] == pids
            assert {one.found_by for one in ranks} == {"torchrun"}
            ending = of_samples(look(ranks, lambda _: True, between_s=0.5))
    assert of(ending, 0, Place).activity == ENDING
    report = judge(Evidence(ending, world_size=2), stuck_after_s=0.1)
    assert report.findings[0].ranks == (1,)
    assert "ask_metadata_server (stock_hangs.py:" in report.verdict
