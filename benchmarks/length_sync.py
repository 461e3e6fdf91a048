"""Measures the length sync beside stock NeMo on this machine's CPU, in one run, and prints the
ratios as markdown.

Every rank is a process of its own on Gloo, with NeMo's own ConformerEncoder. What is compared runs
in short blocks that alternate, so that whatever else the machine does meets both sides. `make
benchmark` takes about three minutes.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, cast
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the ranks share few cores

import torch
import torch.distributed as dist

import nemo_patches

FRAMES = 1000
AGAIN = "stock again"  # against itself
VARIANTS = ("stock", "bounded", "local", AGAIN)
GOALS = {"bounded": "0.7"}
# Blocks at 2 ranks; of more ranks fewer, which take longer.
TIGHT_BLOCKS, TIGHT_CALLS = 150, 100
SPACED_BLOCKS, SPACED_CALLS = 60, 9
# Seconds of compute before a spaced call; seconds from call to call, for each rank.
COMPUTE, TICK = 0.002, 0.003

Rank = Callable[[int, int], Any]


def main() -> None:
    start = time.monotonic()
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, ranks on Gloo, one thread"
        " each.",
        flush=True,
    )
    print_call_times()
    print_skipped_calls()
    print_footprint()
    print(f"\nMeasured in {time.monotonic() - start:.0f} s.")


# 1. The time of one call


def print_call_times() -> None:
    print("\n## Time of one `update_max_seq_length` call\n")
    print(
        "Blocks of each kind alternate: calls in a row (tight), or with compute and a"
        " pause before each (spaced). A"
    )
    print(
        "block counts as the median of its calls, in the last column but one as their"
        " mean, which holds every hiccup of"
    )
    print(
        "the scheduler; shown is the median over the blocks (quartiles). `stock again`"
        " is stock against itself: how"
    )
    print("much of a ratio is this machine's noise.\n")
    print(
        "| ranks | calls | sync | stock, us | ours, us | ours / stock | goal, at most |"
        " by the means | rounds a call |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for size in (2, 4, 8):
        for spaced in (False, True):
            per_rank = run_ranks(partial(time_calls, spaced=spaced), size, limit=100)
            blocks = [
                mean_over_ranks(repetition)
                for repetition in zip(*per_rank, strict=True)
            ]
            stock = [block["stock"].median for block in blocks]
            for sync in VARIANTS[1:]:
                ours = [block[sync].median for block in blocks]
                ratios = [
                    mine / theirs for mine, theirs in zip(ours, stock, strict=True)
                ]
                by_means = [block[sync].mean / block["stock"].mean for block in blocks]
                rounds = statistics.mean(block[sync].rounds for block in blocks)
                print(
                    f"| {size} | {'spaced' if spaced else 'tight'} | {sync} |"
                    f" {spread(stock, 1e6, 1)} | {spread(ours, 1e6, 1)} |"
                    f" {spread(ratios, 1, 3)} | {GOALS.get(sync, '-')} |"
                    f" {spread(by_means, 1, 3)} | {rounds:.2f} |",
                    flush=True,
                )


class Block(NamedTuple):
    """Seconds per call of one block, by median and by mean, and rounds per call."""

    median: float
    mean: float
    rounds: float


def time_calls(rank: int, size: int, spaced: bool) -> list[dict[str, Block]]:
    """For each repetition and variant, its block."""
    encoder = new_encoder()
    for variant in VARIANTS:
        switch_to(variant)
        check_all_reduces(encoder, expected=10 if variant.startswith("stock") else 0)
    repetitions = []
    for number in range((SPACED_BLOCKS if spaced else TIGHT_BLOCKS) * 2 // size):
        found = {}
        turn = number % len(VARIANTS)
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            switch_to(variant)
            calls = SPACED_CALLS if spaced else TIGHT_CALLS
            for _ in range(5):
                call(encoder)
            dist.barrier()
            before = rounds_so_far()
            measure = time_spaced if spaced else time_tight
            taken = measure(encoder, calls, size)
            rounds = (rounds_so_far() - before) / calls
            found[variant] = Block(
                statistics.median(taken), statistics.mean(taken), rounds
            )
            dist.barrier()
        repetitions.append(found)
    return repetitions


def time_tight(encoder: torch.nn.Module, calls: int, size: int) -> list[float]:
    taken = []
    for _ in range(calls):
        start = time.perf_counter()
        call(encoder)
        taken.append(time.perf_counter() - start)
    return taken


def time_spaced(encoder: torch.nn.Module, calls: int, size: int) -> list[float]:
    # The clock, which all processes share, starts the ranks together. A barrier would leave the
    # default group's threads awake for stock's reduce, and ours would still have to wake its own.
    tick, taken = TICK * size, []
    for _ in range(calls):
        compute()
        time.sleep(tick - time.perf_counter() % tick)
        start = time.perf_counter()
        call(encoder)
        taken.append(time.perf_counter() - start)
    return taken


def compute() -> None:
    matrix, done = torch.ones(128, 128), time.perf_counter() + COMPUTE
    while time.perf_counter() < done:
        matrix @ matrix


def switch_to(variant: str, timeout: float = 10) -> None:
    if variant.startswith("stock"):
        nemo_patches.revert()
    else:
        nemo_patches.apply(
            sync=cast(Any, variant), timeout=timeout, on_timeout="fallback"
        )


def check_all_reduces(encoder: torch.nn.Module, expected: int) -> None:
    """Ten calls; that stock really reduces on the default group, and that ours never does."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        for _ in range(10):
            call(encoder)
    if all_reduce.call_count != expected:
        raise RuntimeError(
            f"{all_reduce.call_count} all-reduces on the default group in 10 calls, not"
            f" {expected}"
        )


