"""Encoders and threads that share the rounds: nobody waits for nothing, and no rank that came is
named.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import light_ranks
import pytest
import torch
import torch.distributed as dist
from light_ranks import SOON_S, Ended, Rank
from ranks import wait_until, waits_for_a_round

from nemo_patches.sync import length_sync
from nemo_patches.sync.settings import Settings
from nemo_patches.watch import subscriber

pytestmark = pytest.mark.one_nemo
STEPS = 150
TIMEOUT_S = 60.0  # a wait for nothing is seen: none of these takes so long


class Router(torch.nn.Linear):
    """An encoder, as far as the length sync knows one."""


class Expert(torch.nn.Linear):
    pass


def begin(rank: Rank, timeout_s: float = TIMEOUT_S) -> None:
    """A process group, watched as under apply()."""
    length_sync.use(Settings.resolve({"timeout": timeout_s}))
    dist.init_process_group(
        "gloo", store=rank.store, rank=rank.number, world_size=rank.size
    )
    subscriber.subscribe()


def lines(ended: Ended) -> list[str]:
    own = [line for line in ended.stderr.splitlines() if " nemo_patches " in line]
    return [line for line in own if " INFO " not in line]


def call(encoder: torch.nn.Module, length: int) -> tuple[int, float]:
    """What it gets, and the seconds that it takes."""
    began = time.monotonic()
    return length_sync.synced_length(encoder, length), time.monotonic() - began


def in_other_orders(rank: Rank, is_router: bool) -> list[int]:
    """Each step one of two encoders, another one on each rank; or both, each rank in an order of
    its own.
    """
    begin(rank)
    encoders = [Router(1, 1), Expert(1, 1)]
    found = []
    for step in range(STEPS):
        first = (rank.number + step // 3) % 2
        for encoder in (encoders[first], encoders[1 - first])[: 1 if is_router else 2]:
            found.append(length_sync.synced_length(encoder, 100 * step + rank.number))
        dist.barrier()  # as the gradients' reduce
    counters = length_sync.counters()
    assert (
        sum(one.calls for one in counters)
        == len(found)
        == sum(one.rounds for one in counters)
    )
    assert sum(one.timeouts + one.fallbacks for one in counters) == 0
    return found


@pytest.mark.parametrize("is_router", [True, False])
def test_ranks_that_call_encoders_in_another_order_pair_whatever_comes_like_stock(
    is_router: bool,
) -> None:
    for ended in light_ranks.run(in_other_orders, 3, is_router):
        assert ended.value == [
            100 * step + 2
            for step in range(STEPS)
            for _ in range(1 if is_router else 2)
        ]
        assert lines(ended) == []


def many_encoders(rank: Rank) -> list[tuple[str, ...]]:
    """Forty encoders, which each rank calls in an order of its own; the last rank stays away from
    the second round.
    """
    begin(rank)
    encoders = [Router(1, 1) for _ in range(40)]
    order = torch.randperm(
        40, generator=torch.Generator().manual_seed(rank.number)
    ).tolist()
    assert {
        length_sync.synced_length(encoders[number], 100 + rank.number)
        for number in order
    } == {103}
    dist.barrier()
    stalls: list[tuple[str, ...]] = []
    length_sync.use(Settings.resolve({"timeout": 2.0}))
    if rank.number < 3:
        for number in order:
            length_sync.synced_length(encoders[number], 100)
        deadline = time.monotonic() + SOON_S
        while not (found := subscriber.stalls()) and time.monotonic() < deadline:
            time.sleep(0.01)
        stalls = [tuple(str(one.rank) for one in stall.missing) for stall in found]
    rank.meet("said")
    return stalls


def test_of_forty_encoders_only_the_rank_that_stays_away_is_missing_and_said_once() -> (
    None
):
    *others, last = light_ranks.run(many_encoders, 4)
    for ended in others:
        assert ended.value == [("3",)]
        (line,) = [line for line in lines(ended) if "not every rank" in line]
        assert "Missing: rank 3 of 4" in line
    assert not [line for line in lines(last) if "Missing" in line]


class StreamingRouter(Router):
    """As NeMo's StreamingTransformerEncoder: it inherits the sync, and its streaming step calls it."""


@contextlib.contextmanager
def hidden_group() -> Iterator[None]:
    """What NeMo's ParallelExpertEncoder does around its experts, in the inference of one recording."""
    is_initialized = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = is_initialized


def hides_its_group(rank: Rank) -> list[int]:
    """For calls of rank 0 alone, and for as long as the watch needs to look a few times."""
    begin(rank)
    router, expert = StreamingRouter(1, 1), Expert(1, 1)
    found = [length_sync.synced_length(router, 100 + rank.number)]
    group = length_sync.process.group_syncs
    dist.barrier()
    if rank.number == 0:
        with hidden_group():
            found += [length_sync.synced_length(expert, 200) for _ in range(3)]
            time.sleep(1.0)  # the watch looks four times a second
    dist.barrier()
    for step in range(3):
        found.append(length_sync.synced_length(router, 300 + step + rank.number))
    assert length_sync.process.group_syncs is group
    assert sum(one.timeouts + one.fallbacks for one in length_sync.counters()) == 0
    dist.barrier()
    return found


def test_calls_while_the_group_is_hidden_are_local_and_disturb_no_round() -> None:
    first, second = light_ranks.run(hides_its_group, 2)
    assert first.value == [101, 200, 200, 200, 301, 302, 303]
    assert second.value == [101, 301, 302, 303]
    assert lines(first) == lines(second) == []


