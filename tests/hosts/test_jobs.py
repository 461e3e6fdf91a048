"""Jobs on made hosts that go on: healthy ones, restarts, smaller worlds, networks that heal."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts.cluster import CARD, SECOND_CARD, made_hosts, skip_unless_allowed
from hosts.job import Wanted
from hosts.running_job import SAYS_S, SETTINGS, START_S, Job, started

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]

STEPS = 12
HEALTHY = dict.fromkeys(SETTINGS, "120")  # seconds: none waits in vain
OUTAGE_S = 30


@contextlib.contextmanager
def job(
    folder: Path, hosts: str = "ab", made: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Job]:
    """On hosts of its own."""
    folder.mkdir(exist_ok=True)
    there = made_hosts(hosts, folder, **(made or {}))
    with there as each, started(Job(each, folder, **settings)) as running:
        yield running


def all_losses(running: Job) -> list[list[str]]:
    return [running.losses(rank) for rank in range(running.size)]


def reported(running: Job, rank: int) -> set[int]:
    """Whom its stall reports have called missing."""
    return {one for report in running.reports(rank) for one in report.missing}


def said(running: Job) -> list[str]:
    return [line for rank in range(running.size) for line in running.warnings(rank)]


def test_a_healthy_job_has_the_losses_of_stock_and_says_nothing(tmp_path: Path) -> None:
    want = Wanted(per_host=2, steps=STEPS)
    with job(tmp_path / "stock", want=want, NEMO_PATCHES_DISABLE="1") as stock:
        assert stock.codes(START_S) == [0, 0], stock.told()
        assert said(stock) == []
    with job(tmp_path / "patched", want=want, **HEALTHY) as patched:
        assert patched.codes(START_S) == [0, 0], patched.told()
        assert said(patched) == []
        assert patched.lines(0, "patched on all 4 ranks")
    assert all_losses(patched) == all_losses(stock)
    assert [len(losses) for losses in all_losses(patched)] == [STEPS] * 4


def until_all_train_on(running: Job, steps: list[int]) -> None:
    """Until each rank has some steps more than these."""
    running.until(
        lambda: all(
            len(now) > then + STEPS
            for now, then in zip(all_losses(running), steps, strict=True)
        ),
        START_S,
        "training again",
    )


def until_it_has_begun_again(running: Job) -> None:
    running.until(
        lambda: all(running.starts(rank) == 2 for rank in (0, 1)), START_S, "restarted"
    )
    until_all_train_on(running, [len(losses) for losses in all_losses(running)])


@pytest.mark.hosts
@pytest.mark.parametrize("killed", [1, 0])
def test_a_killed_rank_is_named_before_the_error_that_follows(
    killed: int, tmp_path: Path
) -> None:
    with job(tmp_path, "abc") as running:
        running.until_it_trains()
        running.signal(killed, "KILL")
        for rank in {0, 1, 2} - {killed}:
            running.until_told(rank, rf"gone: rank {killed} of 3 .* process has gone")
            assert running.accused(rank) == {killed}


@pytest.mark.hosts
def test_a_killed_rank_is_started_again_with_all_others(tmp_path: Path) -> None:
    with job(tmp_path, restarts=1) as running:
        running.until_it_trains()
        running.signal(1, "KILL")
        until_it_has_begun_again(running)
        running.until(
            lambda: len(running.lines(0, "patched on all 2 ranks")) == 2,
            SAYS_S,
            "patched on all ranks, twice",
        )
        for rank in range(2):
            assert running.accused(rank) <= {1}


@pytest.mark.hosts
def test_stall_exit_ends_all_ranks_and_the_job_begins_again(tmp_path: Path) -> None:
    with job(tmp_path, restarts=1, NEMO_PATCHES_STALL_EXIT="8") as running:
        running.until_it_trains()
        (tmp_path / "fault.1").write_text("sleep")
        for rank in (0, 1):
            running.until_told(rank, "this process ends with exit code 83")
        until_it_has_begun_again(running)
        for rank in range(2):  # whoever ends first is gone for the other one
            assert reported(running, rank) <= {1}, running.told()


@pytest.mark.hosts
def test_without_a_host_the_others_begin_again_in_a_smaller_world(
    tmp_path: Path,
) -> None:
    with job(
        tmp_path, "abc", restarts=2, nodes="2:3", NEMO_PATCHES_STALL_EXIT="8"
    ) as running:
        running.until_it_trains()
        running.hosts[2].lose_power()
        running.until(
            lambda: all("of 2 starts" in running.log(rank) for rank in (0, 1)),
            START_S,
            "restarted",
        )
        running.until(
            lambda: running.lines(0, "patched on all 2 ranks"), START_S, "patched"
        )
        for rank in range(2):  # whoever ends first is gone for the other one
            assert reported(running, rank) <= {2}, running.told()


@pytest.mark.hosts
@pytest.mark.parametrize("per_host", [1, 2])
def test_a_network_that_heals_in_time_costs_no_step(
    per_host: int, tmp_path: Path
) -> None:
    """30 s, as where a switch restarts: the length sync and the reports live on."""
    with job(tmp_path, want=Wanted(per_host)) as running:
        every = range(running.size)
        running.until_it_trains()
        running.hosts[1].ip("link", "set", CARD, "down")
        with contextlib.suppress(AssertionError):  # nothing ends an outage but time
            running.until(lambda: False, OUTAGE_S, "over")
        steps = [len(losses) for losses in all_losses(running)]
        running.hosts[1].ip("link", "set", CARD, "up")
        until_all_train_on(running, steps)
        for rank in every:
            running.until_told(rank, "INFO .*(encoder calls|collectives) go on, after")
        last = running.size - 1
        running.signal(last, "STOP")  # and that is named as ever
        for rank in every[:-1]:
            running.until_told(
                rank, rf"WARNING .*rank {last} \(nemo-b, pid \d+\) answers nothing"
            )


@pytest.mark.hosts
def test_a_rank_that_is_late_is_named_once_and_then_all_is_well(tmp_path: Path) -> None:
    """It joins 20 s after the others: no report, for nothing has begun."""
    with job(tmp_path, want=Wanted(steps=STEPS, late_s={1: 20.0})) as running:
        assert running.codes(START_S) == [0, 0], running.told()
        assert running.accused(0) <= {1}
        assert running.accused(1) == set()
        assert running.lines(0, "patched on all 2 ranks")


NAMES = {
    "a loopback address for its own name": {
        letter: f"127.0.1.1 nemo-{letter}\n" for letter in "ab"
    },
    "names that do not resolve": {"a": "", "b": ""},
}


@pytest.mark.hosts
@pytest.mark.parametrize("names", [pytest.param(v, id=k) for k, v in NAMES.items()])
def test_where_names_are_wrong_the_ranks_meet_by_the_jobs_address(
    names: dict[str, str], tmp_path: Path
) -> None:
    address = ("10.88.0.1", "29511")
    want = Wanted(steps=STEPS, address=address)
    with job(tmp_path, made={"names": names}, want=want, **HEALTHY) as running:
        assert running.codes(START_S) == [0, 0], running.told()
        assert said(running) == []
        assert running.lines(0, "patched on all 2 ranks")


@pytest.mark.hosts
def test_where_there_is_only_ipv6(tmp_path: Path) -> None:
    want = Wanted(steps=STEPS, address=("fd88::1", "29511"))
    made = {"only_six": True}
    endpoint = "[fd88::1]:29400"
    with job(tmp_path, made=made, want=want, endpoint=endpoint, **HEALTHY) as running:
        assert running.codes(START_S) == [0, 0], running.told()
        assert said(running) == []
        assert running.lines(0, "patched on all 2 ranks")


@pytest.mark.hosts
@pytest.mark.parametrize("verdict", ["DROP", "REJECT"])
def test_a_firewall_that_closes_while_a_job_runs_hides_no_fault(
    verdict: str, tmp_path: Path
) -> None:
    """Nothing new may connect; what is connected stays."""
    skip_unless_allowed("iptables")
    rule = ("-i", CARD, "-p", "tcp", "--syn", "-j", verdict)
    with job(tmp_path) as running:
        running.until_it_trains()
        for host in running.hosts:
            host.firewall("-A", "INPUT", *rule)
        running.until_it_trains(len(running.losses(0)) + STEPS)
        assert said(running) == []
        running.signal(1, "STOP")
        running.until_told(0, r"WARNING .*rank 1 \(nemo-b, pid \d+\) answers nothing")
        running.until(lambda: running.accused(0), START_S, "accused in a report")
        assert running.accused(0) == {1}


@pytest.mark.hosts
def test_on_a_second_network_that_gloo_is_given(tmp_path: Path) -> None:
    settings = {**HEALTHY, "GLOO_SOCKET_IFNAME": SECOND_CARD}
    with job(tmp_path, want=Wanted(steps=STEPS), **settings) as running:
        assert running.codes(START_S) == [0, 0], running.told()
        assert said(running) == []
        assert running.lines(0, "patched on all 2 ranks")


@pytest.mark.hosts
@pytest.mark.parametrize("verdict", ["DROP", "REJECT"])
def test_where_the_ranks_cannot_meet_they_say_so_and_train(
    verdict: str, tmp_path: Path
) -> None:
    """Gloo has a network; the ranks would meet in the one for NCCL, whose ports are closed."""
    skip_unless_allowed("iptables")
    networks = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": SECOND_CARD}
    want = Wanted(steps=STEPS, pace_s=1.0)
    with made_hosts("ab", tmp_path) as hosts:
        for host in hosts:
            host.firewall("-A", "INPUT", "-i", SECOND_CARD, "-p", "tcp", "-j", verdict)
        with started(Job(hosts, tmp_path, want, **networks)) as running:
            assert running.codes(START_S) == [0, 0], running.told()
            assert running.warnings(1, "no connection to rank 0|not connected")
            assert running.accused(0) <= {1}
            assert running.accused(1) <= {0}


WRONG_NETWORKS: dict[str, tuple[dict[str, str], tuple[str, str] | None, str]] = {
    "no such interface": ({"GLOO_SOCKET_IFNAME": "eth7"}, None, "eth7"),
    "the loopback interface": (
        {"GLOO_SOCKET_IFNAME": "lo"},
        None,
        "refused|time(d |)out",
    ),
    "a loopback address": ({}, ("127.0.0.1", "29511"), "127.0.0.1|timed out"),
}


@pytest.mark.hosts
@pytest.mark.parametrize(
    ("settings", "address", "stock_says"), WRONG_NETWORKS.values(), ids=WRONG_NETWORKS
)
def test_where_the_job_cannot_begin_stocks_error_stands_alone(
    settings: dict[str, str],
    address: tuple[str, str] | None,
    stock_says: str,
    tmp_path: Path,
) -> None:
    """Nobody is missing from what has not begun; one that has ended by stock's error may be named."""
    want = Wanted(address=address, group_timeout_s=10.0)
    with job(tmp_path, want=want, **settings) as running:
        assert 0 not in running.codes(START_S), running.told()
        # The agent of a rank that fails ends the other one, which then says nothing.
        said_by_stock = rf"Error: .*({stock_says})"
        logs = [running.log(rank) for rank in (0, 1)]
        assert any(re.search(said_by_stock, log, re.I | re.S) for log in logs), logs
        for rank in (0, 1):
            assert reported(running, rank) == set()
            assert running.warnings(rank, "Missing|no step|no encoder call") == []
