"""Which processes of a host are ranks, what is collected of them, and what without the right to
look inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.accounts import accounts_of
from nemo_patches.tools.diagnose.collect import belongings as lying
from nemo_patches.tools.diagnose.collect import host_ranks, samples
from nemo_patches.tools.diagnose.collect.belongings import Belonging, belongings
from nemo_patches.tools.diagnose.collect.host_jobs import (
    FORMAT,
    WHAT,
    HostFile,
    HostJob,
    NothingToLookAtError,
    SampledRank,
    has_settled,
    jobs_here,
    look,
)
from nemo_patches.tools.diagnose.collect.host_ranks import HostRank
from nemo_patches.tools.diagnose.collect.proc_files import has_own_pids, pid_here
from nemo_patches.tools.diagnose.findings import MISSING_RANK, OUT_OF_MEMORY
from nemo_patches.tools.diagnose.rank_facts import (
    Condition,
    Evidence,
    Motion,
    Place,
    ProcessRank,
)
from nemo_patches.tools.diagnose.sources import stack_files as reader
from nemo_patches.tools.diagnose.verdicts import LOADER, finding

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

CHECKOUT = Path(__file__).parent.parent
IN_A_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
needs_namespaces = pytest.mark.skipif(
    os.getuid() != 0
    or shutil.which("unshare") is None
    or subprocess.run([*IN_A_CONTAINER, "true"], capture_output=True).returncode != 0,
    reason="namespaces need root",
)
needs_py_spy = pytest.mark.skipif(
    not samples.py_spy(), reason="py-spy is not installed"
)
# It starts itself with what is left of its arguments, each as the variables of one child; ends when
# its input does.
PROGRAM = """
import json, os, subprocess, sys
for variables in json.loads(sys.argv[1]):
    subprocess.Popen([sys.executable, __file__, "[]"], env={**os.environ, **variables})
