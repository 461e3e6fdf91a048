"""A collective, or a call of the encoder, in a branch that not every rank may take.

All ranks must run the same collectives in the same order. If the rank or the data of a batch
decides, the others may wait for ever. A call of the encoder is a collective, too, by its length
sync, and under FSDP by gathering its parameters. So is what Lightning does for all ranks: log with
sync_dist, save_checkpoint, a metric's compute, the backward pass.
Link: https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

# No check: the interpreter finds it, the tests of the branches around it count, and a collective
# of a group of some ranks is left alone.

BAD = """\
import torch.distributed as dist

def save(model, path):
    if dist.get_rank() == 0:
        model.save(path)
        dist.barrier()
"""
GOOD = BAD.replace("        dist", "    dist")
