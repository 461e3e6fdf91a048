"""torchrun's agent and real ranks, one of which is killed: `diagnose` names it by the traces, and
nobody else.

The agent ends the rest by SIGTERM, before or after their own connections to that rank have closed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import encoders
import pytest
import torch
import torch.distributed as dist
from diagnosing import critical, diagnosed
from ranks import Given, Job, beside_others

import nemo_patches

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]

STEPS = 400  # far more than any rank comes to
MOMENTS = ("length sync", "encoder", "backward", "between steps", "evaluation", "any")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def rank(
    folder: str, odd: int, moment: str, at: int, after_s: float, heeds: bool
) -> None:
    """One rank under the agent. heeds: SIGTERM ends it; else the closed connection does."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL if heeds else signal.SIG_IGN)
    torch.set_num_threads(1)
    nemo_patches.apply(trace=folder)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    encoder = encoders.conformer()
    model = torch.nn.parallel.DistributedDataParallel(encoder)
    is_odd = dist.get_rank() == odd
    for step in range(STEPS):
        now = step == at
        if is_odd and now and moment in ("length sync", "any"):
            threading.Timer(after_s, kill).start()
        if not is_odd and now and moment == "length sync":
            # Meanwhile the odd one waits there, and is killed.
            threading.Event().wait(2 * after_s)
        if is_odd and now and moment == "between steps":
            kill()
        if is_odd and now and moment == "encoder":
            encoder.layers[0].register_forward_pre_hook(lambda *_: kill())
        model.train()
        out = encoders.run(model, 100)
        if is_odd and now and moment == "backward":
            out.register_hook(lambda *_: kill())
        out.sum().backward()
        if step % 10 == 9:
            encoder.eval()
            for batch in range(3):
                if is_odd and moment == "evaluation" and step >= at and batch:
                    kill()
                with torch.no_grad():
                    encoders.run(encoder, 100)


def agent(_: int, __: int, size: int, *args: object) -> None:
    """torchrun, with ranks that it forks: importing NeMo anew in each would take longer than all
    else.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["OMP_NUM_THREADS"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id="killed",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
    )
    with pytest.raises(ChildFailedError):
        elastic_launch(config, rank)(*args)


def told_their_ends(folder: Path, odd: int) -> bool:
    """Whether the traces of all other ranks tell how these ended."""
    others = [
        file.read_bytes()
        for file in folder.glob("rank-*")
        if not file.name.startswith(f"rank-{odd:05}.")
    ]
    return all(b'"k":"raised"' in text or b'"k":"end"' in text for text in others)


def job_of(moment: str, size: int, heeds: bool) -> Job:
    draw = random.Random(f"{moment} {size}")
    odd, at, after_s = (
        draw.randrange(size),
        draw.randrange(1, 30),
        round(draw.uniform(0.1, 0.4), 3),
    )
    given = (size, Given.FOLDER, odd, moment, at, after_s, heeds)
    return Job(agent, 1, *given, group=False)


@beside_others(
    *(
        job_of(moment, size, heeds)
        for moment, size, heeds in (
            *((moment, 3, False) for moment in MOMENTS),
            ("length sync", 2, False),
            ("backward", 3, True),
            ("any", 3, True),
        )
    )
)
@pytest.mark.usefixtures("results")
def test_who_was_killed_is_named_and_nobody_else(job: Job, folder: Path) -> None:
    """Not always, where SIGTERM, which torchrun sends to the others, ends them: that leaves nothing
    in a trace.
    """
    _, odd, *_, heeds = job.settings
    report = diagnosed(folder)
    accused = {rank for one in critical(report) for rank in one.ranks}
    if heeds and not told_their_ends(folder, odd):
        assert accused <= {odd}, report
        return
    first = report.findings[0]
    assert (first.id, first.ranks, first.severity) == (
        "killed",
        (odd,),
        "critical",
    ), report
    assert accused == {odd}, report
