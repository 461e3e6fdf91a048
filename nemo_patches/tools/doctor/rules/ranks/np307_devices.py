"""The ranks' devices: two ranks on one GPU, a rank without a GPU, or different devices.

Two ranks on one GPU make NCCL stop with an error, or hang. The slowest device sets the pace: every other rank waits
for it at each step.
Link: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html
"""

from __future__ import annotations

import re

from nemo_patches.text import named
from nemo_patches.tools.doctor.finding import ERROR, Findings, error, warning
from nemo_patches.tools.doctor.ranks import Ranks, differing

WORST = ERROR


def check(ranks: Ranks) -> Findings:
    """By local rank, as Lightning gives each its device."""
    for identity, which in ranks.grouped(
        lambda facts: f"{facts.host} {facts.device_id}" * bool(facts.device_id)
    ).items():
        if identity and len(which) > 1:
            what = f"{named(which)} have the same GPU, {ranks.facts[which[0]].device} of {ranks.facts[which[0]].host}"
            yield error(what, (), "as many processes per host as GPUs, and LOCAL_RANK by launcher")
    for name, values in differing(ranks, lambda facts: {"the device": re.sub(r"^cuda:\d+ ", "", facts.device)}):
        yield warning(f"{name} differs: {values}", (), "hosts of one kind")