print(os.getpid(), flush=True)
sys.stdin.read()
"""
TORCHRUN = {
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


@contextlib.contextmanager
def process(
    folder: Path,
    variables: Mapping[str, str],
    children: list[dict[str, str]] | None = None,
    text: str = PROGRAM,
) -> Iterator[int]:
    """A Python process with these variables that works in the folder, with its children; its
    process id.
    """
    program = folder / "program.py"
    program.write_text(text)
    own = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "HOME", "LD_LIBRARY_PATH")
    }
    started = subprocess.Popen(
        [sys.executable, str(program), json.dumps(children or [])],
        env={**own, **variables},
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert started.stdin is not None
    assert started.stdout is not None
    try:
        for _ in range(1 + len(children or [])):
            assert started.stdout.readline()
        yield started.pid
    finally:
        started.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(1 if children is None else 10)
        started.kill()
        started.wait()
        started.stdout.close()


def wait_for_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + 60
    while samples.read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def here(folder: Path) -> list[tuple[int, int, int, str, str]]:
    [ranks] = jobs_here(str(folder))
    return [
        (one.rank, one.world_size, one.local_world_size, one.job, one.found_by)
        for one in ranks
    ]


def test_torchruns_ranks_and_their_workers(tmp_path: Path) -> None:
    ranks = [{**TORCHRUN, "RANK": str(rank)} for rank in (4, 5)]
    with process(tmp_path, ranks[0], [{}]) as pid, process(tmp_path, ranks[1]):
        assert here(tmp_path) == [
            (4, 8, 2, "node1:29500", "torchrun"),
            (5, 8, 2, "node1:29500", "torchrun"),
        ]
        [found] = jobs_here(str(tmp_path))
        assert found[0].pid == pid
        assert len(found[0].workers) == 1
        assert found[1].workers == ()


def test_within_slurms_job_only_its_ranks_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    theirs = [{**slurm, "SLURM_JOB_ID": job} for job in ("990001", "990002")]
    with process(tmp_path, theirs[0]) as pid, process(tmp_path, theirs[1]) as other:
        monkeypatch.setenv("SLURM_JOB_ID", "990001")
        [[rank]] = jobs_here()
        assert rank.pid == pid
        [[rank]] = jobs_here("990002")  # --job chooses another
        assert rank.pid == other
        monkeypatch.setenv("SLURM_JOB_ID", "990003")
        with pytest.raises(NothingToLookAtError, match="Slurm's job 990003"):
            jobs_here()


@pytest.mark.parametrize(
    "agent",
    [
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "4711"},
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "pod-0",
            "MASTER_PORT": "23456",
        },
    ],
    ids=["srun torchrun", "a pod's torchrun"],
)
def test_torchruns_agent_is_no_rank_whatever_its_own_launcher_has_set(
    agent: dict[str, str], tmp_path: Path
) -> None:
    ranks = [
        {**TORCHRUN, "RANK": str(rank), "TORCHELASTIC_RUN_ID": "none"}
        for rank in (2, 3)
    ]
    with process(tmp_path, agent, ranks) as pid:
        assert here(tmp_path) == [
            (rank, 8, 2, "node1:29500", "torchrun") for rank in (2, 3)
        ]
        assert pid not in {rank.pid for rank in jobs_here(str(tmp_path))[0]}


def test_a_launcher_without_a_run_id_under_srun_is_no_rank(tmp_path: Path) -> None:
    with process(
        tmp_path,
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        [{**TORCHRUN, "RANK": "0"}],
    ):
        assert here(tmp_path) == [(0, 8, 2, "node1:29500", "torchrun")]


def test_a_rank_that_is_not_there_has_ended(tmp_path: Path) -> None:
    with process(tmp_path, {**TORCHRUN, "RANK": "5"}) as pid:
        [ranks] = jobs_here(str(tmp_path))
        facts = reader.of_samples(look(ranks, lambda _: True, between_s=0.1))
        assert [
            fact.rank
            for fact in facts
            if isinstance(fact.value, Condition) and fact.value.kind == conditions.GONE
        ] == [4]
        [ranks] = jobs_here(pids=[pid])  # who is given alone has others beside it
        facts = reader.of_samples(look(ranks, lambda _: True, between_s=0.1))
        assert {fact.rank for fact in facts} == {5}


def test_lightnings_launcher_gives_its_first_rank_no_variables(tmp_path: Path) -> None:
    child = {
        "LOCAL_RANK": "1",
        "NODE_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    with process(tmp_path, {}, [child]) as pid:
        launcher = "Lightning's launcher"
        assert here(tmp_path) == [
            (2, 4, 2, "a:1", launcher),
            (3, 4, 2, "a:1", launcher),
        ]
        assert jobs_here(str(tmp_path))[0][0].pid == pid


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (
            {
                "SLURM_PROCID": "3",
                "SLURM_NTASKS": "8",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
                "SLURM_JOB_ID": "4711",
            },
            (3, 8, 4, "4711", "Slurm"),
        ),
        (
            {
                "SLURM_PROCID": "3",
                "SLURM_NTASKS": "8",
                "SLURM_STEP_TASKS_PER_NODE": "5,3",
                "MASTER_PORT": "9",
            },
            (3, 8, 0, ":9", "Slurm"),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "1",
            },
            (1, 2, 2, "", "Open MPI"),
        ),
    ],
    ids=["slurm", "slurm, uneven nodes", "open mpi under slurm"],
)
def test_other_launchers(
    variables: dict[str, str], told: tuple[Any, ...], tmp_path: Path
) -> None:
    with process(tmp_path, variables):
        assert here(tmp_path) == [told]


def test_a_shell_may_be_between_a_rank_and_its_launcher_and_is_none(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = f"{sys.executable} {program} '[]'; true"
    variables = {**os.environ, **TORCHRUN, "RANK": "0"}
    with subprocess.Popen(
        ["sh", "-c", command], env=variables, cwd=tmp_path, stdin=-1, stdout=-1
    ) as shell:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        [[rank]] = jobs_here(str(tmp_path))
        assert rank.pid == pid != shell.pid


def test_given_processes_are_ranks_by_their_variables_or_else_by_their_order(
    tmp_path: Path,
) -> None:
    with (
        process(tmp_path, {**TORCHRUN, "RANK": "5"}) as five,
        process(tmp_path, {**TORCHRUN, "RANK": "4"}) as four,
    ):
        [ranks] = jobs_here(pids=[five, four])
        assert [(one.rank, one.pid) for one in ranks] == [(4, four), (5, five)]
    with process(tmp_path, {}) as first, process(tmp_path, {}) as second:
        [ranks] = jobs_here(pids=[second, first])
        assert ranks == [
            HostRank(0, second, 2, 2, found_by="the order of --pids"),
            HostRank(1, first, 2, 2, found_by="the order of --pids"),
        ]
        with pytest.raises(NothingToLookAtError, match=r"no rank of a job works there"):
            jobs_here(str(tmp_path))
    with pytest.raises(NothingToLookAtError, match=f"no process {first} runs"):
        jobs_here(pids=[first])


GOES_ON = """
import os, time
print(os.getpid(), flush=True)
def train():
    for i in range(6000):
        time.sleep(0.01)
