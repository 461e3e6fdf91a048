"""A host that is gone, and a rank that was killed: named by what shows it, and no living rank with
them.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import encoders
import pytest
from forked_programs import Server, forking
from hosts.cluster import CARD, Host, made_hosts
from ranks import (
    REPORT_S,
    SLACK_S,
    Said,
    free_port,
    in_step,
    join_group,
    run_ranks,
    wait_until,
)

import nemo_patches

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]

TIMEOUT = 2.0
STALL_TIMEOUT = 4.0
LOST_S = 26  # by then the kernel has given up the connections
HOST_OF = (0, 0, 1, 2)  # by rank
LIMIT_S = 200


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with made_hosts("abc") as made:
        yield made


def meet(folder: str, event: str, rank: int, ranks: range) -> None:
    """Over the file system, which the hosts share."""
    Path(folder, f"{event}-{rank}").touch()
    wait_until(
        lambda: all(Path(folder, f"{event}-{one}").exists() for one in ranks), 180
    )


def loses_power(rank: int, size: int, port: int, folder: str, hosts: list[Host]) -> Any:
    """The host of ranks 0 and 1, with the job's store, is gone; ranks 2 and 3 are on hosts of their
    own.
    """
    hosts[HOST_OF[rank]].move_here()
    os.environ["GLOO_SOCKET_IFNAME"] = CARD
    join_group(rank, size, port, host=hosts[0].address)
    encoder = in_step(timeout=TIMEOUT)
    meet(folder, "before", rank, range(size))
    if rank < 2:
        if rank == 0:
            hosts[0].ip("link", "set", CARD, "down")
            Path(folder, "unplugged").touch()
        wait_until(Path(folder, "unplugged").exists)
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(Path(folder, "unplugged").exists)
    began = time.monotonic()
    call = encoders.sync(encoder, 200 + rank)
    wait_until(lambda: nemo_patches.status().stalls)
    report = time.monotonic() - began
    (stall,) = nemo_patches.status().stalls
    said = Said()
    nemo_patches.apply(timeout=TIMEOUT, stall_timeout=STALL_TIMEOUT)

    def idle_s() -> list[int]:
        return [
            int(seconds)
            for line in said.lines
            for seconds in re.findall(r"no encoder call for (\d+) s", line)
        ]

    wait_until(lambda: max(idle_s(), default=0) >= LOST_S, 120)
    meet(folder, "told", rank, range(2, size))
    return (
        call,
        report,
        [(one.rank, one.kind, one.host) for one in stall.missing],
        stall.unknown,
    )


def test_a_host_without_power_is_named_and_no_living_rank_with_it(
    hosts: list[Host], tmp_path: Path
) -> None:
    results = run_ranks(
        loses_power, 4, free_port(), str(tmp_path), hosts, group=False, dies=(0, 1)
    )
    of_a = (
        r"all ranks of nemo-a \(0-1\): their connections were lost:"
        r" the host or the network"
    )
    for result in results[2:]:
        call, report, missing, unknown = result.value
        assert call < TIMEOUT + SLACK_S
        assert report < TIMEOUT + REPORT_S
        assert missing == [(0, "no heartbeat", "nemo-a"), (1, "no heartbeat", "nemo-a")]
        assert unknown == ""
        # It is said once more after 60 s, which a busy machine may take to come here.
        line, *again = result.lines("not every rank's length came within")
        assert re.search(rf"Missing: ranks 0-1 of 4 \| {of_a}$", line), line
        assert all("Missing: ranks 0-1 of 4" in one for one in again), again
        for line in result.lines("no encoder call for "):
            told = line.partition(" s. ")[2].split(" | ")
            # While ranks 2 and 3 are in unlike lines of this file, each is told by itself.
            others = [one for one in told if not re.fullmatch(of_a, one)]
            assert len(others) == len(told) - 1, line
            assert all(re.match(r"ranks? [23]", one) for one in others), line


PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from hosts.cluster import Host
rank, killed, store, host, first_process = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
Host(host, int(first_process), "").move_here()
os.environ.update(RANK=str(rank), WORLD_SIZE="3", GLOO_SOCKET_IFNAME="eth0")
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3)
from nemo_patches.watch import subscriber

subscriber.subscribe()
while not (subscriber.monitor() and subscriber.monitor().exchange.is_whole):
    time.sleep(0.01)
for step in range(100):
    dist.all_reduce(torch.ones(1))
    if step == 50 and rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with forking(LIMIT_S) as server:
        yield server


@pytest.mark.parametrize("killed", [1, 0])
def test_a_killed_rank_is_named_before_the_error_that_follows_ends_the_others(
    killed: int, hosts: list[Host], server: Server, tmp_path: Path
) -> None:
    store = f"tcp://{hosts[0].address}:{free_port()}"
    arguments = (
        [str(rank), str(killed), store, host.name, str(host.pid)]
        for rank, host in enumerate(hosts)
    )
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    ranks = server.run(path + PROGRAM, tmp_path, *arguments)
    assert ranks[killed].code == -signal.SIGKILL
    for rank in {0, 1, 2} - {killed}:
        stderr = ranks[rank].error
        assert ranks[rank].code == 1, stderr  # Gloo's error
        (line,) = [
            line for line in stderr.splitlines() if " nemo_patches WARNING " in line
        ]
        who = re.escape(
            f"rank {killed} of 3 | rank {killed} ({hosts[killed].name}, pid"
            f" {ranks[killed].pid})"
        )
        assert re.search(rf"this job: gone: {who}: its process has gone$", line), line
