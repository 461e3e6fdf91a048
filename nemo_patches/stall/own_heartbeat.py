"""Makes this rank's heartbeats, from what the training thread has noted."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
from collections.abc import Callable

from ..sync import __version__
from ..sync.events import Group
from ..sync.length_sync import current
from . import stacks
from .heartbeat import Heartbeat
from .last_batch import last_batch
from .loader_workers import described, loader_workers
from .occupation import Occupation
from .peers import Listener
from .progress import Progress
from .rank_text import LEFT
from .settings import StallSettings
from .training_notes import FORWARD, LENGTH_SYNC, ROUNDS_OF, TrainingNotes


class OwnHeartbeat:
    """Any thread may have one made."""

    def __init__(self, group: Group, notes: TrainingNotes, settings: Callable[[], StallSettings]) -> None:
        self._group, self._notes, self._settings = group, notes, settings
        self.progress = Progress(notes)
        self._numbers = itertools.count(1)

    def make(self, listener: Listener | None, phase: str = "") -> Heartbeat:
        """This rank's next heartbeat. phase: in place of the noted one."""
        now, settings, last = time.monotonic(), self._settings(), self._notes.last
        idle = now - last.since if last.since else -1.0
        if not phase:
            phase = self._notes.phase()
            if phase == FORWARD and not last.in_forward():
                phase = "between encoder calls"
        # A rank that is long away says where it is by itself: one that is asked may be unable to answer.
        away_after = min(current().timeout, settings.stall_timeout or current().timeout) / 2
        away = idle >= away_after.total_seconds() and phase != LEFT
        workers = loader_workers() if away else ()
        thread = stacks.training_thread(last.thread, last.native_thread)
        collective, activity = stacks.occupation(thread) if away else Occupation()
        syncs = [notes.sync for notes in self._notes.encoders(self._group)]
        waits_in = next((f"{ROUNDS_OF}{sync.title}" for sync in syncs if sync.in_call), "")
        rounds = [
            (not sync.has_come(round_), round_.issued_at, sync.key, round_.number)
            for sync in syncs
            if (round_ := sync.round) is not None
        ]
        nemo = getattr(sys.modules.get("nemo"), "__version__", "?")
        return Heartbeat(
            rank=self._group.rank,
            number=next(self._numbers),
            host=socket.gethostname(),
            pid=os.getpid(),
            versions=f"nemo_patches {__version__}, nemo {nemo}",
            settings="; ".join(filter(None, (f"{current()}, {settings}", self._notes.other_settings))),
            phase=phase,
            encoder=last.sync.title if last.sync is not None else "",
            calls=last.calls,
            clock=last.clock,
            idle=idle,
            rounds={key: number for *_, key, number in sorted(rounds)},
            address=listener.address if listener is not None else "",
            port=listener.port if listener is not None else 0,
            where=stacks.where(thread) if away else "",
            workers=workers,
            worker_states=described(workers),
            collective=LENGTH_SYNC if phase == LENGTH_SYNC else waits_in or collective,
            activity=activity,
            batch=last_batch(stacks.frames(thread)) if away else "",
            still=self.progress.still_s(now),
            apart={sync.key: sync.apart for sync in syncs if sync.apart},
            training=last.training,
        )
