"""What runs on made hosts: torchrun's agent, and a rank that trains a small real NeMo model under
Lightning's DDP.

What is wanted of a rank stands in JOB (JSON), and what goes wrong is told it while it trains: a
file "fault.RANK" in the shared folder. Forked from a process that has imported NeMo; as a program
(`torchrun job.py`) it has not a word of nemo_patches in it.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import ranks

from hosts.cluster import SHARED, Host

A_LONG_TIME_S = 3600


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Of every rank. steps: -1: without an end. late_s: by rank, before it joins. address: what a
    job's script exports as MASTER_ADDR and MASTER_PORT, in torchrun's place.
    """

    per_host: int = 1
    steps: int = -1
    pace_s: float = 0.05
    late_s: Mapping[int, float] = dataclasses.field(default_factory=dict)
    address: tuple[str, str] | None = None
    group_timeout_s: float = 300.0

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Launch:
    """What torchrun's command line says."""

    nodes: str
    per_host: int
    endpoint: str
    restarts: int = 0


def wanted() -> Wanted:
    fields = json.loads(os.environ["JOB"])
    late_s = {int(rank): seconds for rank, seconds in fields.pop("late_s").items()}
    return Wanted(**fields, late_s=late_s)


def agent(
    host: Host,
    launch: Launch,
    environment: Mapping[str, str],
    log: Path,
    is_first: bool,
) -> None:
    """In a process of its own that has imported NeMo: a host's torchrun."""
    write_to(log)
    host.enter()
    inner = os.fork()  # the first process whose id is the host's
    if inner:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 255)
    for name in [one for one in os.environ if one.startswith("NEMO_PATCHES")]:
        del os.environ[name]
    os.environ.update(environment)
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"  # the host's, not the tests'
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # For the names of its events it looks through all modules, and NeMo has thousands.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    least, _, most = launch.nodes.partition(":")
    config = LaunchConfig(
        min_nodes=int(least),
        max_nodes=int(most or least),
        nproc_per_node=launch.per_host,
        run_id="made-hosts",
        rdzv_backend="c10d",
        rdzv_endpoint=launch.endpoint,
        rdzv_configs={"is_host": str(int(is_first))},
        max_restarts=launch.restarts,
        monitor_interval=0.2,
        start_method="fork",
    )
    code = 1
    try:
        elastic_launch(config, forked_rank)()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def forked_rank() -> None:
    """As `nemo-patches run` starts it, but for the import of NeMo."""
    address = wanted().address
    if address is not None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    write_to_own_log()
    if os.environ.get("NEMO_PATCHES_DISABLE") == "1":
        train()
        return
    import nemo_patches

    nemo_patches.apply()
    try:
        train()
    except Exception as error:  # as at an interpreter's end, which a fork does not have
        sys.last_value = error
        traceback.print_exc()
        raise
    finally:
        ranks.say_what_is_left()


def write_to_own_log() -> None:
    write_to(SHARED / f"rank.{os.environ['RANK']}.log")


def write_to(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def train() -> None:
    want = wanted()
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    print(f"rank {rank} of {world} starts, pid {os.getpid()}")
    time.sleep(want.late_s.get(rank, 0.0))
    import lightning.pytorch as pl
    import small_models
    import torch
    from lightning.pytorch.strategies import DDPStrategy

    torch.set_num_threads(1)
    fault = SHARED / f"fault.{rank}"

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            seeds = itertools.count(rank, 7)  # ranks have different lengths
            return (small_models.batch(seed) for seed in seeds)

    class Steps(pl.Callback):  # type: ignore[misc]  # Lightning's types are not followed
        def on_train_batch_start(self, *arguments: Any) -> None:
            if fault.exists():
                suffer(fault)

        def on_train_batch_end(
            self, trainer: Any, _: Any, out: Any, *more: Any
        ) -> None:
            print(f"step {trainer.global_step} loss {float(out['loss']):.9f}")
            time.sleep(want.pace_s)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=want.per_host,
        num_nodes=world // want.per_host,
        max_steps=want.steps,
        max_epochs=1,
        strategy=DDPStrategy(timeout=datetime.timedelta(seconds=want.group_timeout_s)),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Steps()],
    )
    model = small_models.ctc(trainer)
    trainer.fit(model, small_models.loader(Stream()))
    print(f"rank {rank} has trained, {trainer.global_step} steps")


def suffer(fault: Path) -> None:
    kind = fault.read_text()
    fault.unlink()  # the next attempt is a healthy one
    print(f"fault: {kind}")
    if kind == "sleep":
        tokenize_on_the_fly()
    elif kind == "raise":
        raise RuntimeError("bad sample 17 in shard 3")


def tokenize_on_the_fly() -> None:
    time.sleep(A_LONG_TIME_S)


if __name__ == "__main__":
    write_to_own_log()
    train()
