"""One task of a training job under srun, with not a word of nemo_patches: `training.py KEY=VALUE ...`

kind: bare (no torch), plain (torch's DDP alone), lightning, or nemo (a small Conformer-CTC). steps, pace_s, workers.
fault=WHAT@RANK@STEP: what happens to that rank there. once: only before the first requeue.
requeue=SIGNAL: Lightning's own requeueing, by that signal. timeout_s: of the process group.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

GIVEN = dict(argument.split("=", 1) for argument in sys.argv[1:])
RANK = int(os.environ["SLURM_PROCID"])
SIZE = int(os.environ["SLURM_NTASKS"])
NODES = int(os.environ["SLURM_STEP_NUM_NODES"])
ATTEMPT = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
STEPS = int(GIVEN.get("steps", 3000))
PACE_S = float(GIVEN.get("pace_s", 0.05))
TIMEOUT = datetime.timedelta(seconds=float(GIVEN.get("timeout_s", 300)))


def say(text: str) -> None:
    """In one piece, so that lines of several tasks do not mix."""
    os.write(1, f"task {RANK}: {text}\n".encode())


def read_shard() -> None:
    while True:
        time.sleep(3600)


def fault_at(step: int) -> None:
    what, rank, at = (*GIVEN.get("fault", "").split("@"), "", "")[:3]
    is_over = "once" in GIVEN and ATTEMPT > 0
    if not what or is_over or int(rank) != RANK or step != int(at):
        return
    say(f"fault {what} at step {step}")
    if what == "sleep":
        read_shard()
    elif what == "raise":
        raise RuntimeError("bad sample 17 in shard 3")
    elif what.isdecimal():
        os._exit(int(what))
    else:
        os.kill(os.getpid(), signal.Signals[f"SIG{what}"])


def step_done(step: int, loss: float) -> None:
    if step < 3 or step % 10 == 0:
        say(f"step {step} loss {loss:.6f}")
    time.sleep(PACE_S)


def bare() -> None:
    for step in range(STEPS):
        fault_at(step)
        step_done(step + 1, 0.0)


def first_host() -> str:
    name, _, numbers = os.environ["SLURM_STEP_NODELIST"].partition("[")
    return name.split(",")[0] + numbers.replace("-", ",").split(",")[0].rstrip("]")


def plain() -> None:
    """Meets at Lightning's address and port."""
    import torch
    import torch.distributed as dist

    port = 15000 + int(os.environ["SLURM_JOB_ID"][-4:])
    at = f"tcp://{first_host()}:{port}"
    dist.init_process_group(
        "gloo", init_method=at, rank=RANK, world_size=SIZE, timeout=TIMEOUT
    )
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(STEPS):
        fault_at(step)
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        step_done(step + 1, float(loss))
    dist.destroy_process_group()


def trainer() -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Watch(pl.Callback):
        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int
        ) -> None:
            fault_at(trainer.global_step)

        def on_train_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, batch_idx: int
        ) -> None:
            step_done(trainer.global_step, float(out["loss"]))

    wanted = signal.Signals[f"SIG{GIVEN.get('requeue', 'USR2')}"]
    return pl.Trainer(
        plugins=[SLURMEnvironment(requeue_signal=wanted)],
        accelerator="cpu",
        devices=SIZE // NODES,
        num_nodes=NODES,
        max_steps=STEPS,
        max_epochs=1,
        strategy=DDPStrategy(timeout=TIMEOUT),
        logger=False,
        enable_checkpointing=False,
        callbacks=[Watch()],
        default_root_dir=os.getcwd(),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )


def lightning() -> None:
    import lightning.pytorch as pl
    import torch

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-4)

    trainer().fit(Model(), torch.utils.data.DataLoader(torch.ones(100_000, 4)))


def nemo() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch
    from small_models import ctc

    class Clips(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> Any:
            chance = torch.Generator().manual_seed(1000 * RANK + index)
            samples = 4000 + 4000 * ((index + RANK) % 4)
            signals = 0.1 * torch.randn(2, samples, generator=chance)
            tokens = torch.randint(1, 5, (2, 3), generator=chance)
            return signals, torch.full((2,), samples), tokens, torch.full((2,), 3)

    torch.set_num_threads(1)
    fitting = trainer()
    torch.manual_seed(0)
    fitting.fit(ctc(fitting), torch.utils.data.DataLoader(Clips(), batch_size=None))


if __name__ == "__main__":
    say(f"starts on {os.uname().nodename}, pid {os.getpid()}, attempt {ATTEMPT}")
    {"bare": bare, "plain": plain, "lightning": lightning, "nemo": nemo}[
        GIVEN.get("kind", "plain")
    ]()
    say("training has ended")
