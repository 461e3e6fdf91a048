"""What the training thread does: noted there, read by the stall monitor."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..sync.encoder_flag import flag_text
from ..sync.encoder_rounds import Group, WatchedRounds
from ..sync.length_sync import current
from ..sync.settings import DEFERRED


class LastCall(NamedTuple):
    """The latest encoder call of this process under a process group."""

    sync: WatchedRounds | None = None  # of the encoder
    call: int = 0  # of that encoder
    # Of that encoder, before the call: training calls, evaluation calls since.
    clock: tuple[int, int] = (0, 0)
    calls: int = 0  # of all encoders
    since: float = 0.0  # time.monotonic() at which it began; 0.0 before the first
    thread: int = 0
    native_thread: int = 0  # the kernel's number of it
    training: bool = True


class TrainingNotes:
    """The notes of this process. Only the training thread writes them; values are replaced as a
    whole.
    """

    def __init__(self) -> None:
        self.last = LastCall()
        self.encoder_flag = ""  # of the first encoder, which must match, too
        # NeMo is stock again: calls that are not seen are not a stall.
        self.is_reverted = False
        # Why calls are not seen under the present process group: an error in a note.
        self.is_broken = False
        # Whether a monitor logs the late rounds of the present process group.
        self.are_watched = True
        # Lightning's, the last one that began; weak.
        self._trainer: Callable[[], object] = lambda: None
        self._syncs: tuple[WatchedRounds, ...] = ()

    def syncs(self, group: Group) -> list[WatchedRounds]:
        """Those of one process group, including those of encoders that were just deleted."""
        return [sync for sync in self._syncs if sync.group is group]

    def may_be_uneven(self) -> bool:
        """Whether the user allows ranks fewer batches of an evaluation than others."""
        return current().metrics == DEFERRED

    def trains_with(self, trainer: object) -> None:
        self._trainer = weakref.ref(trainer)

    def batch(self) -> str:
        """The current or last one. After LateModules.run()."""
        from .last_batch import last_batch

        return last_batch(self._trainer())

    def forget_calls(self) -> None:
        """As before the first."""
        self.last = LastCall()

    def begin_anew(self) -> None:
        """There is a new process group."""
        self.is_broken = False
        self.are_watched = True

    def fail(self) -> None:
        self.is_broken = True

    def call_began(self, encoder: torch.nn.Module, sync: WatchedRounds) -> None:
        self.note(sync)
        call, clock = sync.latest_call
        self.last = LastCall(
            sync=sync,
            call=call,
            clock=clock,
            calls=self.last.calls + 1,
            since=time.monotonic(),
            thread=threading.get_ident(),
            native_thread=threading.get_native_id(),
            training=encoder.training,
        )
        if not self.encoder_flag:
            self.encoder_flag = f"{sync.title}: {flag_text(encoder)}"

    def note(self, sync: WatchedRounds) -> None:
        """When an encoder is new, forget those that were deleted."""
        if sync not in self._syncs:
            self._syncs = (*(one for one in self._syncs if not one.is_settled), sync)
