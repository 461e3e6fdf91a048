"""Measures what a trace costs: a training step of the demo's model, traced against untraced, in one
run (goal: 1%).

Two ranks under DDP on this machine's CPU. What is compared runs in short blocks that alternate, so
that whatever else the machine does meets both sides. Takes about two minutes.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
import tempfile
import time
import timeit
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the ranks share few cores

import torch
import torch.distributed as dist

import nemo_patches
from nemo_patches.sync.encoder_rounds import Listeners
from nemo_patches.sync.settings import Settings
from nemo_patches.tracing import recorded_forward
from nemo_patches.tracing.recorder import tracing

RANKS = 2
BLOCKS, STEPS = 60, 6
SAMPLES = 16_000 * 6
VARIANTS = ("untraced", "traced", "untraced again")
LIMIT = 400


class Block(NamedTuple):
    """Seconds per step of one block: by the clock, of the processor in the training thread, and in
    all threads.
    """

    wall: float
    thread: float
    process: float


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        blocks = run_ranks(Path(folder))
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, {RANKS} ranks on Gloo, one"
        f" thread each, DDP. {BLOCKS}"
    )
    print(
        f"alternating blocks of {STEPS} training steps of the demo's model;"
        f" {size / 1024:.0f} KiB of traces."
    )
    print("Median (quartiles) over the blocks of all ranks.\n")
    print(
        "| | step, ms | step / untraced | CPU of the training thread / untraced | CPU"
        " of all threads / untraced |"
    )
    print("|---|---|---|---|---|")
    for variant in VARIANTS:
        ratios = [
            [
                mine[index] / theirs[index]
                for mine, theirs in zip(
                    blocks[variant], blocks["untraced"], strict=True
                )
            ]
            for index in range(3)
        ]
        milliseconds = [block.wall * 1e3 for block in blocks[variant]]
        print(
            f"| {variant} | {spread(milliseconds, 1)} | "
            + " | ".join(spread(ratio, 4) for ratio in ratios)
            + " |"
        )
    step = statistics.median(block.wall for block in blocks["untraced"])
    thread, process = call_alone()
    print(
        f"\nA call of an empty encoder, alone, traced less untraced: {thread * 1e6:.0f}"
        " us of the training thread, "
    )
    print(
        f"{process * 1e6:.0f} us of all threads: {thread / step:.2%} and"
        f" {process / step:.2%} of such a step."
    )
    print(
        f"\nOff: what nobody listens to costs {unheard() * 1e9:.0f} ns; a call has two."
    )


class Empty(torch.nn.Module):
    """An encoder for the recorder, and next to nothing else."""

    def forward(self, audio_signal: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return audio_signal


def call_alone() -> tuple[float, float]:
    """Seconds of the processor that recording adds to a call: in the calling thread, in all. The
    file's cost too.
    """
    calls, encoder = 2000, Empty()
    signal, length = torch.ones(2, 80, 600), torch.tensor([600, 500])

    def seconds() -> tuple[float, float]:
        begin = time.thread_time(), time.process_time()
        for _ in range(calls):
            encoder(audio_signal=signal, length=length)
            time.sleep(0.002)  # as in training, the writer wakes for each call
        return time.thread_time() - begin[0], time.process_time() - begin[1]

    untraced = seconds()
    original: Any = Empty.forward
    name, Empty.forward = recorded_forward.record_forward(original)  # type: ignore[method-assign]
    setattr(Empty, name, original)
    with tempfile.TemporaryDirectory() as folder:
        tracing.start(Settings(trace=Path(folder)))
        traced = seconds()
        tracing.stop()
    thread, process = (
        ((mine - theirs) / calls) for mine, theirs in zip(traced, untraced, strict=True)
    )
    return thread, process


def unheard() -> float:
    """Seconds, less those of the empty loop."""
    loops = 1_000_000
    nobody, encoder = Listeners(), torch.nn.Identity()

    def tell() -> None:
        nobody.tracer.encoder_grew(encoder, 0, 1)

    tells = min(timeit.repeat(tell, number=loops))
    return (tells - min(timeit.repeat("pass", number=loops))) / loops


def train(rank: int, folder: Path) -> dict[str, list[Block]]:
    step = training_step(rank, folder)
    found: dict[str, list[Block]] = {variant: [] for variant in VARIANTS}
    for number in range(BLOCKS):
        turn = number % len(VARIANTS)
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            nemo_patches.apply(trace=folder if variant == "traced" else "")
            step()
            dist.barrier()
            start = time.perf_counter(), time.thread_time(), time.process_time()
            for _ in range(STEPS):
                step()
            end = time.perf_counter(), time.thread_time(), time.process_time()
            found[variant].append(
                Block(
                    *(
                        (after - before) / STEPS
                        for before, after in zip(start, end, strict=True)
                    )
                )
            )
    return found


def training_step(rank: int, folder: Path) -> Any:
    from nemo.collections.asr.models import EncDecDenoiseMaskedTokenPredModel
    from omegaconf import OmegaConf

    from nemo_patches.tools.demo import nest
    from nemo_patches.tools.demo.jobs import BATCH_SIZE

    config = nest.model(folder, rank)
    del config["train_ds"], config["validation_ds"]
    torch.manual_seed(0)
    model = Training(EncDecDenoiseMaskedTokenPredModel(cfg=OmegaConf.create(config)))
    model.model._modules.pop("decoder_ssl", None)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    audio, lengths = (
        torch.randn(BATCH_SIZE, SAMPLES),
        torch.tensor([SAMPLES, SAMPLES * 3 // 4]),
    )

    def step() -> None:
        optimizer.zero_grad()
        parallel(audio, lengths).backward()
        optimizer.step()

    return step


class Training(torch.nn.Module):
    """The model's training step, without a trainer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, audio: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        log_probs, encoded_len, masks, tokens = self.model.forward(
            input_signal=audio,
            input_signal_length=lengths,
            noisy_input_signal=audio,
            noisy_input_signal_length=lengths,
            apply_mask=True,
        )
        loss: torch.Tensor = self.model.loss(
            masks=masks,
            decoder_outputs=log_probs,
            targets=tokens,
            decoder_lengths=encoded_len,
        )
        return loss


def spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def run_ranks(folder: Path) -> dict[str, list[Block]]:
    """The blocks of all ranks, by variant; all processes are gone afterwards, whatever happens."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    try:
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_process,
                args=(rank, store.port, folder, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        found: dict[str, list[Block]] = {variant: [] for variant in VARIANTS}
        deadline = time.monotonic() + LIMIT
        for pipe in pipes:
            if not pipe.poll(deadline - time.monotonic()):
                raise TimeoutError(f"a rank did not finish in {LIMIT} s")
            for variant, blocks in pipe.recv().items():
                found[variant] += blocks
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def rank_process(rank: int, port: int, folder: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    logging.getLogger("nemo_patches").setLevel(logging.WARNING)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    pipe.send(train(rank, folder))
    pipe.poll(None)  # until killed: the other may still need this rank


if __name__ == "__main__":
    main()
