"""A rank of a job without NeMo and without Lightning, for test_plain_jobs.py: `plain_job.py SCRIPT
WAY FOLDER`.

It knows nothing of nemo_patches. Rank 1 hangs in the given way, after some steps.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STEPS = 40
STEP_S = 0.1
CULPRIT = 1
BROADCASTING = "collections/common/data/lhotse/broadcasting.py"  # in NeMo 3.0


def says_when(folder: Path) -> None:
    (folder / "hangs").touch()


def retries(folder: Path) -> None:
    """As a data set whose file is damaged."""
    says_when(folder)
    attempt = 0
    while True:
        attempt += 1
        time.sleep(0.01)


def sleeps(folder: Path) -> None:
    says_when(folder)
    while True:
        time.sleep(0.01)


def fetches_ahead(folder: Path) -> None:
    """Rank 0 has a worker that takes a core all the while; here nothing is to be had."""
    sleeps(folder)


def makes_no_group(folder: Path) -> None:
    """As one that is in wandb.init, while the others make a process group, which needs all of them."""
    sleeps(folder)


def takes_a_core() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(10_000))


def skips_a_collective(folder: Path) -> None:
    """All ranks come here."""
    import torch
    import torch.distributed as dist

    says_when(folder)
    if int(os.environ["RANK"]) != CULPRIT:
        dist.all_reduce(torch.ones(1))
    dist.barrier()


WAYS: dict[str, Callable[[Path], None]] = {
    way.__name__: way
    for way in (
        retries,
        sleeps,
        fetches_ahead,
        makes_no_group,
        skips_a_collective,
    )
}


def batches(way: str, folder: Path) -> Iterator[int]:
    if way == "fetches_ahead" and int(os.environ["RANK"]) != CULPRIT:
        multiprocessing.get_context("fork").Process(
            target=takes_a_core, daemon=True
        ).start()
    for number in range(STEPS):
        time.sleep(STEP_S)
        yield number
    if int(os.environ["RANK"]) == CULPRIT or way == "skips_a_collective":
        WAYS[way](folder)
    elif way == "makes_no_group":
        import torch.distributed as dist

        dist.new_group([0, 1])
    yield STEPS


def ddp(way: str, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in batches(way, folder):
        model(torch.ones(2, 4)).sum().backward()


class Trainer:
    """Like Hugging Face's: torch and the process group are its own business, as late as it needs
    them.
    """

    def train(self, data: Iterator[int]) -> None:
        import torch
        from torch.distributed import all_reduce, init_process_group

        init_process_group(backend="gloo", init_method="env://")
        model: Any = torch.nn.Linear(4, 4)
        for _ in data:
            model(torch.ones(2, 4)).sum().backward()
            for parameter in model.parameters():
                all_reduce(parameter.grad)


def trainer(way: str, folder: Path) -> None:
    Trainer().train(batches(way, folder))


def reads(way: str, folder: Path) -> Iterator[int]:
    for number in range(STEPS):
        time.sleep(STEP_S)
        yield number
    WAYS[way](folder)


def tensor_parallel(way: str, folder: Path) -> None:
    """Rank 0 reads the batches of both. NeMo's file is loaded by itself: it needs torch alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    nemo = importlib.util.find_spec("nemo")
    assert nemo is not None and nemo.submodule_search_locations is not None
    file = Path(nemo.submodule_search_locations[0]) / BROADCASTING
    spec = importlib.util.spec_from_file_location("broadcasting", file)
    assert spec is not None and spec.loader is not None
    loading = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loading)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    source = reads(way, folder) if loading.is_dp_source_rank(mesh) else None
    for _ in loading.BroadcastingDataLoader(source, mesh):
        dist.barrier()


if __name__ == "__main__":
    scripts = {"ddp": ddp, "trainer": trainer, "tensor_parallel": tensor_parallel}
    scripts[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
