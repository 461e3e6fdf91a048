"""What goes wrong on a job's hosts, as a table: what happens, whom each rank must name and as what,
and nobody else is ever named.

A new case is an entry of CASES; with `cheap=True` it also runs in `make test`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hosts.cluster import CARD, made_hosts, skip_unless_allowed
from hosts.job import Wanted
from hosts.running_job import SAYS_S, Job, started
from nemo_patches.judging.kinds import ELSEWHERE, SILENT

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]


@dataclass(frozen=True)
class Case:
    """named: by the rank that says it, the missing ranks of one of its stall reports, and their
    kinds. line: what one of its warnings must match; never: what none may. late: a rank that all
    others may call late, for nothing is heard of it.
    """

    happens: Callable[[Job], None]
    named: Mapping[int, Mapping[int, str]]
    line: str
    never: str = "gone:"
    late: frozenset[int] = frozenset()
    hosts: str = "ab"
    per_host: int = 1
    needs: tuple[str, ...] = ()
    cheap: bool = False


def sleeps(rank: int) -> Callable[[Job], None]:
    return lambda job: void((job.shared / f"fault.{rank}").write_text("sleep"))


def gets(name: str, *ranks: int) -> Callable[[Job], None]:
    """These ranks, a signal."""

    def send(job: Job) -> None:
        for rank in ranks:
            job.signal(rank, name)

    return send


def loses_power(number: int) -> Callable[[Job], None]:
    return lambda job: job.hosts[number].lose_power()


def link(number: int, *command: str) -> Callable[[Job], None]:
    return lambda job: job.hosts[number].ip("link", "set", CARD, *command)


def firewall(number: int, *rules: str) -> Callable[[Job], None]:
    def add(job: Job) -> None:
        for rule in rules:
            job.hosts[number].firewall("-A", *rule.split())

    return add


def large_packets_are_lost(job: Job) -> None:
    for number in range(len(job.hosts)):
        firewall(number, LARGE_ARE_LOST)(job)


def void(_: Any) -> None:
    """What a lambda returns, for mypy."""


# As where a tunnel's MTU is smaller than the cards', and nobody says so: heartbeats pass.
LARGE_ARE_LOST = "INPUT -i eth0 -p tcp -m length --length 400:65535 -j DROP"

THROUGH_IS_WHAT_IS_SMALL = (
    r"\[rank 0/2 .*rank 1 \(.*not heard: its small messages come, its answer does not"
    r"|WARNING \[rank 1/2 .* no encoder call"
)
IS_STOPPED = "answers? nothing"  # no host says so that is cut off
CASES = {
    "a rank sleeps": Case(
        sleeps(1),
        named={0: {1: ELSEWHERE}, 1: {1: ELSEWHERE}},
        line=r"rank 1 \(nemo-b.*tokenize_on_the_fly \(hosts/job.py",
        cheap=True,
    ),
    "a rank is stopped": Case(
        gets("STOP", 1),
        named={0: {1: SILENT}},
        line=r"rank 1 \(nemo-b, pid \d+\) answers nothing, its connection stands",
        cheap=True,
    ),
    "a rank of two on its host is stopped": Case(
        gets("STOP", 2),
        named={rank: {2: SILENT} for rank in (0, 1, 3)},
        line=r"rank 2 \(nemo-b, pid \d+\) answers nothing, its connection stands",
        per_host=2,
    ),
    "both ranks of a host are stopped": Case(
        gets("STOP", 2, 3),
        named={rank: {2: SILENT, 3: SILENT} for rank in (0, 1)},
        line=r"ranks? 2.*answers? nothing",
        per_host=2,
    ),
    "rank 0 is stopped": Case(
        gets("STOP", 0),
        named={1: {0: SILENT}},
        line=r"rank 0 \(nemo-a, pid \d+\) answers nothing, its connection stands",
    ),
    "a host of two loses power": Case(
        loses_power(1),
        named={0: {1: SILENT}},
        line=r"all ranks of nemo-b \(1\): its connection was lost",
        never=IS_STOPPED,
        cheap=True,
    ),
    "a host of three loses power": Case(
        loses_power(1),
        named={0: {1: SILENT}, 2: {1: SILENT}},
        line=r"all ranks of nemo-b \(1\): its connection was lost",
        never=IS_STOPPED,
        hosts="abc",
    ),
    "the store's host loses power": Case(
        loses_power(0),
        named={1: {0: SILENT}, 2: {0: SILENT}},
        line=r"all ranks of nemo-a \(0\): its connection was lost",
        never=IS_STOPPED,
        hosts="abc",
    ),
    "a link is down": Case(
        link(1, "down"),
        named={0: {1: SILENT}, 1: {0: SILENT}},
        line=r"all ranks of nemo-[ab] \([01]\): its connection was lost",
        never=IS_STOPPED,
        cheap=True,
    ),
    "what a host sends is lost": Case(
        firewall(1, "OUTPUT -o eth0 -j DROP"),
        named={0: {1: SILENT}, 1: {0: SILENT}},
        line=r"all ranks of nemo-[ab] \([01]\): its connection was lost",
        never=IS_STOPPED,
        needs=("iptables",),
    ),
    "one of three is cut off": Case(
        link(2, "down"),
        named={0: {2: SILENT}, 1: {2: SILENT}, 2: {0: SILENT, 1: SILENT}},
        line=r"all ranks of nemo-[abc] \([012]\): its connection was lost",
        never=IS_STOPPED,
        hosts="abc",
    ),
    "large packets are lost": Case(
        large_packets_are_lost,
        named={0: {}, 1: {}},
        line=THROUGH_IS_WHAT_IS_SMALL,
        late=frozenset({0, 1}),
        never=IS_STOPPED,
        needs=("iptables",),
    ),
    "large packets are lost, in one direction": Case(
        firewall(0, LARGE_ARE_LOST),
        named={0: {}, 1: {}},
        line=THROUGH_IS_WHAT_IS_SMALL,
        late=frozenset({0, 1}),
        never=IS_STOPPED,
        needs=("iptables",),
    ),
    "answers of a host are lost, both ranks of it": Case(
        firewall(1, "INPUT -i eth0 -j DROP"),
        named={
            0: {2: SILENT, 3: SILENT},
            1: {2: SILENT, 3: SILENT},
            2: {0: SILENT, 1: SILENT},
            3: {0: SILENT, 1: SILENT},
        },
        line=r"all ranks of nemo-[ab] \((0-1|2-3)\): their connections were lost",
        never=IS_STOPPED,
        per_host=2,
        needs=("iptables",),
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if case.cheap else pytest.mark.hosts)
        for name, case in CASES.items()
    ],
)
def test_who_is_missing_is_named_and_nobody_else(case: Case, tmp_path: Path) -> None:
    skip_unless_allowed(*case.needs)
    want = Wanted(case.per_host)
    with (
        made_hosts(case.hosts, tmp_path) as hosts,
        started(Job(hosts, tmp_path, want)) as job,
    ):
        job.until_it_trains()
        case.happens(job)
        for rank, missing in case.named.items():
            job.until(
                lambda rank=rank, missing=missing: (
                    missing in [report.missing for report in job.reports(rank)]
                ),
                SAYS_S,
                f"named by rank {rank}: {missing}",
            )
            job.until_told(rank, case.line)
        for rank in range(job.size):
            guilty = set(case.named.get(rank, {}))
            assert job.accused(rank) <= guilty | case.late - {rank}, job.told()
            assert not job.warnings(rank, case.never), job.told()
