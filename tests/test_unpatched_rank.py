"""A rank that is not patched while others are: named on stderr and in status() within one timeout, in every mode."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import encoders
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

import nemo_patches
from nemo_patches.runtime.roll_call import named

TIMEOUT = 2.0


def one_is_stock(rank: int, size: int, mode: str, stock_rank: int) -> tuple[float, tuple[int, ...]]:
    """The seconds until status() names a rank, and the ranks that it names."""
    encoder = encoders.conformer()
    if rank == stock_rank:
        with contextlib.suppress(RuntimeError):  # stock's reduce finds no partner
            encoders.sync(encoder, 100)
        return 0.0, ()
    nemo_patches.apply(sync=mode, timeout=TIMEOUT)  # type: ignore[arg-type]
    began = time.monotonic()
    encoders.sync(encoder, 100)
    while nemo_patches.status().unannounced != (stock_rank,):
        assert time.monotonic() - began < 30, nemo_patches.status()
        time.sleep(0.01)
    visible_after = time.monotonic() - began
    wait_for_line(began)
    assert f"not patched, or not at a first encoder call yet: rank {stock_rank}" in str(nemo_patches.status())
    wait_for_others("named", size - 1)
    return visible_after, nemo_patches.status().unannounced


def wait_for_line(began: float) -> None:
    """Until the helper thread has said it: the roll call knows."""
    from nemo_patches.runtime import length_sync

    world = length_sync._world
    assert world is not None and world.helper.roll_call is not None
    while not world.helper.roll_call._said:
        assert time.monotonic() - began < 30
        time.sleep(0.01)


def wait_for_others(event: str, count: int) -> None:
    """Until `count` ranks have come here; rank 0, which has the store's server, until the others have seen that."""
    count_to(event, count)
    if dist.get_rank() == 0:
        count_to(event + " seen", count)
    else:
        dist.distributed_c10d._get_default_store().add(event + " seen", 1)


def count_to(event: str, count: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + 30
    store.add(event, 1)
    while store.add(event, 0) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
    began = time.monotonic()
    encoders.sync(encoder, 100)
    if rank != 1:
        wait_for_line(began)
        wait_for_others("said", size)
    while nemo_patches.status().unannounced or not roll_call_is_done():
        assert time.monotonic() - began < 30
        time.sleep(0.01)
    wait_for_others("cleared", size)
    return str(nemo_patches.status())


def roll_call_is_done() -> bool:
    from nemo_patches.runtime import length_sync

    world = length_sync._world
    return world is not None and world.helper.roll_call is not None and world.helper.roll_call.done


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
    from nemo_patches.runtime import length_sync

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
