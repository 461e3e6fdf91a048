"""What comparing all ranks' parameters adds to a training step; prints markdown.

Two ranks on Gloo with DDP, a real Conformer; blocks of steps with it and without alternate. It takes about a minute.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the ranks share few cores
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import encoders
import torch
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import nemo_patches
from nemo_patches.uneven.checksums import Checksums
from nemo_patches.uneven.parameter_watch import parameter_watch

BLOCKS, STEPS, FRAMES = 9, 10, 200
KINDS = {"off": 0, "every 10 steps": 10, "every step": 1, "off again": 0}


def main() -> None:
    taken, alone, hook, tensors, elements = run_ranks(measured, 2, limit=900)[0].value
    print(f"2 ranks on Gloo, {os.cpu_count()} cores; {tensors} tensors of {elements:,} elements; median (quartiles)\n")
    print("| compare | ms a step | over off |\n|---|---|---|")
    for kind, steps in taken.items():
        ratios = [mine / off for mine, off in zip(steps, taken["off"], strict=True)]
        print(f"| {kind} | {quartiles(steps)} | {quartiles(ratios)} |")
    print(f"\nTraining thread's processor time: {quartiles(alone)} ms for a comparison, {hook:.1f} us for other steps.")


def quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def measured(rank: int, size: int) -> tuple[dict[str, list[float]], list[float], float, int, int]:
    """Of each kind and block, milliseconds a step; of checksums alone; of the hook alone, microseconds."""
    nemo_patches.apply(compare=1, stall_timeout=0)
    wrapped = DistributedDataParallel(encoders.conformer(n_layers=4, d_model=176, n_heads=4).train())
    parameters = list(wrapped.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    features = torch.randn(2, wrapped.module._feat_in, FRAMES)
    lengths = torch.full((2,), FRAMES)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(audio_signal=features, length=lengths)[0].square().mean().backward()
        optimizer.step()

    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for block in range(BLOCKS + 1):  # the first one warms up
        for kind, every in KINDS.items():
            parameter_watch.use(every)
            torch.distributed.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            if block:
                taken[kind].append(1000 * (time.perf_counter() - began) / STEPS)
    alone = []
    for _ in range(50):
        began = time.thread_time()
        Checksums([parameter.detach() for parameter in parameters]).numbers()
        alone.append(1000 * (time.thread_time() - began))
    parameter_watch.use(1_000_000)
    parameter_watch._has_stepped(optimizer, (), {})
    began = time.thread_time()
    for _ in range(10_000):
        parameter_watch._has_stepped(optimizer, (), {})
    hook = 100 * (time.thread_time() - began)
    return taken, alone, hook, len(parameters), sum(parameter.numel() for parameter in parameters)


if __name__ == "__main__":
    main()
