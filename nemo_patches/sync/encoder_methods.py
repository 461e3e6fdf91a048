"""Replacements for an encoder's methods: the bounded sync and private growth in place of NeMo's.

Plain functions: torch.compile traces through them, and breaks the graph at an object that it does
not know (wrapt's).
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from ..channel.daemon import Daemon
from ..growth import grow_privately, growth, outside_inference_mode
from ..text import FEW_RANKS
from .encoder_flag import flag_text, is_off
from .encoder_rounds import listeners
from .length_sync import synced_length
from .rank_log import (
    contain,
    is_distributed,
    rank_and_size,
    report,
    report_of_rank,
)

Method = Callable[..., None]
# Torch puts it into the error of fullgraph=True.
_NO_FULL_GRAPH = (
    "nemo_patches' length sync waits for other ranks beside the graphs: compile without"
    " fullgraph=True, or use a diff of its patches/, which can be traced"
)


def _is_exporting_in_torch_2_6() -> bool:
    """Not a strict export, which is a compilation to torch 2.6, and to us."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


is_exporting: Callable[[], bool] = getattr(
    torch.compiler, "is_exporting", _is_exporting_in_torch_2_6
)


def make_bounded_update(
    original: Method, grow: Method, in_force: Callable[[], bool]
) -> Method:
    """`update_max_seq_length(self, seq_length, device)` with the bounded sync in place of the
    reduce.

    original: NeMo's own method, which runs where there is no process group. grow: the same without
    its reduce, which runs where the agreed length is more than the encoder's `max_audio_length`.
    in_force: false after a revert.
    """

    @functools.wraps(original)
    def update(self: Any, seq_length: int, device: torch.device) -> None:
        is_rank = in_force() and is_distributed()
        # Neither an exported model nor an exporting rank communicates.
        if is_rank and not is_exporting():
            _sync_and_grow(self, grow, seq_length, device)
        elif is_rank or growth.names:  # also where the process group is gone or hidden
            if seq_length > self.max_audio_length:
                _grow(self, grow, seq_length, device)
        elif in_force():
            if not torch.compiler.is_compiling():
                _first_calls.say(self, in_group=False)
            outside_inference_mode(original, self, seq_length, device)
        else:
            original(self, seq_length, device)

    return update


class _FirstCalls:
    """The line about this process's first encoder call, without a process group and in one."""

    def __init__(self) -> None:
        self._said = set[bool]()

    def say(self, encoder: torch.nn.Module, in_group: bool) -> None:
        """On a thread of its own: training does not wait until the line is written."""
        if in_group in self._said or (self._said and not in_group):
            return
        self._said.add(in_group)
        with contain("the line about the first encoder call"):
            rank, size = rank_and_size()
            if size == 1 or (rank and size > FEW_RANKS):  # rank 0 tells what differs
                return
            line = (
                f"first encoder call: {type(encoder).__name__}, {flag_text(encoder)}; "
            )
            if in_group:
                line += "the process group is initialized"
                if is_off(encoder):
                    line += "; it grows privately, and has no length sync"
                    line += "; stall reports watch the job all the same"
            else:
                line += "no process group is initialized: "
                line += "this call grows the encoder by its own length"
            # There may be no more threads.
            if Daemon("line", report_of_rank, line).begin():
                report_of_rank(line)


_first_calls = _FirstCalls()


def private_setter(original: Method, in_force: Callable[[], bool]) -> Method:
    """`set_max_audio_length(self, max_audio_length)`, also called from outside the sync, with
    private growth.
    """

    @functools.wraps(original)
    def set_max_audio_length(self: Any, max_audio_length: int) -> None:
        if growth.names or (in_force() and is_distributed()):
            _grow(self, original, max_audio_length, register_new=True)
        elif in_force():
            outside_inference_mode(original, self, max_audio_length)
        else:
            original(self, max_audio_length)

    return set_max_audio_length


def _beside_graphs(function: Method) -> Method:
    """torch.compile runs it as it is, like stock's reduce; with fullgraph=True it says why not."""
    disable: Any = torch.compiler.disable
    try:
        ours: Method = disable(function, reason=_NO_FULL_GRAPH)
    except TypeError:  # torch 2.6
        ours = disable(function)
    return ours


@_beside_graphs
def _sync_and_grow(
    encoder: Any, grow: Method, seq_length: int, device: torch.device
) -> None:
    _first_calls.say(encoder, in_group=True)
    length = synced_length(encoder, seq_length)
    before = encoder.max_audio_length
    if length > before:
        _grow(encoder, grow, length, device)
        listeners.tracer.encoder_grew(encoder, before, encoder.max_audio_length)


@_beside_graphs
def _grow(
    encoder: Any, method: Method, *arguments: Any, register_new: bool = False
) -> None:
    try:
        grow_privately(encoder, method, *arguments, register_new=register_new)
    finally:
        for title in [
            title for title, is_said in growth.same_shape.items() if not is_said
        ]:
            growth.same_shape[title] = True
            text = "has other values since its encoder has grown, and the same shape"
            report(logging.WARNING, f"buffer {title} {text}: DDP broadcasts rank 0's")
