"""What ranks measure together: rounds of the side channel, and collectives of the job's backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from nemo_patches.channel.side_channel import RoundFailed, SideChannel
from nemo_patches.text import first_line
from nemo_patches.tools.doctor.rank_place import RankPlace
from nemo_patches.tools.doctor.ranks import Measured, Smoke

if TYPE_CHECKING:
    import torch.distributed as dist

_Result = TypeVar("_Result")

_MEASUREMENTS = 20  # rounds, and requests to the store
_SMOKE_BYTES = 1 << 20  # of each collective over the job's backend


def measure(store: dist.Store, whole: dist.Store, present: list[int], rank: int, timeout: timedelta) -> Measured:
    """Requests to the store first, then rounds of these ranks, as the length sync makes them.

    whole: the job's store, in which the side channel has a part of its own.
    """
    measured = Measured(rank, requests=tuple(_timed(lambda: store.get("present"))))
    with _channel(store, whole, present, rank) as (channel, said):
        rounds, syncs, clocks = channel.rounds("nemo-patches doctor"), [], []
        try:
            for _ in range(_MEASUREMENTS + 1):
                began = time.perf_counter()
                rounds.issue(0)
                if rounds.wait(timeout) is None:
                    why = f"no round within {timeout.total_seconds():g} s"
                    return Measured(rank, requests=measured.requests, problem="; ".join([why, *said]))
                syncs.append(time.perf_counter() - began)
                clocks.append(time.time())
        except RoundFailed as error:
            return Measured(rank, requests=measured.requests, problem=first_line(error))
    # The ranks come to the first one at different times.
    return Measured(rank, tuple(syncs[1:]), measured.requests, tuple(clocks[1:]))


@contextmanager
def _channel(
    store: dist.Store, whole: dist.Store, present: list[int], rank: int
) -> Iterator[tuple[SideChannel, list[str]]]:
    """This rank's side channel among the ranks present, and the list that its messages go to."""
    import torch.distributed as dist

    from nemo_patches.channel.store import JobStore

    own = dist.PrefixStore(f"nemo_patches/doctor/rounds/{store.get('name').decode()}", whole)
    said: list[str] = []
    # It stays when the rounds are over: a neighbour may still lack the last result, and this process ends soon.
    yield SideChannel(JobStore(own, present.index(rank)), present.index(rank), len(present), said.append), said


def smoke(store: dist.Store, here: RankPlace, present: list[int], timeout: timedelta) -> Smoke:
    """Three collectives of 1 MB over the backend that the job would have; what has no end in time is left alone."""
    import torch
    import torch.distributed as dist

    # A client of its own: a wait for a rank that never comes holds the client's lock, in a thread that is left alone.
    client = dist.TCPStore(here.address, here.port, is_master=False, timeout=timeout, wait_for_workers=False)
    own = dist.PrefixStore(f"nemo_patches/doctor/{store.get('name').decode()}", client)
    gpu = torch.cuda.is_available() and here.local_rank < torch.cuda.device_count()
    backend, device = ("nccl", f"cuda:{here.local_rank}") if gpu else ("gloo", "cpu")
    ended: dict[str, float] = {}
    at = ["the start of the group"]

    def run() -> None:
        if gpu:
            torch.cuda.set_device(here.local_rank)
        seat, size = present.index(here.rank), len(present)
        # Its own limit is longer than ours: where it passes, NCCL's watchdog ends the process.
        dist.init_process_group(backend, store=own, rank=seat, world_size=size, timeout=20 * timeout)
        block = torch.ones(_SMOKE_BYTES // 4, device=device)
        parts = [torch.empty_like(block) for _ in range(size)]
        collectives: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(block),
            "broadcast": lambda: dist.broadcast(block, 0),
            "all_gather": lambda: dist.all_gather(parts, block),
        }
        for name, collective in collectives.items():
            at[0] = name
            began = time.perf_counter()
            collective()
            if gpu:
                torch.cuda.synchronize()
            ended[name] = time.perf_counter() - began

    try:
        _within(1.5 * timeout, run)
    except (RuntimeError, ValueError, TimeoutError) as error:
        return Smoke(here.rank, backend, dict(ended), at[0], first_line(error))
    return Smoke(here.rank, backend, dict(ended))


def _within(limit: timedelta, what: Callable[[], _Result]) -> _Result:
    """Run it on a thread; raise TimeoutError if it takes too long, and leave it running."""
    outcome: list[_Result | Exception] = []

    def run() -> None:
        try:
            outcome.append(what())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit.total_seconds())
    if not outcome:
        raise TimeoutError(f"no end within {limit.total_seconds():g} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _timed(what: Callable[[], object]) -> Iterable[float]:
    for _ in range(_MEASUREMENTS):
        began = time.perf_counter()
        what()
        yield time.perf_counter() - began
