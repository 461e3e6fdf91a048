"""Shows why the rounds do not run on Gloo (docs/design.md): two ranks on this machine, torch alone,
about a minute.

python benchmarks/gloo_facts.py
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SECOND = timedelta(seconds=1)
EXIT_GROUP_TIMEOUT = timedelta(seconds=15)


def maximum() -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return options


def own_group(rank: int, port: int, timeout: timedelta) -> Any:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 1)
    return dist.ProcessGroupGloo(store, rank, 2, timeout)


def outcome_of(work: Any, limit: timedelta) -> str:
    start = time.monotonic()
    try:
        work.wait(limit)
        return f"came after {time.monotonic() - start:.2f} s"
    except RuntimeError as error:
        return (
            f"failed after {time.monotonic() - start:.2f} s:"
            f" {str(error).splitlines()[0][-50:]}"
        )


def late_rank(rank: int, port: int, group_timeout: timedelta) -> None:
    group = own_group(rank, port, group_timeout)
    value = torch.tensor([rank + 1])
    if rank == 1:
        time.sleep(5)
    work = group.allreduce([value], maximum())
    if rank == 0:
        print(f"  first wait, 1 s: {outcome_of(work, SECOND)}", flush=True)
        print(
            f"  second wait, 8 s: {outcome_of(work, 8 * SECOND)}, value {value.item()}",
            flush=True,
        )
    else:
        outcome_of(work, SECOND)
    try:
        again = outcome_of(group.allreduce([value], maximum()), 2 * SECOND)
    except RuntimeError as error:
        again = f"refused: {str(error).splitlines()[0][-50:]}"
    if rank == 0:
        print(f"  the next reduce: {again}", flush=True)
    time.sleep(1)


def short_wait(rank: int, port: int) -> None:
    group = own_group(rank, port, 60 * SECOND)
    for microseconds in (1000, 999):
        if rank == 1:
            time.sleep(2)
        work = group.allreduce([torch.ones(1)], maximum())
        if rank == 0:
            print(
                f"  wait of {microseconds} us:"
                f" {outcome_of(work, timedelta(microseconds=microseconds))}",
                flush=True,
            )
        work.wait()


def alarm(rank: int, port: int) -> None:
    def on_alarm(*_: object) -> None:
        raise TimeoutError

    group = own_group(rank, port, 60 * SECOND)
    signal.signal(signal.SIGALRM, on_alarm)
    if rank == 1:
        time.sleep(5)
        group.allreduce([torch.ones(1)], maximum()).wait()
        return
    start = time.monotonic()
    signal.alarm(2)
    try:
        group.allreduce([torch.ones(1)], maximum()).wait()
    except TimeoutError:
        print(
            f"  TimeoutError after {time.monotonic() - start:.2f} s, for an alarm"
            " of 2 s",
            flush=True,
        )


def leave_pending(rank: int, port: int) -> None:
    group = own_group(rank, port, EXIT_GROUP_TIMEOUT)
    if rank == 1:
        time.sleep(60)
        return
    work = group.allreduce([torch.ones(1)], maximum())
    outcome_of(work, SECOND)


def run(
    function: Callable[..., None], *args: Any, wait_for: tuple[int, ...] = (0, 1)
) -> float:
    """Two spawned processes, each ended after a minute at the latest; seconds until those in
    `wait_for` had ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=function, args=(rank, port, *args)) for rank in (0, 1)
    ]
    start = time.monotonic()
    for process in ranks:
        process.start()
    for rank in wait_for:
        ranks[rank].join(60)
    took = time.monotonic() - start
    for process in ranks:
        process.kill()
        process.join()
    return took


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(
        "1. wait(timeout) leaves the reduce alive; it completes when the late rank"
        " comes (group timeout 60 s)"
    )
    run(late_rank, 60 * SECOND)
    print("2. the group's own timeout kills the group for good (group timeout 3 s)")
    run(late_rank, 3 * SECOND)
    print(
        "3. a pending reduce holds up the interpreter's exit (group timeout"
        f" {EXIT_GROUP_TIMEOUT.seconds} s)"
    )
    print(f"  ended {run(leave_pending, wait_for=(0,)):.1f} s after its start")
    print(
        "4. a wait of less than a millisecond has no limit (the other rank is 2 s late)"
    )
    run(short_wait)
    print("5. signal.alarm around a reduce fires only after it")
    run(alarm)


if __name__ == "__main__":
    main()
