"""A rank that did not answer, so that it is not compared with the others.

It has not been started, has died, is still importing torch, or its host cannot reach the job's
store. A job would wait for it at its first collective.
Link: docs/doctor.md
"""

from __future__ import annotations

from nemo_patches.text import named
from nemo_patches.tools.doctor.finding import ERROR, Findings, error
from nemo_patches.tools.doctor.ranks import Ranks

WORST = ERROR


def check(ranks: Ranks) -> Findings:
    """All of them in one finding."""
    missing = [rank for rank in range(ranks.size) if rank not in ranks.facts]
    if missing:
        limit = ranks.timeout.total_seconds()
        yield error(
            f"not compared: {named(missing)} of {ranks.size}, without an answer within"
            f" {limit:g} s",
            (),
            "look at its stderr and its host; if it only starts slowly,"
            " NEMO_PATCHES_TIMEOUT=60 for this command",
        )
