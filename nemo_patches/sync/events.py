"""What this process's encoder calls do: noted for the stall monitor's thread, and told to the observer, if any."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .rank_log import raised_by_signal_handler, report

if TYPE_CHECKING:
    import torch

    from ..stall.heartbeats import MissingRank

LENGTH_SYNC = "length sync"
GROWTH = "growth of the positional encoding"
FORWARD = "forward, after the length sync"


class EncoderCall(NamedTuple):
    """One encoder call of this process under a process group."""

    encoder: str = ""
    call: int = 0  # of that encoder
    clock: tuple[int, int] = (0, 0)  # of that encoder, before the call: training calls, evaluation calls since
    calls: int = 0  # of all encoders
    since: float = 0.0  # time.monotonic() at which it began; 0.0 before the first
    thread: int = 0
    place: tuple[str, str] = ("", "")  # the function that called into us: file and name


@dataclass
class Activity:
    last: EncoderCall  # replaced as a whole, so that a reader in another thread never sees half of it
    phase: str = ""

    def begin(self, encoder: str, call: int, clock: tuple[int, int], place: tuple[str, str]) -> None:
        self.phase = LENGTH_SYNC
        calls, thread = self.last.calls + 1, threading.get_ident()
        self.last = EncoderCall(encoder, call, clock, calls, time.monotonic(), thread, place)


current = Activity(EncoderCall())


class Synced(NamedTuple):
    """How a call's length sync has ended. outcome: one of protocol.py's."""

    outcome: str
    round: int  # the latest that this rank has issued for this encoder, from 1
    waited: float  # seconds
    local: int
    result: int


class Observer(Protocol):
    """Who is told of what happens, on the thread where it does; a trace (nemo_patches/tracing). One at a time."""

    def length_synced(self, encoder: torch.nn.Module, title: str, synced: Synced) -> None: ...

    def grown(self, encoder: torch.nn.Module, old: int, new: int) -> None: ...

    def stalled(self, title: str, call: int, missing: tuple[MissingRank, ...], unknown: str) -> None:
        """A stall report was logged. call: 0 where the length sync has ended."""


observer: Observer | None = None


def tell(happening: Callable[[Observer], None]) -> None:
    """Tell the observer. Its errors must not reach training: the first is said, and no more is told."""
    global observer
    told = observer
    if told is None:
        return
    try:
        happening(told)
    except Exception as error:
        if raised_by_signal_handler(error):
            raise
        observer = None
        report(logging.ERROR, f"tracing has ended by an error of its own, please report it: {error!r}")