train()
"""
COUNTS = """
import os, sys
def train(password, secret_number):
    for i in range(3, 9):
        step = "no number"
        print(os.getpid(), flush=True)
        sys.stdin.read()
def main():
    for i in range(2):
        pass
    train("hunter2", 123456)
main()
"""


@needs_py_spy
def test_of_a_processs_variables_only_loop_counters_leave_it(tmp_path: Path) -> None:
    with process(tmp_path, {**TORCHRUN, "RANK": "0"}, text=COUNTS) as pid:
        [ranks] = jobs_here(str(tmp_path))
        job = look(ranks, lambda _: True, between_s=0.1)
    main = job.ranks[0].samples[-1].main
    assert main is not None
    assert main.counters == {"i of train (program.py)": 3, "i of main (program.py)": 1}
    assert main.loops == {"i of train (program.py)": 4, "i of main (program.py)": 0}
    text = HostFile(WHAT, FORMAT, (job,)).as_json()
    assert "hunter2" in COUNTS
    assert "hunter2" not in text
    assert "123456" not in text
    assert job.ranks[0].rank.pid == pid


def test_what_lies_beside_a_rank(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    old, new = tmp_path / "fr_old_0", tmp_path / "fr_0"
    old.touch()
    os.utime(old, (1.0, 1.0))
    variables = {
        **TORCHRUN,
        "RANK": "0",
        "NEMO_PATCHES_TRACE": "trace",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "fr_"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "fr_old_"),
        "TMPDIR": str(tmp_path),
    }
    with process(tmp_path, variables) as pid:
        own = tmp_path / f"nemo_patches-{os.getuid()}" / "port-29500"
        own.mkdir(parents=True)
        (own / f"rank_0.{pid}.sock").touch()
        new.touch()
        found = belongings([HostRank(0, pid, 8, 2)])
    assert [one for one in found if one.kind != lying.LOG] == [
        Belonging(lying.TRACES, str(trace)),
        Belonging(lying.REPORTS, str(own)),
        Belonging(lying.FLIGHT_RECORDER, str(new)),
    ]


AT = """
import os, socket, sys
print(os.getpid(), flush=True)
if {to!r}:
    reader = socket.create_connection(("127.0.0.1", {to!r}))
    reader.recv(1)
