"""Measures the exchange's rounds beside a Gloo ring's, on this machine, and prints tables as
markdown.

Every rank is a process with torch.distributed and without NeMo. Rounds of both kinds run in short
blocks that alternate. `python benchmarks/rounds.py` takes some five minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import pickle
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the ranks share few cores
# Torch looks up a name for each connection to its store.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"

import torch
import torch.distributed as dist

from nemo_patches.channel.exchange import Exchange
from nemo_patches.channel.rounds import Rounds

LIMIT = timedelta(seconds=300)  # for whatever ranks wait for
GLOO_RANKS = 64  # of a full mesh, at most
BLOCKS, ROUNDS_IN_ALL = 10, 4000  # blocks of each kind; rounds of a block, times ranks
MANY_ROUNDS = 20
ROOT_AND_CHILDREN, GIL_BLOCKS, GIL_BLOCK_S, SHORTEST_GAP_S = 17, 8, 1.0, 50e-6

requests: Counter[str] = Counter()  # of this process, to the store


class CountedStore(dist.PrefixStore):
    """Every request of the exchange's passes through one of these."""


def counted(name: str) -> Callable[..., Any]:
    request = getattr(dist.PrefixStore, name)

    def count(self: CountedStore, *arguments: Any) -> Any:
        requests[name] += 1
        return request(self, *arguments)

    return count


for name in ("add", "check", "compare_set", "get", "multi_get", "set"):
    setattr(CountedStore, name, counted(name))


@dataclass(frozen=True)
class Rank:
    number: int
    size: int
    store: dist.TCPStore

    def rounds(self) -> Rounds:
        store = CountedStore("group", self.store)
        return Exchange(lambda: store, self.number, self.size, print).rounds("encoder")

    def meet(self, event: str) -> None:
        if self.store.add(f"{event} came", 1) == self.size:
            self.store.set(event, "1")
        self.store.wait([event], LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int, nargs="*", default=[2, 8, 32, 64])
    parser.add_argument(
        "--many", type=int, default=1024, help="ranks of the second table; 0: without"
    )
    options = parser.parse_args()
    start = time.monotonic()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores.", flush=True)
    print_rounds(options.ranks)
    if options.many:
        print_many(options.many)
    print_gil_holds()
    print(f"\nMeasured in {time.monotonic() - start:.0f} s.")


# 1. The time of a round


def print_rounds(sizes: list[int]) -> None:
    print("\n## Time of a round\n")
    print(
        "Median over all ranks and rounds, and over the blocks (quartiles); CPU time is"
        " all ranks' together.\n"
    )
    print(
        "| ranks | tree, ms | Gloo ring, ms | tree / ring | tree, CPU ms | Gloo ring,"
        " CPU ms |"
    )
    print("|---|---|---|---|---|---|")
    for size in sizes:
        per_rank = run_ranks(time_rounds, size)
        tree, ring = (
            [of_block(ranks) for ranks in zip(*kind, strict=True)]
            for kind in zip(*per_rank, strict=True)
        )
        texts = [f"{size}", spread([block.wall_s for block in tree], 1e3)]
        if ring:
            ratios = [
                ours.wall_s / theirs.wall_s
                for ours, theirs in zip(tree, ring, strict=True)
            ]
            texts += [spread([block.wall_s for block in ring], 1e3), spread(ratios, 1)]
        else:
            texts += ["-", "-"]
        texts += [
            spread([block.cpu_s for block in blocks], 1e3) if blocks else "-"
            for blocks in (tree, ring)
        ]
        print(f"| {' | '.join(texts)} |", flush=True)


@dataclass(frozen=True)
class Block:
    """Of one round, on one rank or on all."""

    wall_s: float
    cpu_s: float


def of_block(ranks: tuple[Block, ...]) -> Block:
    return Block(
        statistics.median(rank.wall_s for rank in ranks),
        sum(rank.cpu_s for rank in ranks),
    )


