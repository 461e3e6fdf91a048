"""What this process's encoder calls do: plain assignments on the training thread, read by the stall monitor's."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

LENGTH_SYNC = "length sync"
GROWTH = "growth of the positional encoding"
FORWARD = "forward, after the length sync"


@dataclass
class Activity:
    """The last encoder call of this process under a process group."""

    encoder: str = ""
    call: int = 0  # of that encoder
    clock: tuple[int, int] = (0, 0)  # of that encoder, before the call: training calls, evaluation calls since
    calls: int = 0  # of all encoders
    phase: str = ""
    since: float = 0.0  # time.monotonic() at which the call began
    thread: int = 0
    place: tuple[str, str] = ("", "")  # the function that called into us: file and name

    def begin(self, encoder: str, call: int, clock: tuple[int, int], place: tuple[str, str]) -> None:
        self.encoder, self.call, self.clock, self.place = encoder, call, clock, place
        self.calls += 1
        self.phase = LENGTH_SYNC
        self.thread = threading.get_ident()
        self.since = time.monotonic()


current = Activity()