sys.stdout.buffer.write(bytes(1 << 20))
"""


@needs_py_spy
def test_the_connection_or_the_pipe_that_a_rank_is_at(tmp_path: Path) -> None:
    def details(text: str, word: str) -> str:
        with process(tmp_path, {**TORCHRUN, "RANK": "0"}, text=text) as pid:
            deadline = time.monotonic() + 60
            while word not in samples.read(f"/proc/{pid}/wchan"):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            [ranks] = jobs_here(str(tmp_path))
            job = look(ranks, lambda _: True, between_s=0.1)
            return "; ".join(of(job, Place).details)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (
            details(AT.format(to=port), "wait") == "its system call is at a connection"
        )
    assert details(AT.format(to=0), "pipe").startswith(
        "its system call is at its standard output (pipe:["
    )


def of(job: Any, kind: type[Any]) -> Any:
    return next(
        (fact.value for fact in reader.of_samples(job) if isinstance(fact.value, kind)),
        None,
    )


@needs_py_spy
def test_a_stopped_rank_is_read_without_stopping_it_once_more(tmp_path: Path) -> None:
    with process(tmp_path, {**TORCHRUN, "RANK": "0"}) as pid:
        os.kill(pid, signal.SIGSTOP)
        wait_for_state(pid, "T")
        [ranks] = jobs_here(str(tmp_path))
        job = look(ranks, lambda _: True, between_s=0.1)
        assert of(job, Condition).kind == conditions.STOPPED
        assert "program.py" in of(job, Place).where
        assert not of(job, Motion).moved
        os.kill(pid, signal.SIGCONT)


@pytest.mark.skipif(not shutil.which("gdb"), reason="gdb is not installed")
def test_a_rank_in_a_debugger_is_left_alone(tmp_path: Path) -> None:
    with (
        process(tmp_path, {**TORCHRUN, "RANK": "0"}) as pid,
        subprocess.Popen(
            ["gdb", "-q", "-nx", "-p", str(pid)], stdin=-1, stdout=-1, stderr=-1
        ) as debugger,
    ):
        deadline = time.monotonic() + 60
        while not samples.number_in(samples.read(f"/proc/{pid}/status"), "TracerPid"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        wait_for_state(pid, "t")
        [ranks] = jobs_here(str(tmp_path))
        job = look(ranks, lambda _: True, between_s=0.1)
        assert of(job, Condition) == Condition(
            conditions.TRACED, f"traced by pid {debugger.pid} (gdb, strace)"
        )
        debugger.kill()


@needs_py_spy
@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
def test_strace_holds_nobody(tmp_path: Path) -> None:
    with (
        process(tmp_path, {**TORCHRUN, "RANK": "0"}) as pid,
        subprocess.Popen(
            ["strace", "-o", "/dev/null", "-p", str(pid)], stdin=-3, stderr=-3
        ) as tracer,
    ):
        deadline = time.monotonic() + 60
        while not samples.number_in(samples.read(f"/proc/{pid}/status"), "TracerPid"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        [ranks] = jobs_here(str(tmp_path))
        job = look(ranks, lambda _: True, between_s=0.1)
        tracer.kill()
    assert of(job, Condition) == Condition(conditions.RUNS)
    assert "program.py" in of(job, Place).where
    assert f"pid {tracer.pid} traces it (strace, gdb)" in of(job, Place).details


@pytest.fixture(scope="module")
def alone() -> Iterator[Path]:
    """stacks.pyz, in a folder that everybody may read."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    if not (CHECKOUT / "nemo_patches").exists() or not shutil.which("make"):
        pytest.skip("of the checkout")
    subprocess.run(
        [
            "make",
            "-s",
            "stacks.pyz",
            f"PYTHON={sys.executable}",
            f"PYZ={folder / 'stacks'}",
        ],
        check=True,
        cwd=CHECKOUT,
        timeout=60,
    )
    try:
        yield folder / "stacks.pyz"
    finally:
        shutil.rmtree(folder)