def time_rounds(rank: Rank) -> tuple[list[Block], list[Block]]:
    """This rank's blocks on the tree, and on the ring."""
    rounds = rank.rounds()
    one_tree_round(rounds, rank, 0)
    kinds: list[tuple[Callable[[int], int], list[Block]]] = [
        (lambda value: one_tree_round(rounds, rank, value), [])
    ]
    ring_blocks: list[Block] = []
    if rank.size <= GLOO_RANKS:
        ring = dist.ProcessGroupGloo(
            dist.PrefixStore("ring", rank.store), rank.number, rank.size, LIMIT
        )
        kinds.append((lambda value: one_ring_round(ring, rank, value), ring_blocks))
    count = max(20, ROUNDS_IN_ALL // rank.size)
    for block in range(BLOCKS):
        for one_round, blocks in kinds if block % 2 else kinds[::-1]:
            for value in range(3):  # the ranks set out together
                one_round(value)
            before = cpu_s()
            taken = []
            for value in range(count):
                began = time.perf_counter()
                result = one_round(value)
                taken.append(time.perf_counter() - began)
                assert result == value * rank.size + rank.size - 1
            blocks.append(Block(statistics.median(taken), (cpu_s() - before) / count))
    return kinds[0][1], ring_blocks


def one_tree_round(rounds: Rounds, rank: Rank, value: int) -> int:
    rounds.issue(value * rank.size + rank.number)
    result = rounds.wait(LIMIT)
    assert result is not None
    return result


def one_ring_round(ring: Any, rank: Rank, value: int) -> int:
    tensor = torch.tensor([value * rank.size + rank.number])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    ring.allreduce([tensor], options).wait()
    return int(tensor)


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# 2. Many ranks


def print_many(size: int) -> None:
    print(f"\n## {size:,} ranks\n")
    before = time.monotonic()
    ranks = run_ranks(join_many, size)
    print(f"All forked, measured and gone in {time.monotonic() - before:.0f} s.\n")
    print("| what | median over the ranks | largest |")
    print("|---|---|---|")
    for field, scale, digits, text in (
        ("set_up_s", 1, 1, "set-up, from the first issue to the first result, s"),
        ("cpu_s", 1e3, 0, "CPU time of the set-up, ms"),
        ("requests", 1, 0, "requests to the store"),
        ("files", 1, 0, "files that stay open"),
        ("threads", 1, 0, "threads"),
        ("round_s", 1e3, 0, "a round, ms"),
        ("round_cpu_s", 1e3, 2, "CPU time of a round, ms"),
        ("told_s", 1, 1, "from a rank's SIGKILL until its death is known, s"),
    ):
        values = [getattr(rank, field) * scale for rank in ranks if rank is not None]
        print(
            f"| {text} | {statistics.median(values):.{digits}f} |"
            f" {max(values):.{digits}f} |",
            flush=True,
        )
    kinds = sum((rank.kinds for rank in ranks if rank is not None), Counter[str]())
    print(
        "\nRequests a rank: "
        + ", ".join(f"{kind} {kinds[kind] / len(ranks):.1f}" for kind in sorted(kinds))
        + "."
    )


@dataclass(frozen=True)
class Joined:
    set_up_s: float
    cpu_s: float
    requests: int
    kinds: Counter[str]
    files: int
    threads: int
    round_s: float
    round_cpu_s: float
    told_s: float


def join_many(rank: Rank) -> Joined:
    files, threads = open_files(), len(os.listdir("/proc/self/task"))
    rank.meet("all are here")
    before, began = cpu_s(), time.monotonic()
    rounds = rank.rounds()
    one_tree_round(rounds, rank, 0)
    set_up_s, set_up_cpu_s = time.monotonic() - began, cpu_s() - before
    one_tree_round(rounds, rank, 1)
    before, began = cpu_s(), time.monotonic()
    for value in range(MANY_ROUNDS):
        one_tree_round(rounds, rank, value)
    round_s, round_cpu_s = (
        (time.monotonic() - began) / MANY_ROUNDS,
        (cpu_s() - before) / MANY_ROUNDS,
    )
    files, threads = open_files() - files, len(os.listdir("/proc/self/task")) - threads
    kinds = requests.copy()
    rank.meet("before the death")
    if rank.number == 1:  # an inner rank
        rank.store.set("died at", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(Exception):
        while rounds.poll() is not None or rounds.wait(LIMIT) is None:
            rounds.issue(0)
            rounds.wait(LIMIT)
    told_s = time.monotonic() - float(rank.store.get("died at"))
    total = sum(kinds.values())
    return Joined(
        set_up_s,
        set_up_cpu_s,
        total,
        kinds,
        files,
        threads,
        round_s,
        round_cpu_s,
        told_s,
    )


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


# 3. What the exchange's thread takes from Python's other threads


def print_gil_holds() -> None:
    print("\n## Holds of Python's GIL\n")
    print(
        f"The root of {ROOT_AND_CHILDREN} ranks, its 16 children on the same cores. Its"
        " main thread is busy in Python"
    )
    print(
        f"and notes how long it does not run (from {SHORTEST_GAP_S * 1e6:.0f} us), in"
        f" blocks of {GIL_BLOCK_S:.0f} s:"
    )
    print(
        "in which it waits for no round, and in which rounds run as fast as they can.\n"
    )
    root = run_ranks(measure_gaps, ROOT_AND_CHILDREN)[0]
    print(
        "| blocks | gaps a second | median, us | 99 %, ms | longest, ms | rounds a"
        " second | thread's CPU a round, us |"
    )
    print("|---|---|---|---|---|---|---|")
    for title, blocks in (("without rounds", root[0::2]), ("with rounds", root[1::2])):
        gaps = [gap for block in blocks for gap in block.gaps]
        rounds = sum(block.rounds for block in blocks)
        per_round = (
            f"{sum(block.thread_cpu_s for block in blocks) / rounds * 1e6:.0f}"
            if rounds
            else "-"
        )
        seconds = GIL_BLOCK_S * len(blocks)
        print(
            f"| {title} | {len(gaps) / seconds:.0f} |"
            f" {statistics.median(gaps) * 1e6:.0f} |"
            f" {statistics.quantiles(gaps, n=100)[98] * 1e3:.1f} |"
            f" {max(gaps) * 1e3:.1f} | {rounds / seconds:.0f} | {per_round} |"
        )


@dataclass(frozen=True)
class Gaps:
    gaps: list[float]
    rounds: int
    thread_cpu_s: float


def measure_gaps(rank: Rank) -> list[Gaps]:
    rounds, found = rank.rounds(), []
    one_tree_round(rounds, rank, 0)
    (thread,) = (
        one.native_id for one in threading.enumerate() if "exchange" in one.name
    )
    for block in range(2 * GIL_BLOCKS):
        rank.meet(f"block {block}")
        with_rounds = block % 2 == 1
        end = time.perf_counter() + GIL_BLOCK_S
        if rank.number == 0:
            before, count, gaps = thread_cpu_s(thread), rounds.latest.number, []
            is_last = False
            last = time.perf_counter()
            while not is_last or rounds.poll() is None:
                now = time.perf_counter()
                if now - last >= SHORTEST_GAP_S:
                    gaps.append(now - last)
                if with_rounds and not is_last and rounds.poll() is not None:
                    is_last = now >= end
                    rounds.issue(is_last)  # 1: no more in this block
                    now = time.perf_counter()
                is_last = is_last or (not with_rounds and now >= end)
                last = now
            found.append(
                Gaps(gaps, rounds.latest.number - count, thread_cpu_s(thread) - before)
            )
        while rank.number and with_rounds:
            rounds.issue(0)
            if rounds.wait(LIMIT) == 1:
                break
    return found


def thread_cpu_s(thread: int | None) -> float:
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


# Common to all


def spread(values: list[float], scale: float) -> str:
    low, middle, high = (
        value * scale for value in statistics.quantiles(values, n=4, method="inclusive")
    )
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def run_ranks(function: Callable[[Rank], Any], size: int) -> list[Any]:
    """What `function` returned on each of `size` processes, None where it was killed; all are gone
    afterwards.
    """
    gc.collect()
    gc.freeze()  # a rank's garbage collector leaves alone, and shared, what it was forked with
    sys.stdout.flush()
    ours, theirs = os.pipe()
    if (server := os.fork()) == 0:
        serve_store(theirs)
    os.close(theirs)
    port = int(os.read(ours, 100))
    os.close(ours)
    processes = [server]
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder, f"{number}") for number in range(size)]
        try:
            for number, result in enumerate(results):
                if (process := os.fork()) == 0:
                    run_rank(function, number, size, port, result)
                processes.append(process)
            deadline = time.monotonic() + 2 * LIMIT.total_seconds()
            left = set(processes) - {server}
            while left and time.monotonic() < deadline:
                ended = {
                    process: status
                    for process in left
                    if (status := os.waitpid(process, os.WNOHANG))[0]
                }
                if any(
                    os.WIFEXITED(status) and os.WEXITSTATUS(status)
                    for _, status in ended.values()
                ):
                    raise RuntimeError("a rank has failed, see its traceback")
                left -= ended.keys()
                time.sleep(0.05)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
        return [
            pickle.loads(result.read_bytes()) if result.exists() else None
            for result in results
        ]


def serve_store(pipe: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(pipe, str(server.port).encode())
    while True:
        signal.pause()


def run_rank(
    function: Callable[[Rank], Any], number: int, size: int, port: int, result: Path
) -> None:
    """Does not return."""
    try:
        torch.set_num_threads(1)
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LIMIT
        )
        rank = Rank(number, size, store)
        value = function(rank)
        result.write_bytes(pickle.dumps(value))
        if function is not join_many:  # whose rank 1 dies
            rank.meet("all have measured")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
