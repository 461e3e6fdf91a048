"""An error after which one rank continues with other collectives than the ranks without the error.

Memory runs out on one rank only, because of its batch. A handler that skips the step, or tries it
again, puts this rank a collective behind the others, or ahead of them: they wait for it, or pair
theirs with a later one. A rank that ends, instead, is noticed by its launcher, which ends the
others.
Link: https://github.com/pytorch/pytorch/issues/44353
"""

# No check: the interpreter finds it, not where the handler raises in the end, nor of errors that
# all ranks have, such as ImportError.

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
