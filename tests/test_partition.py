"""A network that is cut between two hosts: each side names the ranks on the other, without waiting
for the network.

The cable between the two hosts is cut by giving each the wrong hardware address of the other:
packets leave, and are dropped on arrival, as where a switch has failed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import encoders
import pytest
import torch.distributed as dist
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

STALL_TIMEOUT = 4.0
TIMEOUT = 2.0  # ranks 0 and 1 are on the first host, rank 2 on the second


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with made_hosts() as made:
        yield made


def cut(hosts: list[Host]) -> None:
    wrong = ("lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", CARD)
    for host, other in (hosts, reversed(hosts)):
        host.ip("neigh", "replace", other.address, *wrong)


def parted(rank: int, size: int, port: int, folder: str, hosts: list[Host]) -> None:
    """It leaves what it has found in a file: over a network that is cut, torch waits for minutes."""
    hosts[rank // 2].move_here()
    os.environ["GLOO_SOCKET_IFNAME"] = CARD
    join_group(rank, size, port, host=hosts[0].address)
    encoder = in_step(timeout=TIMEOUT)
    meet(folder, "before", rank, size)
    if rank == 0:
        cut(hosts)
    meet(folder, "after", rank, size)
    began = time.monotonic()
    call = encoders.sync(encoder, 200 + rank)
    wait_until(lambda: nemo_patches.status().stalls)
    report = time.monotonic() - began
    (stall,) = nemo_patches.status().stalls
    meet(folder, "said", rank, size)
    missing = [(one.rank, one.kind, one.host) for one in stall.missing]
    found = json.dumps((call, report, missing, stall.unknown))
    Path(folder, f"found-{rank}").write_text(found)
    said = Said()
    nemo_patches.apply(timeout=TIMEOUT, stall_timeout=STALL_TIMEOUT)

    def end_once_it_is_said() -> None:
        wait_until(lambda: any("no encoder call" in line for line in said.lines))
        meet(folder, "told", rank, size)
        os._exit(0)

    threading.Thread(target=end_once_it_is_said).start()
    dist.monitored_barrier(timeout=timedelta(seconds=90))  # in vain


def meet(folder: str, event: str, rank: int, size: int) -> None:
    """Over the file system, which the hosts share."""
    Path(folder, f"{event}-{rank}").touch()
    wait_until(
        lambda: all(Path(folder, f"{event}-{one}").exists() for one in range(size)), 180
    )


def test_each_side_of_a_cut_network_names_the_ranks_on_the_other(
    hosts: list[Host], tmp_path: Path
) -> None:
    given = (free_port(), str(tmp_path), hosts)
    results = run_ranks(parted, 3, *given, group=False, dies=(0, 1, 2))
    assert [result.exit_code for result in results] == [0, 0, 0]
    found = [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(3)]
    for call, report, _, _ in found:
        assert call < TIMEOUT + SLACK_S
        assert report < TIMEOUT + REPORT_S
    # With the store
    for result, (_, _, missing, unknown) in zip(results[:2], found[:2], strict=True):
        assert missing == [[2, "no heartbeat", "nemo-b"]]
        assert unknown == ""
        assert result.lines(
            "Missing: rank 2 of 3 | all ranks of nemo-b (2): its connection was lost:"
        )
    _, _, missing, unknown = found[2]
    assert missing == [[0, "no heartbeat", "nemo-a"], [1, "no heartbeat", "nemo-a"]]
    assert unknown == ""
    of_a = "all ranks of nemo-a (0-1): their connections were lost:"
    assert results[2].lines(
        "not every rank's length came", f"Missing: ranks 0-1 of 3 | {of_a}"
    )
    of_b = "all ranks of nemo-b (2): its connection was lost:"
    for result, apart in zip(results, (of_b, of_b, of_a), strict=True):
        # Before, who has only just begun it goes on.
        (line, *_) = result.lines("WARNING", "no encoder call for ")
        groups = line.partition(" s. ")[2].split(" | ")
        assert groups[0] == f"{apart} the host or the network"
        assert ": monitored_barrier, in parted (test_partition.py:" in groups[1]


def vanishing(rank: int, size: int, port: int, folder: str, hosts: list[Host]) -> Any:
    """The store's host vanishes, with rank 0: rank 1 is elsewhere, rank 2 waits."""
    hosts[min(rank, 1)].move_here()
    os.environ["GLOO_SOCKET_IFNAME"] = CARD
    join_group(rank, size, port, host=hosts[0].address)
    encoder = in_step(timeout=TIMEOUT)
    said = Said()
    meet(folder, "before", rank, size)
    if rank == 0:
        cut(hosts)
    meet(folder, "after", rank, size)
    if rank < 2:
        nemo_patches.apply(timeout=TIMEOUT, stall_timeout=STALL_TIMEOUT)
        meet(folder, "told", rank, size)
        return None
    began = time.monotonic()
    encoders.sync(encoder, 200 + rank)
    wait_until(lambda: nemo_patches.status().stalls)
    (stall,) = nemo_patches.status().stalls
    report = time.monotonic() - began
    nemo_patches.apply(timeout=TIMEOUT, stall_timeout=STALL_TIMEOUT)
    wait_until(lambda: any("no encoder call" in line for line in said.lines))
    meet(folder, "told", rank, size)
    return report, [(one.rank, one.kind) for one in stall.missing], stall.unknown


def test_a_store_whose_host_has_vanished_holds_up_no_report(
    hosts: list[Host], tmp_path: Path
) -> None:
    results = run_ranks(vanishing, 3, free_port(), str(tmp_path), hosts, group=False)
    report, missing, unknown = results[2].value
    assert report < TIMEOUT + REPORT_S
    assert missing == [(0, "no heartbeat"), (1, "elsewhere")]
    assert unknown == ""
    of_a = "all ranks of nemo-a (0): its connection was lost:"
    assert results[2].lines(
        "not every rank's length came", f"Missing: ranks 0-1 of 3 | {of_a}"
    )
    (line, *_) = results[2].lines("no encoder call for ")
    assert f". {of_a} the host or the network | " in line
    assert "rank 1 (nemo-b, pid " in line and "meet (" in line
