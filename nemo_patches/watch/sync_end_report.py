"""Reports, once for a process group, which ranks have ended:
when a round has failed, or one ended without a word.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from ..channel.answers import LEFT
from ..channel.exchange import Exchange
from ..judging.answer import Answer, ended
from ..judging.found import Found
from ..judging.missing_rank import Stall
from ..sync.rounds import WatchedRounds, listeners
from .log_line import report
from .looks import Look

_JOB = "this job"  # in place of an encoder
_PATIENCE_S = 2.6  # for a look that is not done when its report is due
_PATIENCE_AFTER_A_DEATH_S = 0.05


class SyncEndReport:
    """The stall monitor's thread calls the methods, and alone writes the fields; any thread may
    read `stall`.
    """

    def __init__(
        self,
        exchange: Exchange,
        size: int,
        begin_look: Callable[[], Look],
    ) -> None:
        self._exchange = exchange
        self._size = size
        self._begin_look = begin_look
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
        if self._look is None and self._exchange.any_died:
            self._title = _JOB
            self._look = self._begin_look()
        look = self._look
        if look is None or self._answer is not None:
            return
        patience_s = _PATIENCE_S
        if (
            self._exchange.any_died
        ):  # this rank's collectives fail, too: it may end at once
            patience_s = _PATIENCE_AFTER_A_DEATH_S
        if look.is_done or is_last or now - look.began > patience_s:
            self._say(self._answer_of(look.found), is_last)

    def _answer_of(self, found: Found) -> Answer:
        """Ranks that have died are named before those that have left: these may have left because
        of that.
        """
        silent = {**found.silent, **self._exchange.ended}
        gone = ended(replace(found, states={}, silent=silent))
        if self._exchange.any_died:
            gone = {rank: one for rank, one in gone.items() if silent[rank].how != LEFT}
        return Answer(
            tuple(gone[rank] for rank in sorted(gone)),
            "" if gone else self._exchange.over,
        )

    def _say(self, answer: Answer, is_last: bool) -> None:
        if answer.missing or (answer.unknown and not is_last):
            listeners.tracer.stall_reported(answer.missing, answer.unknown, self._title)
        text = answer.text(self._size)
        if answer.missing:
            report(logging.WARNING, f"{self._title}: gone: {text}")
        elif self._exchange.any_failed:
            report(logging.WARNING, f"{self._title}: no rank is gone: {answer.unknown}")
        elif answer.unknown and not is_last:
            report(logging.WARNING, f"{self._title}: which rank is gone {text}")
        self._answer = answer  # after the line: `stall` may be looking