def mean_over_ranks(ranks: Sequence[dict[str, Block]]) -> dict[str, Block]:
    return {
        variant: Block(
            *(
                statistics.mean(values)
                for values in zip(*(found[variant] for found in ranks), strict=True)
            )
        )
        for variant in VARIANTS
    }


# 2. What one skipped call costs the steps after it

WAIT = 0.3
STEPS, SKIPPED = 20, 4
LATER = STEPS - SKIPPED - 1
OURS_REPETITIONS = 10


def print_skipped_calls() -> None:
    print("\n## Later steps delayed after one skipped call\n")
    print(
        f"One rank skips the encoder call of step {SKIPPED + 1} of {STEPS}; every step"
        " ends in an all-reduce on the"
    )
    print(
        f"default group. A wait lasts at most {WAIT} s, ours an eighth of it after the"
        " first in vain, then a 64th."
    )
    print(
        "Naive: `work.wait(timeout)` on a Gloo group of its own. Bounded: one figure"
        " for each repetition.\n"
    )
    print(
        f"| ranks | sync | of {LATER} later steps, waited out the timeout | goal | or a"
        " part of it | ms lost |"
    )
    print("|---|---|---|---|---|---|")
    for size in (2, 4):
        for sync, repetitions in (("naive", 1), ("bounded", OURS_REPETITIONS)):
            per_rank = run_ranks(
                partial(skip_one_call, sync=sync, repetitions=repetitions),
                size,
                limit=60,
            )
            full, part, lost = [], [], []
            for loops in zip(*per_rank, strict=True):  # one loop, as each rank saw it
                steps = [max(seconds) for seconds in zip(*loops, strict=True)]
                full.append(sum(seconds >= WAIT for seconds in steps[SKIPPED + 1 :]))
                part.append(sum(0 < seconds < WAIT for seconds in steps[SKIPPED + 1 :]))
                lost.append(f"{sum(steps[SKIPPED + 1 :]) * 1e3:.0f}")
            print(
                f"| {size} | {sync} | {', '.join(map(str, full))} |"
                f" {'0' if sync == 'bounded' else '-'} | {', '.join(map(str, part))} |"
                f" {', '.join(lost)} |",
                flush=True,
            )


def skip_one_call(
    rank: int, size: int, sync: str, repetitions: int
) -> list[list[float]]:
    """For each repetition and step: the seconds that this rank waited in vain."""
    loops = []
    for number in range(repetitions):
        one_call = naive_call() if sync == "naive" else bounded_call()
        one_call()
        one_call()
        dist.barrier()
        skipping = number % size == rank
        steps = []
        for step in range(STEPS):
            start = time.perf_counter()
            in_vain = False if skipping and step == SKIPPED else one_call()
            steps.append(time.perf_counter() - start if in_vain else 0.0)
            compute()
            dist.all_reduce(torch.ones(1000))  # as the gradients would
        if skipping and sync == "naive":
            one_call()  # made up for, so that the naive group ends with nothing pending
        dist.barrier()
        loops.append(steps)
    return loops


def naive_call() -> Callable[[], bool]:
    group = dist.new_group(backend="gloo")

    def one_call() -> bool:
        work = dist.all_reduce(
            torch.tensor([FRAMES]), dist.ReduceOp.MAX, group=group, async_op=True
        )
        try:
            work.wait(timedelta(seconds=WAIT))
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            return True
        return False

    return one_call


