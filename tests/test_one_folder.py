"""One folder with evidence of several kinds: what lies there is read together, and what is of
another job is not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosing import diagnosed
from simulated_traces import write
from test_flight_recorder import steps
from test_flight_recorder import write as write_dumps
from test_traces import SCENARIOS

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

KEY_ERROR = """\
[rank2]: Traceback (most recent call last):
[rank2]:   File "/job/data.py", line 41, in read
[rank2]:     raise KeyError("audio")
[rank2]: KeyError: 'audio'
"""
# py-spy's text, of a rank in a collective and of one in none.
WAITS = """\
Process {pid}: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2806)
    training_step (train.py:41)
    <module> (train.py:90)
"""
READS = """\
Process {pid}: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
    read (data.py:41)
    <module> (train.py:90)
"""


def traces_of_a_stuck_rank(folder: Path) -> Path:
    """Rank 2 of 4 does not come to a call; the ranks give no stall reports."""
    return write(
        folder, SCENARIOS["before it, no stall reports"].schedules, reports=False
    )


def test_a_log_says_why_a_rank_of_the_traces_did_not_come(tmp_path: Path) -> None:
    traces_of_a_stuck_rank(tmp_path)
    alone = diagnosed(tmp_path)
    assert (alone.findings[0].id, alone.findings[0].ranks) == ("missing-rank", (2,))
    (tmp_path / "train.log").write_text(KEY_ERROR)
    both = diagnosed(tmp_path)
    first = both.findings[0]
    assert (first.id, first.ranks) == ("exception", (2,))
    assert "KeyError: 'audio' in read (data.py:41) [train.log:4]" in first.text
    assert both.world_size == 4 and [rank.rank for rank in both.ranks] == [0, 1, 2, 3]
    assert not both.problems


def test_a_file_that_tells_nothing_changes_nothing(tmp_path: Path) -> None:
    traces_of_a_stuck_rank(tmp_path)
    before = diagnosed(tmp_path)
    (tmp_path / "notes.txt").write_text("restarted at noon\n")
    after = diagnosed(tmp_path)
    assert after.findings == before.findings


RAS = """\
Job summary
===========
  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          4            1          4        4

Communicators... (0.00s)
=============
"""


def test_what_ncclras_has_printed_of_even_ranks_changes_nothing(tmp_path: Path) -> None:
    traces_of_a_stuck_rank(tmp_path)
    before = diagnosed(tmp_path)
    (tmp_path / "ras.txt").write_text(RAS)
    after = diagnosed(tmp_path)
    assert (after.findings, after.problems) == (before.findings, before.problems)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    """As `stacks.pyz > f.json` leaves, where it fails."""
    traces_of_a_stuck_rank(tmp_path)
    (tmp_path / "node1.json").touch()
    assert diagnosed(tmp_path).problems == ("node1.json: it is empty",)


def test_dumps_name_the_rank_and_stacks_say_where_it_is(tmp_path: Path) -> None:
    done = [entry | {"state": "completed", "retired": True} for entry in steps(6)]
    write_dumps(tmp_path, {0: steps(7), 1: steps(7), 2: done, 3: steps(7)})
    (tmp_path / "stacks").mkdir()
    for rank in range(4):
        (tmp_path / "stacks" / f"rank{rank}.txt").write_text(
            (READS if rank == 2 else WAITS).format(pid=100 + rank)
        )
    content = diagnosed(tmp_path)
    first = content.findings[0]
    assert (first.id, first.ranks, content.world_size) == ("missing-rank", (2,), 4)
    assert (
        "nccl:all_reduce [1], number 7" in first.text
        and "it is in read (data.py:41)" in first.text
    )
    assert any("nccl_trace_rank_0" in line for line in first.evidence)
    assert any("rank2.txt" in line for line in first.evidence)


def test_stacks_that_contradict_dumps_take_the_accusation_away(tmp_path: Path) -> None:
    done = [entry | {"state": "completed", "retired": True} for entry in steps(6)]
    write_dumps(tmp_path, {0: steps(7), 1: steps(7), 2: done, 3: steps(7)})
    for rank in range(4):
        (tmp_path / f"rank{rank}.txt").write_text(WAITS.format(pid=100 + rank))
    content = diagnosed(tmp_path)
    assert not any(2 in one.ranks for one in content.findings)
    lines = [
        line
        for one in content.findings
        for line in one.evidence
        if line.startswith("contradiction")
    ]
    assert any("nccl_trace_rank_0" in line and "rank2.txt" in line for line in lines), (
        content
    )


def test_a_log_of_another_job_is_listed_and_not_joined(tmp_path: Path) -> None:
    traces_of_a_stuck_rank(tmp_path)
    eight = (
        "distributed_backend=nccl\nAll distributed processes registered. Starting with"
        " 8 processes\n" + KEY_ERROR
    )
    (tmp_path / "other.log").write_text(eight)
    content = diagnosed(tmp_path)
    assert (content.findings[0].id, content.findings[0].ranks) == ("missing-rank", (2,))
    assert any("of a job of 8 ranks, not of 4" in line for line in content.earlier)


def test_code_beside_a_jobs_logs_is_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(KEY_ERROR)
    for name in (
        "tests/rank0.py",
        "README.md",
        ".venv/rank0.txt",
        "lib/site-packages/rank0.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(
            READS.format(pid=100) + KEY_ERROR.replace("rank2", "rank0")
        )
    content = diagnosed(tmp_path)
    assert [(one.id, one.ranks) for one in content.findings] == [("exception", (2,))]
    (tmp_path / "rank0.md").write_text(KEY_ERROR.replace("rank2", "rank0"))
    assert diagnosed(tmp_path / "rank0.md").findings[0].ranks == (0,)


@pytest.mark.parametrize(
    "name, text, fault",
    [
        ("train.log", "", "it is empty"),
        (
            "node1.json",
            "python3: can't open file '/home/u/stacks.pyz': [Errno 2] No such file",
            "no JSON is in it, it begins \"python3: can't open file"
            " '/home/u/stacks.pyz': [Errno 2] No such file\"",
        ),
        (
            "node1.json",
            '{"host": "n3", "processes": [{"pid": 1, "sta',
            "it is cut: its JSON has no end",
        ),
        (
            "train.log",
            "[rank0]: step 1\n[rank0]:[E1128 03:12:22 ProcessGroupNCCL.cpp:632] [Rank 0]"
            " Watchdog caught collective operation timeout: WorkNC",
            "it is cut: line 2 has no end",
        ),
    ],
)
def test_what_a_command_that_failed_has_left_is_named(
    name: str, text: str, fault: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert diagnosed(tmp_path / name).problems == (f"{name}: {fault}",)


def test_a_file_that_is_whole_has_no_fault(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("[rank0]: step 1\n[rank0]: step 2")
    (tmp_path / "run.json").write_text('{"level": "info", "msg": "step 1"}\n\n')
    assert not diagnosed(tmp_path).problems
