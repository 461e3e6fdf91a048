"""The measured rounds of the length sync among all ranks, and requests to the job's store.

The length sync makes such a round at every encoder call, over sockets between the hosts, and the ranks find each
other through the store. If hosts cannot connect, each rank continues with its own length after one timeout.
Link: docs/design.md
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from datetime import timedelta

from nemo_patches.text import named
from nemo_patches.tools.doctor.finding import WARNING, Findings, warning
from nemo_patches.tools.doctor.ranks import Ranks, by_value

WORST = WARNING

_SLOW = timedelta(milliseconds=100)
# Which the side channel goes by, too.
_INTERFACE = "GLOO_SOCKET_IFNAME: on each host the interface that leads to the others (ip -brief addr)"


def check(ranks: Ranks) -> Findings:
    """Of the ranks that answered."""
    unmeasured = [rank for rank in sorted(ranks.facts) if rank not in ranks.measured]
    if unmeasured:
        yield warning(f"{named(unmeasured)} did not come through the measurement", (), _INTERFACE)
    measured_ranks = sorted(ranks.measured.items())
    problems = by_value((rank, measured.problem) for rank, measured in measured_ranks if measured.problem)
    for problem, which in problems.items():
        yield warning(f"no sync on {named(which)}: {problem}", (), _INTERFACE)
    yield from _slow("sync", {rank: measured.syncs for rank, measured in measured_ranks}, _INTERFACE)
    requests = {rank: measured.requests for rank, measured in measured_ranks}
    yield from _slow("request to the store", requests, "fewer hops to the store's host, or a less busy one")


def _slow(what: str, times: Mapping[int, tuple[float, ...]], instead: str) -> Findings:
    medians = {rank: statistics.median(durations) for rank, durations in times.items() if durations}
    slow = [rank for rank, median in medians.items() if median > _SLOW.total_seconds()]
    if slow:
        worst = 1000 * max(medians.values())
        yield warning(f"{named(slow)}: a {what} takes up to {worst:.0f} ms (median)", (), instead)
