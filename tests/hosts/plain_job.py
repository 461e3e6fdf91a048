"""A rank of a job without NeMo, for looks from outside: torch's DDP on Gloo, under torchrun, with not
a word of nemo_patches: `plain_job.py FOLDER`.

In FOLDER it writes what it does, and is told what goes wrong, as job.py in the shared folder.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[1])
RANK = os.environ["RANK"]
A_LONG_TIME_S = 3600


def tokenize_on_the_fly() -> None:
    time.sleep(A_LONG_TIME_S)


def train() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    step = 0
    while True:
        fault = FOLDER / f"fault.{RANK}"
        if fault.exists():
            fault.unlink()  # the next attempt is a healthy one
            tokenize_on_the_fly()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        step += 1
        print(f"step {step} loss {float(loss):.9f}", flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    log = os.open(FOLDER / f"rank.{RANK}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    size = os.environ["WORLD_SIZE"]
    print(f"rank {RANK} of {size} starts, pid {os.getpid()}", flush=True)
    train()
