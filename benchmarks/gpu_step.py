"""Measures a ConformerEncoder's training step on one GPU, with an NCCL group of one rank, beside
stock NeMo.

Prints the step time against the encoder's own flag off (goal: within 1%) and the device
synchronizations of a forward (goal: those of the flag off; stock has its reduce's `.item()` on
top). Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import nemo_patches

VARIANTS = ("flag off", "stock", "bounded", "flag off again")
SYNCHRONIZATIONS = (
    "aten::item",
    "aten::_local_scalar_dense",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
)
BLOCKS, STEPS = 20, 10  # some 90 s on an H100
BATCH, FRAMES = 8, 1200


def main(device: str = "cuda", backend: str = "nccl") -> None:
    from nemo.collections.asr.modules.conformer_encoder import ConformerEncoder

    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    encoder = (
        ConformerEncoder(feat_in=80, n_layers=12, d_model=256, n_heads=4)
        .to(device)
        .train()
    )
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-5)
    audio = torch.randn(BATCH, 80, FRAMES, device=device)
    lengths = torch.full((BATCH,), FRAMES, device=device)

    def forward() -> Any:
        return encoder(audio_signal=audio, length=lengths)[0].square().mean()

    def step() -> None:
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    counts = {}
    for variant in VARIANTS:
        switch_to(variant, encoder)
        for _ in range(5):
            step()
        counts[variant] = synchronizations(forward)
    for number in range(BLOCKS):
        turn = number % len(VARIANTS)
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            switch_to(variant, encoder)
            step()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
            seconds[variant].append((time.perf_counter() - start) / STEPS)
    nemo_patches.revert()
    dist.destroy_process_group()

    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {backend}, one"
        f" rank. {BLOCKS} alternating blocks"
    )
    print(
        f"of {STEPS} training steps of batch {BATCH} with {FRAMES} frames. Median"
        " (quartiles).\n"
    )
    print(
        "| encoder | step, ms | step / flag off | "
        + " | ".join(f"`{name}` per forward" for name in SYNCHRONIZATIONS)
        + " |"
    )
    print("|---" * (3 + len(SYNCHRONIZATIONS)) + "|")
    for variant in VARIANTS:
        ratios = [
            mine / off
            for mine, off in zip(seconds[variant], seconds["flag off"], strict=True)
        ]
        milliseconds = [1e3 * each for each in seconds[variant]]
        found = " | ".join(map(str, counts[variant].values()))
        print(
            f"| {variant} | {spread(milliseconds, 2)} | {spread(ratios, 4)} | {found} |"
        )


def switch_to(variant: str, encoder: Any) -> None:
    encoder.sync_max_audio_length = not variant.startswith("flag off")
    if variant == "bounded":
        nemo_patches.apply()
    else:
        nemo_patches.revert()


def synchronizations(forward: Callable[[], object]) -> dict[str, int]:
    """How often one forward waits for the device, by the name of the event that does so."""
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler, record_function("forward"):
        forward()
    # The profiler itself synchronizes when it stops: only what lies within the forward counts.
    events = profiler.events()
    span = next(event.time_range for event in events if event.name == "forward")
    inside = [
        event.name
        for event in events
        if span.start <= event.time_range.start <= span.end
    ]
    return {name: inside.count(name) for name in SYNCHRONIZATIONS}


def spread(values: list[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("no GPU here, nothing measured")
