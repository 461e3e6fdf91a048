"""A job that hangs on made hosts, beside a healthy one, looked at from outside: `stacks` on each host
and all together, `diagnose` there, and what a look must not claim that may see too little.

All looks are at the same two jobs. No kernel can set one host's clock: where the clocks differ, what
that host has written is dated an hour later.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import cluster_page
import pytest

from hosts.cluster import CARD, SHARED, Host, made_hosts
from hosts.running_job import SETTINGS, START_S, Job

pytestmark = [
    pytest.mark.one_nemo,
    pytest.mark.alone,
    pytest.mark.hosts,
    pytest.mark.xdist_group("looks"),
]

BIN = Path(sys.executable).parent
COMMAND = str(BIN / "nemo-patches")
JOB = str(Path(__file__).with_name("plain_job.py"))
SLEEPS, WAITS = 1, 0
HUNG, HEALTHY = "hung", "healthy"  # their names, and folders
HOUR = timedelta(hours=1)
NOTHING, FOUND, UNKNOWN = 0, 1, 2  # exit codes
OTHER_USER = "65534"
# A user of its own that may read the installation, wherever it is.
READS = "-all,+dac_read_search"
AS_OTHER_USER = (
    *("setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"),
    *(f"--inh-caps={READS}", f"--ambient-caps={READS}", f"--bounding-set={READS}"),
)
WITHOUT_PTRACE = ("setpriv", "--inh-caps=-sys_ptrace", "--bounding-set=-sys_ptrace")
IN_A_SHELL = ("unshare", "--mount", "sh", "-c")
WITHOUT_PY_SPY = (
    *IN_A_SHELL,
    f'mount --bind /dev/null {BIN}/py-spy; exec "$@"',
    "sh",
)
HIDEPID = (
    *IN_A_SHELL,
    'mount -t proc -o hidepid=2 proc /proc; exec "$@"',
    "sh",
    *AS_OTHER_USER,
)


@dataclass(frozen=True)
class Verdict:
    """accused: by a finding that is more than a note."""

    code: int
    accused: set[int]
    text: str


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two hosts, a rank of each job on each, by `nemo-patches run -- torchrun`; the second rank of one
    job sleeps.
    """
    shared = tmp_path_factory.mktemp("looks")
    shared.chmod(0o777)
    with made_hosts("ab", shared) as hosts:
        agents = [
            torchrun(host, name, port)
            for name, port in ((HUNG, 29400), (HEALTHY, 29500))
            for host in hosts
        ]
        job = Job(hosts, shared / HUNG)
        try:
            for name in (HUNG, HEALTHY):
                Job(hosts, shared / name).until_it_trains()
            (shared / HUNG / f"fault.{SLEEPS}").touch()
            job.until_told(WAITS, rf"WARNING .*rank {SLEEPS} \(nemo-b.*tokenize_on")
            yield job
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()


