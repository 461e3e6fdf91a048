"""Clocks that differ between hosts.

You then cannot compare the logs of several ranks by time. nemo_patches itself never relies on another host's clock.
Link: docs/diagnose.md
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import WARNING, Findings, warning
from nemo_patches.tools.doctor.ranks import Ranks

WORST = WARNING

_MUCH_S = 1.0


def check(ranks: Ranks) -> Findings:
    """Against rank 0's, one finding for each host."""
    said = set()
    for rank, facts in sorted(ranks.facts.items()):
        offset = ranks.clock_offset(rank)
        if offset is not None and abs(offset) > _MUCH_S and facts.host not in said:
            said.add(facts.host)
            ahead = "ahead of" if offset > 0 else "behind"
            what = f"the clock of {facts.host} (rank {rank}) is {abs(offset):.1f} s {ahead} that of rank 0"
            yield warning(what, (), "NTP or chrony on every host")
