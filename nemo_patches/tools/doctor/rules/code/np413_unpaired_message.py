"""A send that no rank receives, a recv that no rank sends, a ring in which all receive first.

So, too, all_to_all_single with sizes that only this rank knows: it takes more than the others send;
and a buffer that DDP broadcasts, made as large as this rank's batch asks.

A recv returns only when the message has come, and a send may wait for its recv as well, which
depends on the backend and on the message's size. Where the other end is not made, or only after the
call that waits for it, these ranks wait until the process group's timeout.
Link: https://pytorch.org/docs/stable/distributed.html#point-to-point-communication
"""

# No check: the interpreter finds it, where the file says which rank sends to which.

BAD = """\
import torch.distributed as dist

def shift(own, other, rank, world):
    dist.recv(other, src=(rank - 1) % world)
    dist.send(own, dst=(rank + 1) % world)
"""
GOOD = """\
import torch.distributed as dist

def shift(own, other, rank, world):
    sent = dist.isend(own, dst=(rank + 1) % world)
    dist.recv(other, src=(rank - 1) % world)
    sent.wait()
"""
