"""A rank that does not answer.

The job would wait for it at its first collective, until the process group's timeout. The rank has not been started,
has died, is still importing torch, or its host cannot reach the job's store.
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
        yield error(
            f"no answer from {named(missing)} of {ranks.size} within {ranks.timeout.total_seconds():g} s",
            (),
            "look at its stderr and its host; if it only starts slowly, NEMO_PATCHES_TIMEOUT=60 for this command",
        )