def torchrun(
    host: Host, name: str, port: int, how: str = "start with the fix", **words: str
) -> subprocess.Popen[bytes]:
    """As the page "On a cluster" says."""
    folder = Path(f"/proc/{host.pid}/root") / SHARED.relative_to("/") / name
    folder.mkdir(exist_ok=True)
    here = {"HOST0": "nemo-a", "29400": str(port), "RUN": name, "8": "1"}
    script = {"train.py": f"{JOB} {SHARED / name}"}
    line = cluster_page.command("torchrun", how)
    command = host.command(
        *("sh", "-c", cluster_page.with_words(line, **here, **script, **words)),
        environment={**SETTINGS, **environment(), "GLOO_SOCKET_IFNAME": CARD},
        folder=SHARED / name,
    )
    with (folder / f"agent.{host.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def environment() -> dict[str, str]:
    return {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "TMPDIR": "/tmp",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def shared(job: Job) -> Path:
    return job.shared.parent


def diagnosed(host: Host, *arguments: str, prefix: tuple[str, ...] = ()) -> Verdict:
    command = (COMMAND, "diagnose", "--json", *arguments)
    done = host.run(*command, environment=environment(), prefix=prefix)
    accused = {
        rank
        for report in objects(done.stdout)
        for finding in report.get("findings", ())
        if finding["severity"] != "note"
        for rank in finding["ranks"]
    }
    return Verdict(done.returncode, accused, f"{done.stdout}\n{done.stderr}")


def objects(text: str) -> Iterator[dict[str, Any]]:
    """Of one job on many lines, of several each on one."""
    while text := text.strip():
        content, end = json.JSONDecoder().raw_decode(text)
        yield content
        text = text[end:]


def stacks(job: Job, name: str, *arguments: str) -> Path:
    """Of each host, in a folder of this name."""
    folder = shared(job) / name
    folder.mkdir()
    command = (COMMAND, "stacks", "--json", *arguments)
    for host in job.hosts:
        done = host.run(*command, environment=environment())
        assert done.returncode == 0, done.stderr
        (folder / f"{host.name}.json").write_text(done.stdout)
    return folder


def is_the_sleeping_rank(verdict: Verdict) -> bool:
    assert (verdict.code, verdict.accused) == (FOUND, {SLEEPS}), verdict.text
    return "tokenize_on_the_fly" in verdict.text


def test_stacks_of_all_hosts_name_the_rank_that_sleeps(hung: Job) -> None:
    """Of the one job that is asked for; and of both, each by itself."""
    stacks(hung, "stacks", "--job", HUNG)
    assert is_the_sleeping_rank(diagnosed(hung.hosts[0], str(SHARED / "stacks")))
    stacks(hung, "both")
    verdict = diagnosed(hung.hosts[0], str(SHARED / "both"))
    assert is_the_sleeping_rank(verdict)


def test_so_they_do_where_the_hosts_clocks_differ_by_an_hour(hung: Job) -> None:
    later = stacks(hung, "skewed", "--job", HUNG) / "nemo-b.json"
    content = json.loads(later.read_text())
    content["time"] += HOUR.total_seconds()
    later.write_text(json.dumps(content))
    assert is_the_sleeping_rank(diagnosed(hung.hosts[0], str(SHARED / "skewed")))


@pytest.mark.parametrize("number", [0, 1])
def test_the_jobs_own_answer_is_of_all_ranks(number: int, hung: Job) -> None:
    """Of a job that is chosen; without its answer a host knows its own ranks only."""
    host = hung.hosts[number]
    assert is_the_sleeping_rank(diagnosed(host, "--job", HUNG))
    of_both = diagnosed(host)
    assert of_both.code in (FOUND, UNKNOWN), of_both.text
    assert of_both.accused <= {SLEEPS}, of_both.text
    verdict = diagnosed(host, "--job", HEALTHY)
    assert (verdict.code != FOUND, verdict.accused) == (True, set()), verdict.text


LOOKS = {
    "no py-spy": WITHOUT_PY_SPY,
    "no ptrace": WITHOUT_PTRACE,
    "another user": AS_OTHER_USER,
    "hidepid": HIDEPID,
}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("prefix", LOOKS.values(), ids=LOOKS)
def test_a_look_that_may_see_too_little_accuses_nobody_who_waits(
    prefix: tuple[str, ...], number: int, hung: Job
) -> None:
    verdict = diagnosed(hung.hosts[number], "--job", HUNG, prefix=prefix)
    assert verdict.code != NOTHING, verdict.text
    assert verdict.accused <= {SLEEPS}, verdict.text


@pytest.mark.parametrize("skew", [timedelta(0), HOUR], ids=["", "skewed"])
def test_the_ranks_logs_and_reports_name_it_too(hung: Job, skew: timedelta) -> None:
    logs = shared(hung) / f"logs{skew.seconds}"
    logs.mkdir()
    for rank, host in enumerate(hung.hosts):
        text = hung.log(rank)
        reports = Path(f"/proc/{host.pid}/root/tmp")
        for report in reports.glob(f"nemo_patches-*/{HUNG}*/stall_rank_*.json"):
            shutil.copy(report, logs)
        if rank == SLEEPS:
            text = re.sub(r"(?m)^\d{4}-\d\d-\d\d \S+", lambda at: dated(at, skew), text)
            for report in logs.glob(f"stall_rank_{rank}.json"):
                content: dict[str, Any] = json.loads(report.read_text())
                content["time"] += skew.total_seconds()
                report.write_text(json.dumps(content))
        (logs / f"rank{rank}.log").write_text(text)
    assert list(logs.glob("stall_rank_*.json"))
    verdict = diagnosed(hung.hosts[0], str(SHARED / logs.name))
    assert is_the_sleeping_rank(verdict)


def dated(found: re.Match[str], skew: timedelta) -> str:
    form = "%Y-%m-%d %H:%M:%S,%f"
    return (datetime.strptime(found[0], form) + skew).strftime(form)[:-3]


def test_the_pages_job_begins_again_by_itself_after_a_stall(hung: Job) -> None:
    job = Job(hung.hosts, shared(hung) / "again")
    how = "restart by itself"
    agents = [
        torchrun(host, "again", 29600, how, **{"600": "8"}) for host in hung.hosts
    ]
    try:
        job.until_it_trains()
        (job.shared / f"fault.{SLEEPS}").touch()
        job.until(
            lambda: [job.starts(rank) for rank in (0, 1)] == [2, 2],
            START_S,
            "restarted",
        )
        job.until_it_trains(2 * len(job.losses(WAITS)))
        job.until_told(WAITS, "this process ends with exit code 83")
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
