"""A collective, or a call of the encoder, in a branch that not every rank may take.

All ranks must run the same collectives in the same order. If the rank or the data of a batch
decides, the others may wait for ever. A call of the encoder is a collective, too, by its length
sync, and under FSDP by gathering its parameters. So is what Lightning does for all ranks: log with
sync_dist, save_checkpoint, a metric's compute, the backward pass.
Link: https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

from __future__ import annotations

from nemo_patches.tools.doctor.code import Code
from nemo_patches.tools.doctor.collectives import ENCODER
from nemo_patches.tools.doctor.divergences import Divergence, Kind
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
    for each in code.divergences:
        if each.kind in (Kind.BRANCH, Kind.FIRST_RANK, Kind.NAME):
            what, instead = _said(each)
            yield each.finding(f"{each.function}: {what}", each.places, instead)


def _said(each: Divergence) -> tuple[str, str]:
    """What is found, and what to write instead."""
    what = f"{each.names} {each.are}"
    if each.reordered:
        what = (
            f"{each.names} come in another order where `{each.cause}`: ranks where that"
            " differs make unlike ones"
        )
        return what, "one order on all ranks"
    if each.kind is Kind.NAME:
        what += (
            f" made under a name that depends on `{each.cause}`: ranks with unlike"
            " names reduce unlike values, or wait"
        )
        return what, "names that all ranks log, each of them"
    if each.kind is Kind.FIRST_RANK:
        what += f" made on one rank of the job or of a node only, by {each.cause}"
        return what, "the collective in a method that every rank runs"
    if each.by_rank:
        what += (
            f" made only where a test on the rank holds (`{each.cause}`), and nowhere"
            " else here"
        )
        return what, "the collective outside of that branch, on every rank"
    if each.collectives[0].pairs_with == ENCODER:
        what += (
            f" called only if `{each.cause}`: ranks where that differs wait for each"
            " other in it"
        )
        return what, "the call in any case, and its result left out"
    depends = "depends" if each.are == "is" else "depend"
    what = (
        f"{each.names} {depends} on `{each.cause}`: a rank where that is otherwise"
        " leaves the others waiting"
    )
    return what, "the collective in any case, or a test that all ranks share"
