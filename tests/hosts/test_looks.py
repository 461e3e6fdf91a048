"""A job that hangs on made hosts, beside a healthy one, looked at from outside: `stacks` on each host
and all together, `diagnose` there, and what a look must not claim that may see too little.

All looks are at the same two jobs, at once, in one test: they cost little, the jobs much. No kernel can set one host's clock: where the clocks differ, what
that host has written is dated an hour later.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import cluster_page
import pytest

from hosts.cluster import CARD, SHARED, Host, made_hosts
from hosts.running_job import FIRST_STEPS, SETTINGS, START_S, Job

pytestmark = [
    pytest.mark.one_nemo,
    pytest.mark.alone,
    pytest.mark.hosts,
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


@contextlib.contextmanager
def jobs(
    shared: Path, *names: str, how: str = "start with the fix", **words: str
) -> Iterator[list[Job]]:
    """On two hosts, a rank of each job on each, as the page "On a cluster" says."""
    shared.chmod(0o777)
    with made_hosts("ab", shared) as hosts:
        agents = [
            torchrun(host, name, 29400 + 100 * number, how, **words)
            for number, name in enumerate(names)
            for host in hosts
        ]
        try:
            running = [Job(hosts, shared / name) for name in names]
            for job in running:
                job.until_it_trains()
            yield running
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()


def torchrun(
    host: Host, name: str, port: int, how: str, **words: str
) -> subprocess.Popen[bytes]:
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
    return Verdict(done.returncode, accused, done.stdout or done.stderr)


def objects(text: str) -> Iterator[dict[str, Any]]:
    """Of one job on many lines, of several each on one."""
    while text := text.strip():
        content, end = json.JSONDecoder().raw_decode(text)
        yield content
        text = text[end:]


def stacks(job: Job, name: str, *arguments: str) -> Path:
    """Of each host, in a folder of this name."""
    folder = job.shared.parent / name
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


def stacks_of_all_hosts(job: Job) -> None:
    """Of the one job that is asked for; and of both, each by itself."""
    stacks(job, "stacks", "--job", HUNG)
    assert is_the_sleeping_rank(diagnosed(job.hosts[0], str(SHARED / "stacks")))
    stacks(job, "both")
    assert is_the_sleeping_rank(diagnosed(job.hosts[0], str(SHARED / "both")))


def stacks_dated_by_clocks_that_differ(job: Job) -> None:
    later = stacks(job, "skewed", "--job", HUNG) / "nemo-b.json"
    content = json.loads(later.read_text())
    for of_host in content["jobs"]:
        of_host["at"] += HOUR.total_seconds()
    later.write_text(json.dumps(content))
    assert is_the_sleeping_rank(diagnosed(job.hosts[0], str(SHARED / "skewed")))


def pids_of_containers(job: Job) -> None:
    """A made host is one: its pids and its /tmp are not those of the machine below it."""
    step = diagnosed(job.hosts[0], str(SHARED / "stacks")).text
    assert "on nemo-b, in its container, with C frames" in step, step
    for rank in (SLEEPS, WAITS):
        log = job.log(rank)
        told = "this report is in /tmp/nemo_patches-0/"
        (line,) = [one for one in log.splitlines() if told in one]
        assert "That is in this rank's container, and so are the pids" in line


def on_one_host(job: Job, number: int) -> None:
    """The job's own answer is of all ranks; without it a host knows its own ranks only."""
    host = job.hosts[number]
    assert is_the_sleeping_rank(diagnosed(host, "--job", HUNG))
    of_both = diagnosed(host)  # a hang of some seconds is none yet
    assert of_both.accused <= {SLEEPS}, of_both.text
    assert "tokenize_on_the_fly" in of_both.text
    assert not any(one["problems"] for one in objects(of_both.text)), of_both.text
    verdict = diagnosed(host, "--job", HEALTHY)
    assert (verdict.code != FOUND, verdict.accused) == (True, set()), verdict.text


def that_may_see_too_little(job: Job, number: int, prefix: tuple[str, ...]) -> None:
    verdict = diagnosed(job.hosts[number], "--job", HUNG, prefix=prefix)
    assert verdict.code != NOTHING, verdict.text
    assert verdict.accused <= {SLEEPS}, verdict.text


def logs_and_reports(job: Job, skew: timedelta) -> None:
    logs = job.shared.parent / f"logs{skew.seconds}"
    logs.mkdir()
    for rank, host in enumerate(job.hosts):
        text = job.log(rank)
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
    assert is_the_sleeping_rank(diagnosed(job.hosts[0], str(SHARED / logs.name)))


def dated(found: re.Match[str], skew: timedelta) -> str:
    form = "%Y-%m-%d %H:%M:%S,%f"
    return (datetime.strptime(found[0], form) + skew).strftime(form)[:-3]


MAY_NOT = {
    "no py-spy": WITHOUT_PY_SPY,
    "no ptrace": WITHOUT_PTRACE,
    "another user": AS_OTHER_USER,
    "hidepid": HIDEPID,
}
# Those of one row one after the other: a process that is traced cannot be traced once more.
ROWS: list[dict[str, Callable[[Job], None]]] = [
    {
        f"on host {number}": partial(on_one_host, number=number),
        **{
            f"{name}, host {number}": partial(
                that_may_see_too_little, number=number, prefix=prefix
            )
            for name, prefix in MAY_NOT.items()
        },
    }
    for number in (0, 1)
]
ON_BOTH: dict[str, Callable[[Job], None]] = {
    "stacks of all hosts": stacks_of_all_hosts,
    "pids of containers": pids_of_containers,
    "clocks that differ by an hour": stacks_dated_by_clocks_that_differ,
    "logs and reports": partial(logs_and_reports, skew=timedelta(0)),
    "logs and reports, clocks that differ": partial(logs_and_reports, skew=HOUR),
}


def failures(looks: dict[str, Callable[[Job], None]], job: Job) -> str:
    found = ""
    for name, look in looks.items():
        try:
            look(job)
        except Exception:
            found += f"=== {name}\n{traceback.format_exc()}"
    return found


def test_no_look_accuses_a_rank_that_waits_and_whole_ones_name_the_one_that_sleeps(
    tmp_path: Path,
) -> None:
    with jobs(tmp_path, HUNG, HEALTHY) as (hung, _):
        (hung.shared / f"fault.{SLEEPS}").touch()
        hung.until_told(WAITS, rf"WARNING .*rank {SLEEPS} \(nemo-b.*tokenize_on")
        with ThreadPoolExecutor(len(ROWS)) as pool:
            failed = "".join(pool.map(partial(failures, job=hung), ROWS))
        failed += failures(ON_BOTH, hung)
    assert not failed, failed


def test_the_pages_job_begins_again_by_itself_after_a_stall(tmp_path: Path) -> None:
    words = {"600": "8"}
    with jobs(tmp_path, "again", how="restart by itself", **words) as (job,):
        (job.shared / f"fault.{SLEEPS}").touch()
        job.until(
            lambda: [job.starts(rank) for rank in (0, 1)] == [2, 2],
            START_S,
            "restarted",
        )
        job.until_it_trains(len(job.losses(WAITS)) + FIRST_STEPS)
        job.until_told(WAITS, "this process ends with exit code 83")
