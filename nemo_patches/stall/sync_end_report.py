"""Reports, once for a process group, which ranks have died when a round has failed."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

from ..channel.side_channel import SideChannel
from ..channel.survey import Silent
from ..sync.events import Report, WatchedRounds, bus
from .answer import Answer, ended
from .found import Found
from .log_line import report
from .missing_rank import Stall, StallReported
from .rank_survey import Look

PATIENCE_S = 2.6  # for a look that is not done when its report is due


class SyncEndReport:
    """The stall monitor's thread calls `ended` and `look`, and alone writes the fields; any thread may read `stall`."""

    def __init__(
        self,
        channel: SideChannel,
        size: int,
        begin_look: Callable[[], Look],
        promises: queue.SimpleQueue[Future[Report]],
    ) -> None:
        """promises: for the exceptions that wait for the answer (on_timeout="raise")."""
        self._channel, self._size, self._begin_look, self._promises = channel, size, begin_look, promises
        self._title = ""  # of the encoder whose sync ended first
        self._look: Look | None = None
        self._answer: Answer | None = None  # once it is said

    def stall(self) -> Stall | None:
        look, answer = self._look, self._answer
        if look is None or answer is None or not answer.missing:
            return None
        since = timedelta(seconds=time.monotonic() - look.began)
        return Stall(self._title, 0, since, answer.missing, self._size, "")

    def ended(self, sync: WatchedRounds) -> None:
        """A sync has no more rounds: ask which ranks have died, unless this was asked already."""
        if self._look is None:
            self._title = sync.title
            self._look = self._begin_look()

    def look(self, now: float, is_last: bool) -> None:
        look = self._look
        if look is not None and self._answer is None:
            has_promised = not self._promises.empty()  # the training thread waits
            known = has_promised and self._channel.ended_by is not None
            if known or look.is_done or is_last or now - look.began > PATIENCE_S:
                self._say(self._answer_of(look.found), is_last)
        if self._answer is not None:
            while not self._promises.empty():
                self._promises.get().set_result(Report(missing=self._answer.missing))

    def _answer_of(self, found: Found) -> Answer:
        silent = dict(found.silent)
        if (ended_by := self._channel.ended_by) is not None:  # as announced by the rank itself, or by its neighbour
            rank, how = ended_by
            silent[rank] = Silent(rank, how, 0.0, [])
        seen = Found(found.size, found.groups, silent, residents=tuple(self._channel.residents))
        gone = ended(seen)
        return Answer(tuple(gone[rank] for rank in sorted(gone)), "" if gone else self._channel.error)

    def _say(self, answer: Answer, is_last: bool) -> None:
        self._answer = answer
        if answer.missing or (answer.unknown and not is_last):
            bus.publish(StallReported(self._title, 0, answer.missing, answer.unknown))
        text = answer.text(self._size)
        if answer.missing:
            report(logging.WARNING, f"{self._title}: gone: {text}")
        elif answer.unknown and not is_last:
            report(logging.WARNING, f"{self._title}: which rank is gone {text}")
