"""A rank that is not patched while others are: named on stderr and in status() within one timeout, in every mode."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import encoders
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

import nemo_patches
from nemo_patches.runtime import length_sync
from nemo_patches.runtime.roll_call import RollCall, named

TIMEOUT = 2.0


def one_is_stock(rank: int, size: int, mode: str, stock_rank: int) -> tuple[float, tuple[int, ...]]:
    """The seconds until both status() and a line have named a rank, and the ranks that status() names."""
    encoder = encoders.conformer()
    if rank == stock_rank:
        with contextlib.suppress(RuntimeError):  # stock's reduce finds no partner
            encoders.sync(encoder, 100)
        return 0.0, ()
    nemo_patches.apply(sync=mode, timeout=TIMEOUT)  # type: ignore[arg-type]
    began = time.monotonic()
    encoders.sync(encoder, 100)
    wait_until(lambda: nemo_patches.status().unannounced == (stock_rank,))
    wait_until(lambda: roll_call()._said)
    visible_after = time.monotonic() - began
    assert f"not patched, or not at a first encoder call yet: rank {stock_rank}" in str(nemo_patches.status())
    wait_for_others("named", size - 1)
    return visible_after, nemo_patches.status().unannounced


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, nemo_patches.status()
        time.sleep(0.01)


def roll_call() -> RollCall:
    world = length_sync._world
    assert world is not None and world.helper.roll_call is not None
    return world.helper.roll_call


def wait_for_others(event: str, count: int) -> None:
    """Until `count` ranks have come here; rank 0, which has the store's server, until the others have seen that."""
    count_to(event, count)
    if dist.get_rank() == 0:
        count_to(event + " seen", count)
    else:
        dist.distributed_c10d._get_default_store().add(event + " seen", 1)


def count_to(event: str, count: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.add(event, 1)
    wait_until(lambda: store.add(event, 0) >= count)


@pytest.mark.parametrize("mode", ["bounded", "overlapped", "local"])
def test_a_rank_of_stock_nemo_is_named_within_one_timeout(mode: str) -> None:
    results = run_ranks(one_is_stock, 3, mode, 1, dies=(1,))
    for rank in (0, 2):
        visible_after, unannounced = results[rank].value
        assert unannounced == (1,)
        assert visible_after < TIMEOUT + 1
        (line,) = results[rank].lines("WARNING", "within 2 s: not patched")
        assert "rank 1 of 3 has not announced itself" in line
        assert f"rank {rank}/3" in line
    assert results[1].lines() == []


def late_or_never(rank: int, size: int) -> Any:
    nemo_patches.apply(sync="local", timeout=1.0)
    encoder = encoders.conformer()
    if rank == 1:
        wait_for_others("said", size)
    encoders.sync(encoder, 100)
    if rank != 1:
        wait_until(lambda: roll_call()._said)
        wait_for_others("said", size)
    wait_until(lambda: roll_call().done)
    wait_for_others("cleared", size)
    return str(nemo_patches.status())


def test_a_rank_that_was_only_late_is_cleared() -> None:
    for rank, result in enumerate(run_ranks(late_or_never, 3)):
        assert "first encoder call" not in result.value
        cleared = result.lines("every rank has announced itself now")
        assert len(cleared) == (rank != 1)


def flag_is_off(rank: int, size: int) -> Any:
    nemo_patches.apply(timeout=1.0)
    encoder = encoders.conformer()
    encoder.sync_max_audio_length = False
    encoders.sync(encoder, 100)
    return length_sync._world is None or length_sync._world.helper.roll_call is None


def test_an_encoder_without_a_length_sync_calls_no_roll() -> None:
    assert all(result.value for result in run_ranks(flag_is_off, 2))


def text_of(ranks: list[int]) -> list[int]:
    found = []
    for part in named(ranks).removeprefix("ranks ").removeprefix("rank ").split(", "):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@given(st.sets(st.integers(0, 63), min_size=1))
def test_ranks_are_named_as_ranges_that_read_back_the_same(ranks: set[int]) -> None:
    assert text_of(sorted(ranks)) == sorted(ranks)


def test_ranks_are_named_as_a_person_would() -> None:
    assert named([1]) == "rank 1"
    assert named([2, 5, 6, 7]) == "ranks 2, 5-7"
    assert named([0, 1]) == "ranks 0-1"


def store_goes(rank: int, size: int, goes_on: bool) -> None:
    """Rank 0 has the store's server, and ends; whether rank 1 goes on past the timeout is what is said or not."""
    nemo_patches.apply(sync="local", timeout=1.0)
    if rank == 0:
        wait_for_others("looked", size)
        os._exit(0)
    encoders.sync(encoders.conformer(), 100)
    wait_until(lambda: nemo_patches.status().unannounced == (0,))
    wait_for_others("looked", size)
    if goes_on:
        wait_until(lambda: roll_call().done)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_store_that_is_gone_is_said_only_by_a_rank_that_goes_on(goes_on: bool) -> None:
    lines = run_ranks(store_goes, 2, goes_on, dies=(0,))[1].lines("WARNING")
    assert len(lines) == goes_on
    assert all("cannot see whether every rank is patched: Dist" in line for line in lines)
