"""What counts as begun: the default process group's sequence number after each operation, on two
Gloo ranks.

python benchmarks/sequence_numbers.py
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

READS = 100_000


def begun() -> int | str:
    try:
        return int(dist.group.WORLD._get_sequence_number_for_group())
    except Exception as error:
        return repr(error)


def rank_main(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo",
        init_method=address,
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    found: list[tuple[str, Any]] = [("init_process_group", begun())]

    def after(name: str, operation: Callable[[], object]) -> None:
        operation()
        found.append((name, begun()))

    one = torch.ones(4)
    after("barrier", dist.barrier)
    after("all_reduce", lambda: dist.all_reduce(one))
    after("asynchronous all_reduce", lambda: dist.all_reduce(one, async_op=True).wait())
    after("broadcast", lambda: dist.broadcast(one, 0))
    after("all_gather", lambda: dist.all_gather([one.clone(), one.clone()], one))
    after("all_gather_object", lambda: dist.all_gather_object([None, None], rank))
    after("broadcast_object_list", lambda: dist.broadcast_object_list([1], 0))
    after(
        "gather",
        lambda: dist.gather(one, [one.clone(), one.clone()] if rank == 0 else None, 0),
    )
    after("reduce", lambda: dist.reduce(one, 0))
    after("monitored_barrier", dist.monitored_barrier)
    after("send, recv", lambda: dist.send(one, 1) if rank == 0 else dist.recv(one, 0))
    other = dist.new_group([0, 1])
    after("all_reduce in another group", lambda: dist.all_reduce(one, group=other))
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    found.append(("DDP's constructor", begun()))
    after("its forward and backward", lambda: model(torch.ones(2, 4)).sum().backward())
    start = time.perf_counter()
    for _ in range(READS):
        begun()
    found.append(
        ("us for a read", round((time.perf_counter() - start) / READS * 1e6, 2))
    )
    looks = threading.Timer(
        1.0, lambda: found.append(("while rank 0 waits in a barrier", begun()))
    )
    looks.start()
    if rank == 1:
        time.sleep(1.5)
    dist.barrier()
    looks.join()
    dist.destroy_process_group()
    print(f"rank {rank}, torch {torch.__version__}", *found, sep="\n  ", flush=True)


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = int(probe.getsockname()[1])
    sys.exit(torch.multiprocessing.spawn(rank_main, (free,), nprocs=2))  # type: ignore[no-untyped-call, func-returns-value]