def run_alone(
    pyz: Path, pid: int, python: str = sys.executable, path: str = "", **more: Any
) -> Evidence:
    """What the one file tells of a process, which knows nothing of the package's other modules."""
    done = subprocess.run(
        [python, "-I", str(pyz), "--pids", str(pid)],
        env={"PATH": path, "HOME": "/nowhere"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        **more,
    )
    assert done.returncode == 0, done.stderr
    file = Path(tempfile.mkdtemp()) / "node1.json"
    try:
        file.write_text(done.stdout)
        assert reader.recognises(str(file), done.stdout[:1000].encode())
        evidence = Evidence()
        reader.read([file], evidence)
        return evidence
    finally:
        shutil.rmtree(file.parent)


@pytest.mark.installed  # beside a checkout
@needs_py_spy
def test_the_one_file_for_containers_tells_the_same(
    alone: Path, tmp_path: Path
) -> None:
    with process(tmp_path, {**TORCHRUN, "RANK": "3"}, text=GOES_ON) as pid:
        evidence = run_alone(alone, pid)
    assert not evidence.problems
    assert evidence.world_size == 8
    told = [fact.value for fact in evidence.facts]
    assert told[:2] == [ProcessRank(8, pid, has_own_pids()), Condition(conditions.RUNS)]
    assert "program.py" in told[2].where  # type: ignore[union-attr]
    assert isinstance(told[3], Motion)
    assert told[3].by.startswith("i of train (program.py) went from ")


@pytest.mark.installed  # beside a checkout
@pytest.mark.skipif(
    not os.path.exists("/usr/bin/python3"), reason="there is no second Python"
)
def test_without_py_spy_it_says_what_to_install_and_what_the_kernel_tells(
    alone: Path, tmp_path: Path
) -> None:
    if shutil.which("py-spy", path="/usr/bin:/usr/local/bin"):
        pytest.skip("py-spy is beside it")
    with process(tmp_path, {**TORCHRUN, "RANK": "0"}) as pid:
        evidence = run_alone(alone, pid, python="/usr/bin/python3")
    condition = next(
        fact.value for fact in evidence.facts if isinstance(fact.value, Condition)
    )
    assert condition.kind == conditions.UNREADABLE
    assert "pip install py-spy" in condition.text
    motion = next(
        fact.value for fact in evidence.facts if isinstance(fact.value, Motion)
    )
    assert not motion.moved  # it has slept
    assert motion.still_s is not None
    assert motion.still_s > 1.0


@pytest.mark.installed  # beside a checkout
@needs_py_spy
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
@pytest.mark.skipif(
    not os.path.exists("/usr/bin/python3"), reason="no Python that everybody may run"
)
def test_another_users_rank_says_whose_it_is_and_what_the_kernel_tells(
    alone: Path, tmp_path: Path
) -> None:
    shutil.copy(samples.py_spy(), alone.parent / "py-spy")
    with process(tmp_path, {**TORCHRUN, "RANK": "0"}) as pid:
        evidence = run_alone(
            alone,
            pid,
            python="/usr/bin/python3",
            path=str(alone.parent),
            user=65534,
            group=65534,
        )
    condition = next(
        fact.value for fact in evidence.facts if isinstance(fact.value, Condition)
    )
    assert (condition.kind, condition.text) == (
        conditions.UNREADABLE,
        "it is user 0's: run this as that user, or as root",
    )
    assert condition.details[0].startswith("state ") and condition.details[0].endswith(
        " s of CPU time"
    )
    assert any(
        isinstance(fact.value, Motion) and not fact.value.moved
        for fact in evidence.facts
    )


@needs_namespaces
def test_a_containers_pid_is_told_as_one_and_is_found_on_its_host(
    alone: Path, tmp_path: Path
) -> None:
    """Its rank is process 1 there; what looks on the host has the host's."""
    (tmp_path / "program.py").write_text(GOES_ON)
    looks = (
        f'"{sys.executable}" -I "{alone}" --pids 1 & exec "{sys.executable}" -u "$@"'
    )
    rank = subprocess.Popen(
        [*IN_A_CONTAINER, "sh", "-c", looks, "sh", str(tmp_path / "program.py")],
        env={**os.environ, **TORCHRUN, "RANK": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert rank.stdout is not None
        told = next(line for line in rank.stdout if line.startswith("{"))
        container = json.loads(told)["jobs"][0]
        (shown,) = samples.children(rank.pid)
        namespace = os.readlink(f"/proc/{shown}/ns/pid").strip("pid:[]")
        assert pid_here(1, namespace) == shown
        assert pid_here(1, "7") == 0
    finally:
        rank.kill()
        rank.wait()
    assert container["ranks"][0]["rank"]["pid"] == 1
    (tmp_path / "node1.json").write_text(told)
    evidence = Evidence()
    reader.read([tmp_path / "node1.json"], evidence)
    (account,) = accounts_of(evidence).values()
    step = finding(MISSING_RANK, "it is missing", of=account).next_step
    host = socket.gethostname()
    assert f"on {host}, in its container, with C frames" in step
    assert "--pid 1`" in step
    killed = finding(OUT_OF_MEMORY, "it was killed", of=account).next_step
    assert "container" not in killed  # no process is named


@needs_namespaces
@pytest.mark.parametrize("given", [(), ("--pids", "1"), ("--job", "/")])
def test_where_proc_hides_others_that_is_said(
    given: tuple[str, ...], alone: Path
) -> None:
    hides = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    looks = (*user, "/usr/bin/python3", "-I", str(alone), *given)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hides, "sh", *looks],
        env={"PATH": os.environ["PATH"]},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done
    told = "other users' processes are hidden here (/proc is mounted with hidepid)"
    assert f"{told}: be the job's user, or root" in done.stderr
    as_root = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hides, "sh", *looks[4:], "--job", "/no"],
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert "hidden" not in as_root.stderr
    assert "root" not in as_root.stderr


@needs_py_spy
@needs_namespaces
def test_root_that_may_not_look_inside_is_not_told_to_be_root(
    alone: Path, tmp_path: Path
) -> None:
    without = ("setpriv", "--inh-caps=-sys_ptrace", "--bounding-set=-sys_ptrace")
    with process(tmp_path, {**TORCHRUN, "RANK": "0"}) as pid:
        done = subprocess.run(
            [*without, sys.executable, "-I", str(alone), "--pids", str(pid)],
            capture_output=True,
            text=True,
        )
    [rank] = json.loads(done.stdout)["jobs"][0]["ranks"]
    told = rank["samples"][-1]["error"]
    assert "not even to root" in told
    assert "as root" not in told


def test_an_element_of_a_job_array_is_found_by_squeues_name(tmp_path: Path) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "990005"}
    element = {"SLURM_ARRAY_JOB_ID": "990004", "SLURM_ARRAY_TASK_ID": "1"}
    with process(tmp_path, {**slurm, **element}) as pid:
        [[rank]] = jobs_here("990004_1")
        assert rank.pid == pid
        with pytest.raises(NothingToLookAtError):
            jobs_here("990004_2")


