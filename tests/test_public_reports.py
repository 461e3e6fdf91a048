"""Logs and stacks of the kinds that people put into public reports: who is named, and nobody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from diagnosing import check, diagnose_logs, examples

from nemo_patches.tools.diagnose.rank_facts import Condition, Evidence
from nemo_patches.tools.diagnose.sources import logs
from nemo_patches.tools.diagnose.sources.report_files import ReportedGroup

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]
LOGS = examples("public_reports")
STACKS = examples("public_stacks")


@pytest.mark.parametrize("name", LOGS)
def test_a_log(name: str, tmp_path: Path) -> None:
    check(LOGS[name], tmp_path)


@pytest.mark.parametrize("name", LOGS)
def test_the_lines_that_decide_pass_the_filter_before_the_patterns(
    name: str, tmp_path: Path
) -> None:
    """Lines are filtered by words before any pattern sees them, some at a time: far from each other
    all must pass.
    """
    padding = "\n" + "step 1 of 2, loss 0.5\n" * 2000
    [(file, text)] = LOGS[name].files.items()
    begins = (
        "[rank",
        "E0901",
        "slurmstepd",
        "srun",
        "-- Process",
        "Unhandled",
        "INFO",
        "(Ray",
        "mpirun",
        "PRTE",
        "ray.",
    )
    parts = text.splitlines(keepends=True)
    apart = "".join(
        (padding if part.startswith(begins) and not part.startswith("[rank") else "")
        + part
        for part in parts
    )
    assert logs.recognises(file, apart.encode())
    check(replace(LOGS[name], files={file: apart}, next_step="", innocent=()), tmp_path)


# A frame, a chain's error and our own line, which nothing ends, are not put together again.
NOT_JOINED = {
    "times of containers before the launcher's labels",
    "a checkpoint's exception without the other rank's traceback",
    "the worker and its file come first in what a stall line knew",
}


@pytest.mark.parametrize(
    "name", [name for name in LOGS if "JSON" not in name and name not in NOT_JOINED]
)
def test_a_log_that_a_terminal_has_wrapped_at_90_columns(
    name: str, tmp_path: Path
) -> None:
    """As `tmux` or a pasted terminal has it, in the middle of words."""
    [(file, text)] = LOGS[name].files.items()
    wrapped = "\n".join(
        line[at : at + 90]
        for line in text.split("\n")
        for at in range(0, max(len(line), 1), 90)
    )
    whole = LOGS[name]
    check(
        replace(whole, files={file: wrapped}, verdict=(), next_step="", unsaid=()),
        tmp_path,
    )


@pytest.mark.parametrize("name", STACKS)
def test_stacks(name: str, tmp_path: Path) -> None:
    check(STACKS[name], tmp_path)


def test_the_recorders_stack_with_a_prefix_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        LOGS["the recorder's stack with a prefix"].files["train.log"]
    )
    evidence = Evidence()
    logs.read([tmp_path / "train.log"], evidence)
    places = [
        one.value.where for one in evidence.facts if isinstance(one.value, Condition)
    ]
    assert "all_reduce (distributed_c10d.py:2810) < step (train.py:50)" in places


def test_a_stall_report_tells_the_worker_first() -> None:
    states = ("worker 3 (pid 81) has /data/s.tar open", "worker 4 (pid 82) computes")
    group = ReportedGroup(
        (1,),
        "elsewhere",
        "n1",
        7,
        5,
        60.0,
        "select (selectors.py:415)",
        "",
        worker_states=states,
    )
    assert (
        group.place.worker == "its data loader's worker 3 (pid 81) has /data/s.tar open"
    )
    assert group.place.details == ("its data loader's worker 4 (pid 82) computes",)


def test_a_thread_is_told_of_the_rank_that_has_it(tmp_path: Path) -> None:
    """And of no other one that stands at the same place."""
    for rank in range(3):
        watcher = 'Thread 9 (idle): "watcher"\n    poll (my_watch.py:3)\n' * (rank == 2)
        (tmp_path / f"rank{rank}.txt").write_text(
            f"Process {50 + rank}: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
            f'Thread {50 + rank} (idle): "MainThread"\n    compute (train.py:9)\n{watcher}'
        )
    evidence = diagnose_logs(sorted(tmp_path.iterdir())).findings[0].evidence
    [told] = [line for line in evidence if "watcher" in line]
    assert "rank 2" in told


@pytest.mark.parametrize("second", ("compute (train.py:9)", "update (optim.py:7)"))
def test_ranks_that_run_at_unlike_places_are_no_hang_by_one_look(
    second: str, tmp_path: Path
) -> None:
    """So a job looks that goes on; at one place they may be held up there."""
    places = (
        "all_reduce (torch/distributed/distributed_c10d.py:2501)",
        "compute (train.py:9)",
    )
    for rank, place in enumerate((*places, second)):
        (tmp_path / f"rank{rank}.txt").write_text(
            f"Process {50 + rank}: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
            f'Thread {50 + rank} (active): "MainThread"\n    {place}\n    main (train.py:80)\n'
        )
    report = diagnose_logs(sorted(tmp_path.iterdir()))
    accused = [one.ranks for one in report.findings]
    assert accused == ([(1, 2)] if second == places[1] else [])
    assert report.verdict.startswith("So far no hang") == (accused == [])
