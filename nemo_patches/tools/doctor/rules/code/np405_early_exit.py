"""A return, continue or break that depends on this rank's batch or number, before collectives.

A step that a rank leaves because of a NaN, an empty batch or its rank is one step fewer on this
rank: the others wait in the next collective (if no other is visible, the reduction of gradients in
backward), or pair it with a later one. Lightning 2.3 and later raise an error if training_step
returns None on several ranks.
Link: https://github.com/Lightning-AI/pytorch-lightning/issues/5243
"""

from __future__ import annotations

import re

from nemo_patches.tools.doctor.code import Code
from nemo_patches.tools.doctor.collectives import BACKWARD
from nemo_patches.tools.doctor.divergences import Divergence, Kind
from nemo_patches.tools.doctor.finding import NOTE, Findings, Severity, at

BAD = """\
import torch
from torch.nn.parallel import DistributedDataParallel

def train(model: DistributedDataParallel, loader):
    for batch in loader:
        bad = torch.isnan(batch).any()
        if bad:
            continue
        model(batch).backward()
"""
GOOD = BAD.replace(
    "        if", "        torch.distributed.all_reduce(bad)\n        if"
)

_EMPTY = re.compile(r"not [\w.]+\b|len\([\w.]+\)")


def check(code: Code) -> Findings:
    """Not where what decides has been reduced over all ranks before."""
    for each in code.divergences:
        if each.kind is Kind.EXIT:
            what = (
                f"{each.function}: `{each.exit}` in line {each.exit_line}, by"
                f" `{each.cause}`, leaves out {each.names}: "
            )
            if each.by_rank:
                what += "the other ranks wait in it"
                instead = "the collective before it, on every rank"
            else:
                what += "ranks where that differs wait in it"
                instead = (
                    "a decision that all ranks share: all_reduce a flag, and leave"
                    " where any rank has it"
                )
            read = (at(each.exit, each.exit_line), *each.places)
            yield each.finding(what, read, instead, severity=_severity(each))


def _severity(each: Divergence) -> Severity:
    """A note where only a rank that has had no batch at all in an evaluation would leave."""
    at_end = (
        each.function.endswith("_end") and not each.by_rank and _EMPTY.match(each.cause)
    )
    return (
        NOTE
        if at_end and all(one.pairs_with != BACKWARD for one in each.collectives)
        else each.severity
    )
