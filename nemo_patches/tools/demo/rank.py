"""One rank of the demo: what is set up around its task.

The demo's fork server imports this, and with it NeMo, once for all ranks, which are forked from it.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import nemo_patches
from nemo_patches.tools.demo import logs
from nemo_patches.tools.demo.jobs import IMPORT_LIMIT, Failed, Notice, RankJob


@contextlib.contextmanager
def ends_after(limit: timedelta) -> Iterator[None]:
    """Let the kernel end this process if the block takes longer: it may wait in C++, and its parent may be gone."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(limit.total_seconds()))
    try:
        yield
    finally:
        signal.alarm(0)


with ends_after(IMPORT_LIMIT):
    import torch

    from nemo_patches.tools.demo import evaluation, positional_encoding, training


def run(job: RankJob, events: Connection) -> None:
    """Do this rank's job and tell the parent about it; what it prints goes to the job's log."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file where stock aborts
    logs.write_to(job.log)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        NODE_RANK="0",
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
    )
    torch.set_num_threads(1)
    try:
        with ends_after(job.limit + timedelta(seconds=10)):  # the parent, if it is there, does so at the limit
            if job.patched:
                nemo_patches.apply(**job.settings)
            else:
                nemo_patches.revert()  # the user may have auto-apply on, and stock must be stock
            if job.task == "training":
                training.pretrain(job, events)
            elif job.task == "a rank stays away":
                evaluation.evaluate(job, events)
            else:
                events.send(positional_encoding.grow(job))
            print(nemo_patches.status(), file=sys.stderr)
        events.send(Notice.FINISHED)
    except Exception as error:
        traceback.print_exc()
        events.send(Failed(logs.shortened(f"{type(error).__name__}: {error}")))
        sys.exit(1)