def test_a_job_has_settled_where_its_ranks_slept_long_or_ran_on() -> None:
    def sample(frames: str, slept_s: float, uptime_s: float) -> samples.Sample:
        thread = samples.Thread(tid=1, frames=(samples.Frame(frames, "a.py", 1),))
        return samples.Sample(
            1, "S", uptime_s=uptime_s, slept_s=slept_s, threads=(thread,)
        )

    def job(*two: samples.Sample) -> HostJob:
        return HostJob("node1", 1.0, (SampledRank(HostRank(0, 1, 1, 1), two),))

    assert has_settled(job(sample("f", 40, 100), sample("f", 42, 102)))
    assert has_settled(job(sample("f", 1, 100), sample("g", 1, 102)))
    assert not has_settled(job(sample("f", 1, 100), sample("f", 3, 102)))


def test_python_that_has_no_launchers_variables_is_named_with_torch_loaded(
    tmp_path: Path,
) -> None:
    with process(tmp_path, {}) as pid:
        among = host_ranks.processes()
        assert among[pid].is_python
        assert pid not in host_ranks.with_torch(among)
        assert pid not in {rank.pid for rank in host_ranks.ranks(among)}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from nemo_patches.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "stacks", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


@needs_py_spy
def test_the_command_prints_what_was_collected(tmp_path: Path) -> None:
    with process(tmp_path, {**TORCHRUN, "RANK": "3"}, text=GOES_ON) as pid:
        done = command("--job", str(tmp_path))
        as_json = command("--pids", str(pid), "--json")
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert (
        first == f"job node1:29500 on {socket.gethostname()}: 1 rank, found by torchrun"
    )
    name = f"  rank 3 [{socket.gethostname()}, pid {pid}]: in train (program.py:"
    (told,) = (line for line in others if line.startswith(name))
    assert "moved: i of train (program.py) went from " in told
    # By its launcher's variables rank 2 may be here, too.
    assert "  rank 2: no process on this host: ended, or on another host" in others
    assert "no record tells" not in done.stdout
    file = tmp_path / "node1.json"
    file.write_text(as_json.stdout)
    evidence = Evidence()
    reader.read([file], evidence)
    assert {fact.rank for fact in evidence.facts} == {3}


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    done = command("--pids", "x")
    assert done.returncode == 2
    assert (
        done.stderr
        == "nemo-patches stacks: --pids=x: allowed are process ids with commas between:"
        " 4711,4712\n"
    )
    done = command("--job", str(tmp_path))
    assert done.returncode == 2
    assert "no rank of a job works there" in done.stderr


