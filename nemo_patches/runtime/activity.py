"""What this process's encoder calls do: plain assignments on the training thread, read by the stall monitor's."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

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
