"""on_stall's command is no child of the rank: os.wait() gives the user's own children, and nothing
else.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import encoders
import pytest
import torch.distributed as dist
from ranks import (
    Given,
    Job,
    Result,
    Said,
    all_have_come,
    beside_others,
    wait_until,
)

import nemo_patches
from nemo_patches.watch import on_stall

pytestmark = pytest.mark.one_nemo
STALL_TIMEOUT = 1.0
LIMIT_S = 60.0  # for what must come
WAITS = 0  # the rank, which would run the command if it were not in os.wait()


def waits_for_a_child(rank: int, size: int, folder: str) -> tuple[bool, list[str]]:
    """Whether os.wait() gave this rank its own child, which lives until the page is there, and what
    was said of on_stall.
    """
    nemo_patches.apply(stall_timeout=0)
    said = Said()
    encoder = encoders.conformer()
    for _ in range(2):
        encoders.sync(encoder, 80)
        dist.barrier()
    wait_until(all_have_come)
    dist.barrier()
    page = Path(folder, "page")
    nemo_patches.apply(stall_timeout=STALL_TIMEOUT, on_stall=f"tee {page}")
    is_own = True
    if rank == WAITS:
        child = os.fork()
        if child == 0:
            try:
                wait_until(
                    lambda: page.exists() and page.read_text().endswith("}"), LIMIT_S
                )
            finally:
                os._exit(0)
        is_own = os.wait() == (child, 0)
    dist.barrier()
    return is_own, [line for line in said.lines if "] on_stall=" in line]


@pytest.mark.alone
@beside_others(Job(waits_for_a_child, 2, Given.FOLDER, limit=120))
def test_a_rank_in_os_wait_gets_its_own_child_and_another_rank_pages(
    results: list[Result], folder: Path
) -> None:
    assert [result.value for result in results] == [(True, [])] * 2
    assert json.loads((folder / "page").read_text())["rank"] == 1 - WAITS


def shell(program: str) -> str:
    return f"sh -c {shlex.quote(program)}"


PROGRAM = """
import logging, os, sys
from nemo_patches.watch import on_stall
from nemo_patches.sync import rank_log
rank_log.enable()
thread = on_stall.start(sys.argv[1], sys.argv[2])
sys.stdin.readline()  # it runs
try:
    print(os.wait())
except ChildProcessError:
    print("no child")
thread.join()
"""


def started(command: str, text: str, began: Path) -> tuple[str, str]:
    """What os.wait() gives while the command runs, and what is logged in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, command, text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(began.exists)
        return process.communicate("\n", 60)
    finally:
        process.kill()


def test_a_command_that_runs_is_no_child_and_its_exit_code_is_said(
    tmp_path: Path,
) -> None:
    began, got = tmp_path / "began", tmp_path / "got"
    text = "x" * 300_000  # more than a pipe takes at once
    text = json.dumps([text[:100_000]])
    command = shell(f"cat >{got}; touch {began}; sleep 1; exit 3")
    waited, said = started(command, text, began)
    assert waited == "no child\n"
    assert got.read_text() == text
    assert said.rstrip().endswith(f"on_stall={command!r} has ended with exit code 3"), (
        said
    )


@pytest.fixture
def said() -> Any:
    return Said()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("true", ""),
        (shell("exit 7"), "has ended with exit code 7"),
        (
            "no-such-program --now",
            "has failed: FileNotFoundError: 'no-such-program' is no program that can be run",
        ),
        (
            "exit 3",
            "has failed: FileNotFoundError: 'exit' is no program that can be run",
        ),
        (shell("kill -9 $$"), f"has ended with exit code {128 + signal.SIGKILL}"),
        (shell("kill -9 -$(ps -o pgid= $$ | tr -d ' ')"), "was killed"),
        (
            shell("""test "$1" = "a  'b" -a "$2" = '' || exit 1""")
            + """ sh "a  'b" '' """,
            "",
        ),
        (shell("exec <&-; exec sleep 0"), ""),
    ],
)
def test_how_a_command_ends_is_said_if_not_well(
    command: str, text: str, said: Said
) -> None:
    thread = on_stall.start(command, "report" * 100_000)
    assert thread is not None
    thread.join(60)
    lines = [line for line in said.lines if "on_stall=" in line]
    assert len(lines) == bool(text), lines
    assert all(text in line for line in lines)


DEFAULT_ACTION = """
import signal
from nemo_patches.watch import on_stall
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
on_stall.start("true", "report" * 100_000).join()
print("goes on")
"""


def test_a_command_that_reads_nothing_ends_no_process_with_sigpipes_default_action() -> (
    None
):
    done = subprocess.run(
        [sys.executable, "-c", DEFAULT_ACTION],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


def test_a_command_that_does_not_end_is_ended(
    monkeypatch: pytest.MonkeyPatch, said: Said, tmp_path: Path
) -> None:
    # Long enough for a shell to begin on a busy machine.
    monkeypatch.setattr(on_stall, "_LIMIT_S", 5.0)
    thread = on_stall.start(
        shell(f"echo $$ >{tmp_path}/pid; sleep 600; :"), "report" * 100_000
    )
    assert thread is not None
    thread.join(60)
    assert [line for line in said.lines if line.endswith("has been ended after 5 s")]
    pid = int((tmp_path / "pid").read_text())
    wait_until(
        lambda: (
            not Path(f"/proc/{pid}").exists()
            or "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
        )
    )