def bounded_call() -> Callable[[], bool]:
    encoder = new_encoder()
    switch_to("bounded")
    # Connecting may take longer than WAIT, and is not what is measured here.
    call(encoder)
    switch_to("bounded", timeout=WAIT)

    def one_call() -> bool:
        before = timeouts_so_far()
        call(encoder)
        return timeouts_so_far() > before

    return one_call


# 3. What the sync adds to a process

ENCODERS = 5
KINDS = (
    "resident memory, MiB",
    "of it anonymous, MiB",
    "threads",
    "open files and sockets",
)


def print_footprint() -> None:
    print("\n## Added to each process\n")
    print(
        "Median (quartiles) over ranks and 3 runs; before: stock has reduced once for"
        " each encoder.\n"
    )
    print("| ranks | what | before | first call adds | each further encoder adds |")
    print("|---|---|---|---|---|")
    for size in (2, 4):
        samples = [
            sample for _ in range(3) for sample in run_ranks(footprints, size, limit=60)
        ]
        for index, kind in enumerate(KINDS):
            before, one, all_of_them = zip(
                *([taken[index] for taken in sample] for sample in samples), strict=True
            )
            first = [then - now for now, then in zip(before, one, strict=True)]
            further = [
                (then - now) / (ENCODERS - 1)
                for now, then in zip(one, all_of_them, strict=True)
            ]
            digits = 2 if "MiB" in kind else 0
            print(
                f"| {size} | {kind} | {statistics.median(before):.0f} "
                f"| {spread(first, 1, digits)} | {spread(further, 1, digits)} |",
                flush=True,
            )


def footprints(rank: int, size: int) -> list[tuple[float, ...]]:
    """Before the sync, after the first encoder's first call, and after those of all encoders."""
    encoders = [new_encoder() for _ in range(ENCODERS)]
    for encoder in encoders:
        call(encoder)
    found = [footprint()]
    switch_to("bounded")
    for encoder in encoders:
        call(encoder)
        call(encoder)
        if encoder in (encoders[0], encoders[-1]):
            dist.barrier()
            time.sleep(0.5)  # a helper thread that has nothing to do ends
            found.append(footprint())
    return found


def footprint() -> tuple[float, ...]:
    with open("/proc/self/status") as lines:
        status = dict(line.split(":", 1) for line in lines)
    memory = [int(status[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon")]
    return (*memory, int(status["Threads"]), len(os.listdir("/proc/self/fd")))


# Common to all


def new_encoder() -> Any:
    from nemo.collections.asr.modules.conformer_encoder import ConformerEncoder

    return ConformerEncoder(feat_in=80, n_layers=2, d_model=64, n_heads=4).train()


def call(encoder: Any) -> None:
    encoder.update_max_seq_length(seq_length=FRAMES, device=torch.device("cpu"))


def rounds_so_far() -> int:
    return sum(encoder.rounds for encoder in nemo_patches.status().encoders)


def timeouts_so_far() -> int:
    return sum(encoder.timeouts for encoder in nemo_patches.status().encoders)


def spread(values: Sequence[float], scale: float, digits: int) -> str:
    low, middle, high = (
        value * scale for value in statistics.quantiles(values, n=4, method="inclusive")
    )
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def run_ranks(function: Rank, size: int, limit: float) -> list[Any]:
    """`function(rank, size)` on `size` processes, and what each returned; all are gone afterwards,
    whatever happens.
    """
    context = multiprocessing.get_context("forkserver")
    # One import for all ranks.
    context.set_forkserver_preload(["nemo.collections.asr.modules.conformer_encoder"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_process,
                args=(function, rank, size, store.port, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return receive_all(pipes, time.monotonic() + limit)
    finally:
        for process in processes:
            process.kill()
            process.join()


def receive_all(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[Connection, Any] = {}
    while missing := [pipe for pipe in pipes if pipe not in results]:
        ready = wait(missing, timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            raise TimeoutError(
                f"ranks {[pipes.index(pipe) for pipe in missing]} did not finish in"
                " time"
            )
        for pipe in ready:
            assert isinstance(pipe, Connection)
            # EOFError: that rank died, and its traceback is on stderr.
            results[pipe] = pipe.recv()
    return [results[pipe] for pipe in pipes]


def rank_process(
    function: Rank, rank: int, size: int, port: int, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    # Its warnings are what section 2 provokes.
    logging.getLogger("nemo_patches").setLevel(logging.ERROR)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    pipe.send(function(rank, size))
    pipe.poll(None)  # until killed: the others may still need this rank


if __name__ == "__main__":
    main()
