"""`doctor --ranks` on real ranks: all well, ranks that differ, that are absent or tell nonsense,
and two hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts.cluster import Host, made_hosts
from interpreters import CHECKOUT, environment, run
from ranks import free_port

import nemo_patches

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]

DOCTOR = ["-m", "nemo_patches", "doctor", "--ranks"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LIMIT = 150.0  # seconds, for what takes 10

# The command on one rank, which waits for all others once torch is imported: how long that takes
# differs from rank to rank by more than NEMO_PATCHES_TIMEOUT, where the machine is busy.
TOGETHER = """
import runpy, sys
import torch.distributed, nemo_patches.tools.doctor.ranks_facts
print("imported", flush=True)
sys.stdin.readline()
sys.argv[1:] = ["doctor", "--ranks", *sys.argv[1:]]
runpy.run_module("nemo_patches", run_name="__main__", alter_sys=True)
"""


def let_go(processes: list[subprocess.Popen[str]]) -> None:
    """Wait until all of them, which run TOGETHER, have imported torch, and let them go on."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "imported\n"  # pytest-timeout bounds this
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def test_nothing_is_found_among_ranks_that_are_alike(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer: {devices: 2}\nmodel: {train_ds: {manifest_filepath: a.json,"
        " batch_size: 8}}\n"
    )
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *DOCTOR, str(config)]
    command += ["model.train_ds.batch_size=4"]
    odd = {
        "NEMO_PATCHES_TRACE": os.fsdecode("/转储".encode("gbk")),
        "NEMO_PATCHES_ON_STALL": "page \n --all",
    }
    done = run(command, environment(CHECKOUT, **odd), LIMIT)
    assert done.returncode == 0, done
    first, size, sampler, last = done.stdout.splitlines()
    assert first == "2 ranks: 2 of 2 ranks answered, on 1 host"
    assert size.endswith(" model.train_ds.batch_size: 4")
    assert sampler.endswith(", sampler: Lightning's")
    assert last == "2 ranks: nothing"


@contextlib.contextmanager
def started(
    size: int, *different: dict[str, str], port: int = 0, options: tuple[str, ...] = ()
) -> Iterator[list[subprocess.Popen[str]]]:
    """The command on the first ranks of a job of so many, each with the variables that are its own."""
    port = port or free_port()
    processes = []
    try:
        for rank, own in enumerate(different):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": size,
                "MASTER_ADDR": "localhost",
            }
            common = {
                name: str(value)
                for name, value in {**variables, "MASTER_PORT": port}.items()
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", TOGETHER, "--json", *options],
                    env={**environment(CHECKOUT), **common, **own},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        let_go(processes)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def printed(
    process: subprocess.Popen[str],
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Rank 0's exit code, its report, and what each rule found, by rule."""
    out, _ = process.communicate(timeout=LIMIT)
    (report,) = json.loads(out)
    found: dict[str, str] = {}
    for finding in report["findings"]:
        found[finding["rule"]] = found.get(finding["rule"], "") + finding["what"] + "\n"
    return process.returncode, report, found


def test_what_differs_and_who_is_absent_is_found_and_only_rank_0_has_an_exit_code(
    tmp_path: Path,
) -> None:
    (tmp_path / "nemo").mkdir()
    (tmp_path / "nemo" / "__init__.py").write_text("")
    (tmp_path / "nemo" / "package_info.py").write_text("__shortversion__ = '9.9.0'\n")
    short = {"NEMO_PATCHES_TIMEOUT": "10"}  # seconds by which two starts may part
    other = {
        **short,
        "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{tmp_path}",
        "NCCL_ALGO": "Tree",
        "NCCL_SOCKET_IFNAME": "its own affair",
        "NEMO_PATCHES_SYNC": "local",
    }
    with started(3, short, other) as (first, second):
        code, report, found = printed(first)
        out, error = second.communicate(timeout=LIMIT)
        assert (second.returncode, out, error) == (0, "", "")
    assert code == 1
    assert "9.9.0 on rank 1, " in found["NP302"]
    patching, sync, algorithm = found["NP303"].splitlines()
    assert "NeMo 9.9.0 is not" in patching
    assert patching.endswith(" on rank 1, by itself on rank 0")
    assert sync.endswith("differs: local on rank 1, bounded on rank 0")
    assert algorithm.endswith("differs: Tree on rank 1, not set on rank 0")
    assert "rank 2 of 3, " in found["NP301"]
    assert set(found) == {"NP301", "NP302", "NP303"}
    assert [rank["versions"]["nemo_patches"] for rank in report["ranks"]] == [
        nemo_patches.__version__
    ] * 2


STUCK = """
import os, sys, time
import torch.distributed as dist
server = dist.TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False)
store = dist.PrefixStore("nemo_patches/doctor", server)
print("serving", flush=True)
facts = store.get("facts/0").decode().replace('"rank":0', '"rank":1')
store.set("facts/1", facts)
store.set("facts/2", facts.replace('"rank":1', '"rank":2').replace('"host":"', '"host":"' + "x" * 300000))
store.set("facts/3", '{"rank": 3, "host": 7}')
print("told", flush=True)
time.sleep(60)
"""


def test_a_rank_that_tells_nonsense_is_as_one_without_an_answer() -> None:
    port = free_port()
    stuck = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(port)],
        env=environment(CHECKOUT),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "serving\n"  # pytest-timeout bounds this
        variables = {
            "NEMO_PATCHES_TIMEOUT": "3",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        with started(4, variables, port=port) as (first,):
            began = time.monotonic()
            code, report, found = printed(first)
            took = time.monotonic() - began
    finally:
        stuck.send_signal(signal.SIGKILL)
        out, _ = stuck.communicate()
    assert out == "told\n"
    assert code == 1
    assert "ranks 2-3 of 4, " in found["NP301"]
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert took < 2 * 3 + 5 + 20  # its limits, and its start and end on a busy machine


def test_a_store_that_stops_is_said_in_bounded_time() -> None:
    port = free_port()
    stopped = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(port)],
        env=environment(CHECKOUT),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "serving\n"  # pytest-timeout bounds this
        stopped.send_signal(signal.SIGSTOP)
        variables = {
            "NEMO_PATCHES_TIMEOUT": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        with started(2, variables, port=port) as (first,):
            out, error = first.communicate(timeout=LIMIT)
        assert (first.returncode, out) == (2, "")
        assert error.startswith("nemo-patches doctor: rank 0")
    finally:
        stopped.send_signal(signal.SIGKILL)
        stopped.communicate()


def test_a_rank_that_finds_no_rank_0_says_so_and_ends_without_an_exit_code_of_its_own() -> (
    None
):
    job = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "NEMO_PATCHES_TIMEOUT": "1",
    }
    done = run(
        [sys.executable, *DOCTOR],
        environment(CHECKOUT, **job, MASTER_PORT=str(free_port())),
        LIMIT,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "nemo-patches doctor: rank 1, " in done.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {},
            (
                "RANK is not set; it is run on every rank: torchrun ... -m nemo_patches"
                " doctor --ranks"
            ),
        ),
        ({"RANK": "x"}, "RANK='x' is not allowed"),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            "RANK=2 is not allowed with WORLD_SIZE=2; allowed: 0 to 1",
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "MASTER_PORT is not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"},
            "MASTER_ADDR is not set",
        ),
    ],
)
def test_a_place_in_a_job_that_is_none(variables: dict[str, str], said: str) -> None:
    from nemo_patches.tools.doctor.rank_place import place
    from nemo_patches.tools.doctor.refused import DoctorError

    with pytest.raises(DoctorError, match=said.replace("(", r"\(").replace(".", r"\.")):
        place(variables)


