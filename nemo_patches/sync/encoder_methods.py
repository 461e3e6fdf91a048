"""What stands in for an encoder's methods: the bounded sync for the reduce, and growth for this process only.

Plain functions: torch.compile traces through them, and breaks the graph at an object that it does not know (wrapt's).
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .events import Grown, GrowthBegan, bus
from .length_sync import synced_length
from .private_growth import grown_privately, growth
from .rank_log import is_distributed

Method = Callable[..., None]


def bounded(original: Method, grow: Method, in_force: Callable[[], bool]) -> Method:
    """`update_max_seq_length(self, seq_length, device)` with the bounded sync in place of the reduce.

    original: NeMo's own method, which runs where there is no process group. grow: the same without its reduce, which
    runs where the agreed length is more than the encoder's `max_audio_length`. in_force: false after a revert.
    """

    @functools.wraps(original)
    def update(self: Any, seq_length: int, device: torch.device) -> None:
        if in_force() and is_distributed():
            _sync_and_grow(self, grow, seq_length, device)
        elif growth.happened:  # the process group is gone, or hidden for a while: what is private must stay so
            _run_privately(self, original, seq_length, device)
        else:
            original(self, seq_length, device)

    return update


def private_setter(original: Method, in_force: Callable[[], bool]) -> Method:
    """`set_max_audio_length(self, max_audio_length)`, which others than the sync call too, with private growth."""

    @functools.wraps(original)
    def set_max_audio_length(self: Any, max_audio_length: int) -> None:
        if growth.happened or (in_force() and is_distributed()):
            _run_privately(self, original, max_audio_length, register_new=True)
        else:
            original(self, max_audio_length)

    return set_max_audio_length


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile runs it as it is, like stock's reduce
def _sync_and_grow(encoder: Any, grow: Method, seq_length: int, device: torch.device) -> None:
    length, before = synced_length(encoder, seq_length), encoder.max_audio_length
    if length > before:
        bus.publish(GrowthBegan(encoder))
        _run_privately(encoder, grow, length, device)
        bus.publish(Grown(encoder, before, encoder.max_audio_length))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_privately(encoder: Any, method: Method, *arguments: Any, register_new: bool = False) -> None:
    with grown_privately(encoder, register_new):
        method(encoder, *arguments)
