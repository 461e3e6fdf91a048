"""STUB of what the lead writes; only so that the vendored package can be tried on this branch."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any


def subscribe() -> None:
    """The sync still calls the stall monitor by itself."""


def stalls() -> tuple[Any, ...]:
    from ..sync import length_sync

    return length_sync.stalls()


def unannounced() -> tuple[int, ...]:
    from ..sync import length_sync

    return length_sync.unannounced()
