"""An error after which one rank continues with other collectives than the ranks without the error.

Memory runs out on one rank only, because of its batch. A handler that skips the step, or tries it
again, puts this rank a collective behind the others, or ahead of them: they wait for it, or pair
theirs with a later one. A rank that ends, instead, is noticed by its launcher, which ends the
others.
Link: https://github.com/pytorch/pytorch/issues/44353
"""

from __future__ import annotations

from nemo_patches.tools.doctor.code import Code
from nemo_patches.tools.doctor.finding import Findings

BAD = """\
from torch.nn.parallel import DistributedDataParallel

def step(model: DistributedDataParallel, batch):
    try:
        loss = model(batch)
        loss.backward()
    except RuntimeError:
        model.zero_grad()
"""
GOOD = BAD.replace("model.zero_grad()", "raise")


def check(code: Code) -> Findings:
    """Not where the handler raises in the end, nor of errors that all ranks have, such as
    ImportError.
    """
    return code.found("NP406")