def test_the_main_thread_of_another_namespaces_process() -> None:
    """As of a container that is looked at from its host: py-spy tells the ids within."""
    main = samples.Thread("MainThread", tid=53)
    others = (samples.Thread("exchange", tid=54), samples.Thread("", tid=55))
    assert samples.Sample(4711, "S", threads=(*others, main)).main is main
    assert samples.Sample(4711, "S", threads=others[1:]).main is others[1]
    assert samples.Sample(4711, "S", threads=others).main is None


IN_LOADER = (
    samples.Frame("select", "/usr/lib/python3.11/selectors.py", 415),
    samples.Frame("poll", "/usr/lib/python3.11/multiprocessing/connection.py", 257),
    samples.Frame(
        "_try_get_data",
        "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py",
        1300,
    ),
    samples.Frame("train", "/job/train.py", 80),
)
IDLE = (
    *IN_LOADER[:2],
    samples.Frame("get", "/usr/lib/python3.11/multiprocessing/queues.py", 113),
    samples.Frame(
        "_worker_loop",
        "/v/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py",
        330,
    ),
    samples.Frame(
        "train", "/job/train.py", 80
    ),  # of its parent, which it was forked from
)
READS = (
    samples.Frame("read", "/v/lib/python3.11/site-packages/soundfile.py", 285),
    samples.Frame(
        "__getitem__",
        "/v/lib/python3.11/site-packages/nemo/collections/asr/data/audio_to_text.py",
        600,
    ),
    samples.Frame(
        "fetch", "/v/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", 54
    ),
    *IDLE[-2:],
)


@pytest.mark.parametrize(
    ("frames", "state", "told"),
    [
        ((IDLE, IDLE), "S", ""),
        (
            (IDLE, READS),
            "S",
            (
                "its worker (pid 102) is in read (soundfile.py:285) < __getitem__"
                " (audio_to_text.py:600) <"
            ),
        ),
        (
            (READS, READS),
            "S",
            "its workers (pids 101, 102) are in read (soundfile.py:285)",
        ),
        ((IDLE, IDLE), "Z", "its worker (pid 101) has died"),
        (
            (IDLE, IDLE),
            "T",
            "its workers (pids 101, 102) are in select (selectors.py:415) < poll",
        ),
    ],
    ids=["idle", "one reads, in libraries only", "both read", "dead", "stopped"],
)
def test_the_worker_that_a_rank_waits_for(frames: Any, state: str, told: str) -> None:
    workers = tuple(
        samples.Sample(
            pid, state, threads=(samples.Thread(tid=pid, frames=of_one),), slept_s=50.0
        )
        for pid, of_one in zip((101, 102), frames, strict=True)
    )
    main = samples.Thread(tid=100, frames=IN_LOADER)
    two = tuple(
        samples.Sample(100, "S", at, threads=(main,), workers=workers, slept_s=1.0)
        for at in (10.0, 12.0)
    )
    job = HostJob("node1", 1.0, (SampledRank(HostRank(0, 100, 1, 1), two),))
    place = of(job, Place)
    assert place.activity == LOADER
    assert place.worker.startswith(told)
    assert bool(place.worker) == bool(told)
    assert ("stopped (state T)" in place.worker) == (state == "T")
    # Its workers' time: it looks for dead ones every few seconds.
    assert of(job, Motion) == Motion(False, still_s=52.0)


