"""Settings that differ between ranks:
those of nemo_patches, and the variables of NCCL, torch and Gloo.

With different settings of nemo_patches, one rank waits where another goes on; a rank on which NeMo
is not patched waits for the others without a limit. Many variables of NCCL must be equal for it to
work at all. Which interface a host uses (names ending in _IFNAME or _HCA) may differ, and is not
compared.
Link: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import Findings, warning
from nemo_patches.tools.doctor.ranks import Ranks, differing


def check(ranks: Ranks) -> Findings:
    """One finding for each setting or variable."""
    instead = (
        "the same environment on every rank (srun --export=ALL, or set it in the launch"
        " script)"
    )
    for name, values in differing(ranks, lambda facts: facts.settings):
        yield warning(f"nemo_patches' {name} differs: {values}", (), instead)
    for name, values in differing(ranks, lambda facts: facts.environment):
        yield warning(f"{name} differs: {values}", (), instead)
