"""More encoders than one has: each rank calls them in an order of its own, and nobody who is there is named missing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import all_have_come, run_ranks, wait_for_others, wait_until

import nemo_patches
from nemo_patches.stall import rank_state
from nemo_patches.sync import length_sync

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
ENCODERS = 40
TIMEOUT = 3.0


def one_stays_away(rank: int, size: int, room: int) -> Any:
    """Every rank calls all encoders once, then all ranks but the last again. room: encoders that a rank tells of."""
    rank_state._MOST_ENCODERS = room
    nemo_patches.apply(sync="overlapped", timeout=120.0)
    # Ranks match encoders by their parameters' names.
    encoders = [torch.nn.ParameterDict({f"weight{number}": torch.zeros(1)}) for number in range(ENCODERS)]
    call_in_own_order(rank, encoders)
    syncs = [length_sync.sync_of(encoder) for encoder in encoders]
    wait_until(lambda: all(sync is not None and sync.rounds.done == 1 for sync in syncs))
    wait_until(all_have_come)
    nemo_patches.apply(sync="overlapped", timeout=TIMEOUT)
    dist.barrier()
    stalls: tuple[Any, ...] = ()
    if rank < size - 1:
        call_in_own_order(rank + size, encoders)
        wait_until(lambda: len(nemo_patches.status().stalls) == ENCODERS)
        stalls = nemo_patches.status().stalls
    wait_for_others("said", size)
    return [([one.rank for one in stall.missing], stall.unknown) for stall in stalls]


def call_in_own_order(seed: int, encoders: list[torch.nn.ParameterDict]) -> None:
    for encoder in random.Random(seed).sample(encoders, len(encoders)):
        length_sync.synced_length(encoder, 100)


def test_of_forty_encoders_only_the_rank_that_stays_away_is_missing() -> None:
    results = run_ranks(one_stays_away, 4, 64)
    for result in results[:3]:
        assert [missing for missing, _ in result.value] == [[3]] * ENCODERS
        # A busy machine's ranks may answer too late to be heard, which is no want of room.
        assert all(not unknown or "nothing is heard" in unknown for _, unknown in result.value)
        assert result.lines("ERROR") == []


def test_where_an_answer_has_no_room_for_them_nobody_is_blamed_for_it() -> None:
    results = run_ranks(one_stays_away, 4, 4)
    for result in results[:3]:
        assert {tuple(missing) for missing, _ in result.value} <= {(3,), ()}
        unknown = [unknown for missing, unknown in result.value if not missing]
        assert unknown and all(unknown)
        assert result.lines("every rank has come") == result.lines("ERROR") == []
