"""The job's backend, NCCL on GPUs: a collective that a rank did not finish, or never entered.

Such a job hangs before its first encoder call, so the length sync is not involved. With --nccl only: 1 MB is reduced,
broadcast and gathered once over the ranks that answered, within NEMO_PATCHES_TIMEOUT.
Link: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
"""

from __future__ import annotations

from nemo_patches.text import named
from nemo_patches.tools.doctor.finding import ERROR, Findings, error
from nemo_patches.tools.doctor.ranks import Ranks, by_value

WORST = ERROR


def check(ranks: Ranks) -> Findings:
    """Ranks that never came first: for these the others wait."""
    if ranks.smoke is None:
        return
    instead = "NCCL_DEBUG=INFO on these ranks, and the doctor's findings on their machines"
    absent = sorted(set(ranks.facts) - set(ranks.smoke))
    if absent:
        what = f"{named(absent)} answered, and did not come through the collectives of the job's backend"
        yield error(what, (), instead)
    ended = sorted(ranks.smoke.items())
    groups = by_value((rank, (each.backend, each.at, each.problem)) for rank, each in ended if each.at)
    for (backend, at, problem), which in groups.items():
        yield error(f"{named(which)}: {at} over {backend}: {problem}", (), instead)
    backends = sorted({each.backend for each in ranks.smoke.values()})
    if len(backends) > 1:
        what = f"ranks without a GPU of their own: {', '.join(backends)} differ between ranks, and no group can be made"
        yield error(what, (), "one GPU for each rank, or none at all")
