"""A collective, or a call of the encoder, in a branch that not every rank may take.

All ranks must run the same collectives in the same order. If the rank or the data of a batch
decides, the others may wait for ever. A call of the encoder is a collective, too, by its length
sync, and under FSDP by gathering its parameters. So is what Lightning does for all ranks: log with
sync_dist, save_checkpoint, a metric's compute, the backward pass.
Link: https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

from __future__ import annotations

from nemo_patches.tools.doctor.code import Code
from nemo_patches.tools.doctor.finding import Findings

BAD = """\
import torch.distributed as dist

def save(model, path):
    if dist.get_rank() == 0:
        model.save(path)
        dist.barrier()
"""
GOOD = BAD.replace("        dist", "    dist")


def check(code: Code) -> Findings:
    """By the tests of the branches around it; a collective of a group of some ranks is left
    alone.
    """
    return code.found("NP401")
