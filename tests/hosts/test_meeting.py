"""Where a rank cannot reach rank 0 by the address that rank 0 has for itself: they meet by the
store's, or it is said that the rank is patched, and why it cannot be reached; nobody is accused of
that.

The job is torch's alone. Rank 1 sleeps after some steps, so that somebody is missing.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hosts.cluster import SECOND_CARD, SHARED, Host, made_hosts
from hosts.running_job import FIRST_STEPS, SETTINGS, Job
from hosts.test_looks import JOB, environment

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone, pytest.mark.hosts]

CHECKOUT = Path(__file__).parents[2]
PORT = "29533"
SLEEPS, UNREACHED = 1, 2


@dataclass(frozen=True)
class Case:
    """addresses: by rank, its MASTER_ADDR in place of the first host's. reached: all meet."""

    addresses: Mapping[int, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    firewall: tuple[str, ...] = ()  # of the first host
    no_second_card: bool = False
    only_six: bool = False
    reached: bool = True


FROM_THE_LAST = ("-A", "INPUT", "-i", SECOND_CARD, "-s", "10.99.0.3", "-p", "tcp", "-j")
APART = {"NCCL_SOCKET_IFNAME": SECOND_CARD}  # ours; Gloo takes the host's name
CASES = {
    "localhost on the first host": Case({0: "localhost"}),
    "127.0.0.1 on the first host": Case({0: "127.0.0.1"}),
    "localhost on the first host, IPv6": Case({0: "localhost"}, only_six=True),
    "another network's name there": Case({0: "10.99.0.1"}, no_second_card=True),
    "a firewall that drops": Case(
        variables=APART, firewall=(*FROM_THE_LAST, "DROP"), reached=False
    ),
    "a firewall that rejects": Case(
        variables=APART, firewall=(*FROM_THE_LAST, "REJECT"), reached=False
    ),
}


@contextlib.contextmanager
def trained(case: Case, hosts: list[Host], shared: Path) -> Iterator[Job]:
    if case.firewall:
        hosts[0].firewall(*case.firewall)
    ranks = []
    for rank, host in enumerate(hosts):
        if case.no_second_card and rank:
            host.ip("link", "set", SECOND_CARD, "down")
        own = hosts[0].six if case.only_six else hosts[0].address
        variables = {
            **SETTINGS,
            **environment(),
            "PYTHONPATH": str(CHECKOUT),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": case.addresses.get(rank, own),
            "MASTER_PORT": PORT,
            **case.variables,
        }
        command = host.command(sys.executable, JOB, str(SHARED), environment=variables)
        ranks.append(subprocess.Popen(command))
    try:
        job = Job(hosts, shared)
        job.until_it_trains()
        yield job
    finally:
        for one in ranks:
            one.kill()
            one.wait()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_only_the_rank_that_sleeps_is_accused(case: Case, tmp_path: Path) -> None:
    if case.firewall:
        pytest.importorskip("shutil").which("iptables") or pytest.skip("no iptables")
    with (
        made_hosts("abc", tmp_path, only_six=case.only_six) as hosts,
        trained(case, hosts, tmp_path) as job,
    ):
        if not case.reached:
            job.until_told(UNREACHED, "no connection to rank 0")
        (tmp_path / f"fault.{SLEEPS}").touch()
        places = rf"WARNING .*rank {SLEEPS} \(nemo-b.*tokenize_on"
        job.until_told(0, places)
        (line, *_) = job.lines(0, places)
        if case.reached:
            assert "ranks 0, 2: DDP" in line or "not heard" not in line, line
            job.until_told(UNREACHED, places)
        else:
            words = (
                rf"rank {UNREACHED}: not heard: it is patched, and cannot be reached"
            )
            job.until_told(0, rf"{words}: nemo-c, pid \d+: no connection to rank 0")
        every = [line for rank in range(3) for line in job.lines(rank)]
        assert not [one for one in every if "not patched" in one or "MTU" in one], every
        for rank in (0, UNREACHED):
            assert job.accused(rank) <= {SLEEPS}
        assert len(job.losses(0)) >= FIRST_STEPS
