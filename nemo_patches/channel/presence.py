"""One bit per rank in the job's store: ranks that are here, or have written a note. Every kind of store can add."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

from .keys import RANKS_PER_BLOCK


def add_bit(store: Any, key: str, rank: int) -> None:
    """Set the rank's bit, once. key: the format of a block's. Only the rank itself may; may block."""
    block, bit = key.format(block=rank // RANKS_PER_BLOCK), 1 << rank % RANKS_PER_BLOCK
    if not int(store.add(block, 0)) & bit:
        store.add(block, bit)


def ranks_with_bit(store: Any, key: str, size: int) -> set[int]:
    """One request for each 62 ranks; may block."""
    found = set[int]()
    for first in range(0, size, RANKS_PER_BLOCK):
        bits = int(store.add(key.format(block=first // RANKS_PER_BLOCK), 0))
        found.update(rank for rank in range(first, min(first + RANKS_PER_BLOCK, size)) if bits >> rank - first & 1)
    return found