def test_slurms_variables_are_a_place() -> None:
    from nemo_patches.tools.doctor.rank_place import RankPlace, place

    slurm = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "8",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "9",
    }
    assert place(slurm) == RankPlace(3, 8, "a", 9, False)
    assert place({**slurm, "SLURM_PROCID": "0"}).has_server
    assert not place(
        {**slurm, "SLURM_PROCID": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ).has_server
    # Without an address the ranks meet where Lightning's do.
    for nodes in ("node[07-09,12],login1", "node07,node12", "node07"):
        of_job = {"SLURM_JOB_ID": "1234567", "SLURM_NODELIST": nodes}
        theirs = {**of_job, "SLURM_PROCID": "3", "SLURM_NTASKS": "8"}
        assert place(theirs) == RankPlace(3, 8, "node07", 19567, False)


def on_hosts(
    hosts: list[Host], commands: list[list[str]]
) -> list[tuple[int, str, str]]:
    """The exit code, output and errors of each command, one on each host."""
    processes = []
    try:
        for host, command in zip(hosts, commands, strict=True):
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment(CHECKOUT),
                    preexec_fn=host.move_here,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        texts = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return [
        (process.returncode, *text)
        for process, text in zip(processes, texts, strict=True)
    ]


def test_two_hosts_under_torchrun() -> None:
    where = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "10.88.0.1",
        "--master-port",
        "29500",
    ]
    commands = [
        [*TORCHRUN, *where, "--node-rank", node, *DOCTOR, "--json"]
        for node in ("0", "1")
    ]
    with made_hosts() as hosts:
        (code, out, error), (other, *_) = on_hosts(hosts, commands)
    assert (code, other) == (0, 0), error
    (report,) = json.loads(out)
    assert [rank["host"] for rank in report["ranks"]] == [host.name for host in hosts]
    assert report["findings"] == []