IN_POOL = (
    samples.Frame("wait", "/usr/lib/python3.11/threading.py", 327),
    samples.Frame(
        "ApplyResult.get", "/usr/lib/python3.11/multiprocessing/pool.py", 768
    ),
    samples.Frame("decode", "/job/train.py", 80),
)
WAITS_FOR_A_TASK = (
    samples.Frame(
        "SimpleQueue.get", "/usr/lib/python3.11/multiprocessing/queues.py", 365
    ),
    samples.Frame("worker", "/usr/lib/python3.11/multiprocessing/pool.py", 114),
    samples.Frame(
        "BaseProcess._bootstrap", "/usr/lib/python3.11/multiprocessing/process.py", 314
    ),
    samples.Frame(
        "decode", "/job/train.py", 79
    ),  # of its parent, which it was forked from
)
HAS_A_TASK = (samples.Frame("decode_file", "/job/train.py", 12), *WAITS_FOR_A_TASK[1:])


@pytest.mark.parametrize(
    ("of_children", "said"),
    [
        ((WAITS_FOR_A_TASK, WAITS_FOR_A_TASK), True),
        ((WAITS_FOR_A_TASK, HAS_A_TASK), False),
        ((WAITS_FOR_A_TASK, ()), False),
        ((WAITS_FOR_A_TASK,) * samples.MOST_CHILDREN, False),
    ],
    ids=["all wait", "one works", "one is not read", "there may be more"],
)
def test_a_pool_has_lost_a_task_where_all_its_children_wait_for_one(
    of_children: Any, said: bool
) -> None:
    children = tuple(
        samples.Sample(
            200 + number,
            "S",
            threads=(samples.Thread(tid=200 + number, frames=frames),),
        )
        for number, frames in enumerate(of_children)
    )
    main = samples.Thread(tid=100, frames=IN_POOL)
    two = tuple(
        samples.Sample(100, "S", at, threads=(main,), workers=children)
        for at in (10.0, 12.0)
    )
    details = of(
        HostJob("node1", 1.0, (SampledRank(HostRank(0, 100, 1, 1), two),)), Place
    ).details
    assert ("the child that had the task was killed" in "; ".join(details)) == said


@pytest.mark.parametrize(
    ("state", "channel", "told"),
    [
        (
            "D",
            "mem_cgroup_oom_synchronize",
            "its cgroup is out of memory, and the kernel holds it until some is free",
        ),
        ("D", "__refrigerator", "its cgroup is frozen (cgroup.freeze)"),
        (
            "S",
            "do_freezer_trap",
            "in state S (do_freezer_trap): its cgroup is frozen (cgroup.freeze)",
        ),
        (
            "D",
            "rpc_wait_bit_killable",
            "(rpc_wait_bit_killable): a disk or a network file system",
        ),
        ("D", "0", "an uninterruptible system call: a disk or a network file system"),
        ("S", "futex_wait_queue", ""),
    ],
)
def test_what_the_kernel_holds_a_rank_in(state: str, channel: str, told: str) -> None:
    main = samples.Thread(tid=100, frames=READS[:1])
    two = tuple(
        samples.Sample(100, state, at, wait_channel=channel, threads=(main,))
        for at in (10.0, 12.0)
    )
    details = "; ".join(
        of(
            HostJob("node1", 1.0, (SampledRank(HostRank(0, 100, 1, 1), two),)), Place
        ).details
    )
    assert told in details
    assert bool(told) == ("in state" in details)
