"""A return, continue or break that depends on this rank's batch or number, before collectives.

A step that a rank leaves because of a NaN, an empty batch or its rank is one step fewer on this
rank: the others wait in the next collective (if no other is visible, the reduction of gradients in
backward), or pair it with a later one. Lightning 2.3 and later raise an error if training_step
returns None on several ranks.
Link: https://github.com/Lightning-AI/pytorch-lightning/issues/5243
"""

# No check: the interpreter finds it, not where what decides has been reduced over all ranks
# before.

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