def one_encoder_is_apart(rank: Rank) -> list[tuple[int, str]]:
    """Its flag is off, on every rank; of the other encoder's calls rank 1 leaves one out."""
    begin(rank)
    encoder, apart = Router(1, 1), Expert(1, 1)
    apart.sync_max_audio_length = False  # type: ignore[assignment]
    for one in (encoder, apart):
        length_sync.synced_length(one, 100)
    dist.barrier()
    length_sync.use(Settings.resolve({"timeout": 2.0}))
    found: list[tuple[int, str]] = []
    if rank.number == 0:
        length_sync.synced_length(encoder, 100)
        deadline = time.monotonic() + SOON_S
        while not (stalls := subscriber.stalls()) and time.monotonic() < deadline:
            time.sleep(0.01)
        found = [(one.rank, one.kind) for stall in stalls for one in stall.missing]
    rank.meet("said")
    return found


def test_a_rank_is_not_said_to_take_no_part_because_one_of_its_encoders_takes_none() -> (
    None
):
    assert light_ranks.run(one_encoder_is_apart, 2)[0].value == [(1, "elsewhere")]


def two_threads(rank: Rank) -> list[int]:
    """An evaluation in a pool: one encoder, called by two threads of each rank."""
    begin(rank)
    encoder = Router(1, 1).eval()
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(
                lambda number: length_sync.synced_length(encoder, 100 + rank.number),
                range(200),
            )
        )
    (counters,) = length_sync.counters()
    assert (counters.calls, counters.rounds, counters.timeouts, counters.fallbacks) == (
        200,
        200,
        0,
        0,
    )
    return found


def test_one_encoder_called_by_two_threads_of_a_rank() -> None:
    for ended in light_ranks.run(two_threads, 2):
        assert ended.value == [101] * 200
        assert lines(ended) == []


def behind_a_straggler(rank: Rank) -> Any:
    """Rank 1 does not come: a second thread waits no longer than the first; a signal handler's call
    not at all.
    """
    begin(rank, timeout_s=2.0)
    encoder = Router(1, 1)
    found: dict[str, tuple[int, float]] = {}
    if rank.number == 0:
        second = threading.Thread(
            target=lambda: found.update(second=call(encoder, 102))
        )

        def handler(*_: object) -> None:
            found["handler"] = call(encoder, 101)
            second.start()

        def interrupt() -> None:
            wait_until(waits_for_a_round)
            os.kill(os.getpid(), signal.SIGALRM)

        signal.signal(signal.SIGALRM, handler)
        threading.Thread(target=interrupt).start()
        found["first"] = call(encoder, 100)
        second.join(light_ranks.LONG.total_seconds())
    rank.meet("done")
    return found


def test_a_second_thread_and_a_signal_handler_never_wait_without_limit_behind_the_first() -> (
    None
):
    found = light_ranks.run(behind_a_straggler, 2)[0].value
    assert {who: length for who, (length, _) in found.items()} == {
        "first": 100,
        "handler": 101,
        "second": 102,
    }
    assert found["first"][1] >= 2.0
    assert found["handler"][1] < 1.0
    assert found["second"][1] < 2.0 + SOON_S


def a_handler_runs_beyond_the_wait(rank: Rank) -> float:
    """As Lightning's of SIGUSR1, which saves a checkpoint; no other rank comes meanwhile."""
    begin(rank, timeout_s=0.4)
    seconds = 0.0
    if rank.number == 0:
        signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.5))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        seconds = call(Router(1, 1), 100)[1]
    rank.meet("done")
    return seconds


def test_a_wait_ends_also_where_a_signal_handler_runs_beyond_its_end() -> None:
    found = light_ranks.run(a_handler_runs_beyond_the_wait, 2)[0].value
    assert 0.4 <= found < SOON_S


def a_turn_that_nobody_gives_back(rank: Rank) -> list[float]:
    """As where a signal handler raises in the moment in which a call begins."""
    begin(rank, timeout_s=1.0)
    encoder = Router(1, 1)
    assert (group_syncs := length_sync.process.present_group()) is not None
    assert group_syncs.turn._lock.acquire()
    seconds = [call(encoder, 100 + rank.number)[1] for _ in range(2)]
    length_sync.use(Settings.resolve({"timeout": TIMEOUT_S}))
    assert call(encoder, 100 + rank.number)[0] == 101
    return seconds


def test_a_turn_that_nobody_gives_back_is_waited_for_once() -> None:
    for ended in light_ranks.run(a_turn_that_nobody_gives_back, 2):
        assert ended.value[0] >= 1.0


def fake_backend(rank: Rank) -> tuple[int, float]:
    """torch's, for trying out a large job's code in one process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    subscriber.subscribe()
    return call(Router(1, 1), 100)


def test_torchs_fake_backend_has_no_other_ranks_to_wait_for() -> None:
    (ended,) = light_ranks.run(fake_backend, 1)
    length, seconds = ended.value
    assert length == 100
    assert seconds < SOON_S / 2  # no wait of 10 s
    assert lines(ended) == []


PYTHONS = socket.socket


class Refuses(socket.socket):
    """As pytest-socket's."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("A test tried to use socket.socket.")


class Proxy:
    """Passes everything on, but for what Python looks up on the class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._own = PYTHONS(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


REPLACED: dict[str, Callable[..., Any]] = {"refuses": Refuses, "proxy": Proxy}


def sockets_replaced(rank: Rank, kind: str) -> tuple[int, float]:
    socket.socket = REPLACED[kind]  # type: ignore[misc, assignment]
    begin(rank)
    return call(Router(1, 1), 100 + rank.number)


@pytest.mark.parametrize("kind", REPLACED)
def test_where_pythons_sockets_are_anothers_rounds_come_all_the_same(kind: str) -> None:
    for ended in light_ranks.run(sockets_replaced, 2, kind):
        length, seconds = ended.value
        assert length == 101
        assert seconds < SOON_S
        assert not [line for line in lines(ended) if " ERROR " in line]
