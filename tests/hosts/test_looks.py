"""A job that hangs on made hosts, looked at from outside: `stacks` on each host and all together,
`diagnose` there, and what a look must not claim that may see too little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hosts.cluster import CARD, SHARED, Host, made_hosts
from hosts.job import Wanted
from hosts.running_job import SETTINGS, Job

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone, pytest.mark.hosts]

BIN = Path(sys.executable).parent
COMMAND = str(BIN / "nemo-patches")
SLEEPS, WAITS = 1, 0
HOUR_S = 3600
NOTHING, FOUND, UNKNOWN = 0, 1, 2  # exit codes
OTHER_USER = "65534"
# A user of its own that may read the installation, wherever it is.
READS = "-all,+dac_read_search"
AS_OTHER_USER = (
    *("setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"),
    *(f"--inh-caps={READS}", f"--ambient-caps={READS}", f"--bounding-set={READS}"),
)
WITHOUT_PTRACE = (*("setpriv", "--inh-caps=-sys_ptrace", "--bounding-set=-sys_ptrace"),)
WITHOUT_PY_SPY = (
    *("unshare", "--mount", "sh", "-c"),
    f'mount --bind /dev/null {BIN}/py-spy; exec "$@"',
    "sh",
)
HIDEPID = (
    *("unshare", "--mount", "sh", "-c"),
    'mount -t proc -o hidepid=2 proc /proc; exec "$@"',
    "sh",
    *AS_OTHER_USER,
)


@dataclass(frozen=True)
class Verdict:
    code: int
    accused: set[int]  # by a finding that is more than a note
    text: str


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two hosts, a rank each, by `nemo-patches run -- torchrun`; the second rank sleeps, in front of
    an encoder call.
    """
    shared = tmp_path_factory.mktemp("hung")
    shared.chmod(0o777)
    with made_hosts("ab", shared) as hosts:
        job = Job(hosts, shared, Wanted())
        agents = [torchrun(host, shared) for host in hosts]
        try:
            job.until_it_trains()
            (shared / f"fault.{SLEEPS}").write_text("sleep")
            job.until_told(WAITS, rf"WARNING .*rank {SLEEPS} \(nemo-b.*tokenize_on")
            yield job
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()


def torchrun(host: Host, shared: Path) -> subprocess.Popen[bytes]:
    job = str(Path(__file__).with_name("job.py"))
    settings = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d")
    where = ("--rdzv-endpoint", "10.88.0.1:29400", "--rdzv-id", "hung")
    command = host.command(
        *(COMMAND, "run", "--", str(BIN / "torchrun"), *settings, *where, job),
        environment={**SETTINGS, **environment(), "JOB": Wanted().as_json()},
    )
    with (shared / f"agent.{host.name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def environment() -> dict[str, str]:
    return {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "TMPDIR": "/tmp",
        "GLOO_SOCKET_IFNAME": CARD,
        "OMP_NUM_THREADS": "1",
    }


def diagnosed(host: Host, *arguments: str, prefix: tuple[str, ...] = ()) -> Verdict:
    command = (COMMAND, "diagnose", "--json", *arguments)
    done = host.run(*command, environment=environment(), prefix=prefix)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    accused = {
        rank
        for report in reports
        for finding in report.get("findings", ())
        if finding["severity"] != "note"
        for rank in finding["ranks"]
    }
    return Verdict(done.returncode, accused, f"{done.stdout}\n{done.stderr}")


def stacks(host: Host, folder: Path, prefix: tuple[str, ...] = ()) -> Any:
    done = host.run(
        COMMAND, "stacks", "--json", environment=environment(), prefix=prefix
    )
    assert done.returncode == 0, done.stderr
    folder.mkdir(exist_ok=True)
    (folder / f"{host.name}.json").write_text(done.stdout)
    return json.loads(done.stdout)


def test_stacks_of_all_hosts_name_the_rank_that_sleeps(hung: Job) -> None:
    for host in hung.hosts:
        stacks(host, hung.shared / "stacks")
    verdict = diagnosed(hung.hosts[0], str(SHARED / "stacks"))
    assert (verdict.code, verdict.accused) == (FOUND, {SLEEPS}), verdict.text
    assert "tokenize_on_the_fly" in verdict.text


def test_so_they_do_where_the_hosts_clocks_differ_by_an_hour(hung: Job) -> None:
    folder = hung.shared / "skewed"
    for host in hung.hosts:
        content = stacks(host, folder)
        if host is hung.hosts[1]:
            content["time"] += HOUR_S
            (folder / f"{host.name}.json").write_text(json.dumps(content))
    verdict = diagnosed(hung.hosts[0], str(SHARED / "skewed"))
    assert (verdict.code, verdict.accused) == (FOUND, {SLEEPS}), verdict.text


@pytest.mark.parametrize("number", [0, 1])
def test_a_look_on_one_host_accuses_nobody_who_waits(number: int, hung: Job) -> None:
    verdict = diagnosed(hung.hosts[number])
    assert verdict.code in (FOUND, UNKNOWN), verdict.text
    assert verdict.accused <= {SLEEPS}, verdict.text


@pytest.mark.parametrize("number", [0, 1])
def test_the_jobs_own_answer_is_all_ranks(number: int, hung: Job) -> None:
    verdict = diagnosed(hung.hosts[number], "--job", ".")
    assert (verdict.code, verdict.accused) == (FOUND, {SLEEPS}), verdict.text
    assert "tokenize_on_the_fly" in verdict.text


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param(WITHOUT_PY_SPY, id="no py-spy"),
        pytest.param(WITHOUT_PTRACE, id="no ptrace"),
        pytest.param(AS_OTHER_USER, id="another user"),
        pytest.param(HIDEPID, id="hidepid"),
    ],
)
def test_a_look_that_may_see_too_little_accuses_nobody_who_waits(
    prefix: tuple[str, ...], number: int, hung: Job
) -> None:
    verdict = diagnosed(hung.hosts[number], prefix=prefix)
    assert verdict.code != NOTHING, verdict.text
    assert verdict.accused <= {SLEEPS}, verdict.text


def test_ranks_own_logs_and_reports_name_it_too(hung: Job) -> None:
    logs = hung.shared / "logs"
    logs.mkdir()
    for rank in (WAITS, SLEEPS):
        (logs / f"rank{rank}.log").write_text(hung.log(rank))
    verdict = diagnosed(hung.hosts[0], str(SHARED / "logs"))
    assert (verdict.code, verdict.accused) == (FOUND, {SLEEPS}), verdict.text
