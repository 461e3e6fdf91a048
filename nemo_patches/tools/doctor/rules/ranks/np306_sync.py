"""The sync of one number among all ranks, over Gloo, and the requests to the job's store, as they were measured.

The length sync makes such a sync at every encoder call, over faster sockets of its own between the same hosts, and
stall reports go through the store. Where hosts cannot connect, each rank goes on with its own length after one timeout.
Link: https://docs.pytorch.org/docs/stable/distributed.html#common-environment-variables
"""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Iterator, Mapping
from datetime import timedelta

from nemo_patches.stall.rank_text import named
from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.ranks import Measured, Ranks

WORST = Severity.WARNING

_SLOW = timedelta(milliseconds=100)
_INTERFACE = "GLOO_SOCKET_IFNAME: on each host the interface that leads to the others (ip -brief addr)"


def check(ranks: Ranks) -> Iterator[Finding]:
    """Of the ranks that answered."""
    unmeasured = [rank for rank in sorted(ranks.facts) if rank not in ranks.measured]
    if unmeasured:
        yield Finding(Severity.WARNING, f"{named(unmeasured)} did not come through the measurement", (), _INTERFACE)
    problems: dict[str, list[int]] = {}
    for rank, measured in sorted(ranks.measured.items()):
        if measured.problem:
            problems.setdefault(measured.problem, []).append(rank)
    for problem, which in problems.items():
        yield Finding(Severity.WARNING, f"no sync on {named(which)}: {problem}", (), _INTERFACE)
    alone = [rank for rank, measured in sorted(ranks.measured.items()) if _loopback(measured)]
    if alone and len({facts.host for facts in ranks.facts.values()}) > 1:
        what = f"{named(alone)}: Gloo takes a loopback address, which other hosts cannot reach"
        yield Finding(Severity.WARNING, what, (), _INTERFACE)
    measured_ranks = sorted(ranks.measured.items())
    yield from _slow("sync", {rank: measured.syncs for rank, measured in measured_ranks}, _INTERFACE)
    requests = {rank: measured.requests for rank, measured in measured_ranks}
    yield from _slow("request to the store", requests, "fewer hops to the store's host, or a less busy one")


def _slow(what: str, times: Mapping[int, tuple[float, ...]], instead: str) -> Iterator[Finding]:
    medians = {rank: statistics.median(durations) for rank, durations in times.items() if durations}
    slow = [rank for rank, median in medians.items() if median > _SLOW.total_seconds()]
    if slow:
        worst = 1000 * max(medians.values())
        yield Finding(Severity.WARNING, f"{named(slow)}: a {what} takes up to {worst:.0f} ms (median)", (), instead)


def _loopback(measured: Measured) -> bool:
    try:
        return ipaddress.ip_address(measured.address).is_loopback
    except ValueError:  # not told
        return False
