"""Reports, once for a process group, who has gone where a round has failed."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import queue
from concurrent.futures import Future
from datetime import timedelta

from ..sync.events import Report, SyncHandle, bus
from .log_line import report
from .missing_query import END, PATIENCE_S, Answer, MissingQuery, Question, Surroundings
from .missing_rank import Stall, StallReported


class SyncEndReport:
    """The stall monitor's thread calls `look`, and alone writes the fields; any thread may read `stall`."""

    def __init__(self, surroundings: Surroundings, promises: queue.SimpleQueue[Future[Report]]) -> None:
        """promises: of the exceptions that wait for the answer (on_timeout="raise")."""
        self._surroundings, self._promises = surroundings, promises
        self._title = ""  # of the encoder whose sync ended first
        self._query: MissingQuery | None = None
        self._answer: Answer | None = None  # once it is said

    def queries(self) -> list[MissingQuery]:
        return [self._query] if self._query is not None else []

    def stall(self) -> Stall | None:
        query, answer = self._query, self._answer
        if query is None or answer is None or not answer.missing:
            return None
        return Stall(self._title, 0, timedelta(seconds=query.age_s), answer.missing, self._surroundings.size, "")

    def ended(self, sync: SyncHandle, now: float) -> None:
        """A sync has no more rounds: ask who has gone, unless that was asked already."""
        if self._query is None:
            self._title = sync.title
            incident = f"{sync.title}: its length sync has ended"
            self._query = MissingQuery(self._surroundings, Question(END, 0, now, 0, incident, sync.rounds.channel.left))

    def look(self, is_last: bool) -> None:
        query = self._query
        if query is not None and self._answer is None:
            patience_s = PATIENCE_S + 2 * self._surroundings.period_s
            if query.done or is_last or query.age_s > patience_s:
                self._say(query.answer(), is_last)
        if self._answer is not None:
            while not self._promises.empty():
                self._promises.get().set_result(Report(missing=self._answer.missing))

    def _say(self, answer: Answer, is_last: bool) -> None:
        self._answer = answer
        if answer.missing or (answer.unknown and not is_last):
            bus.publish(StallReported(self._title, 0, answer.missing, answer.unknown))
        text = answer.text(self._surroundings.size)
        if answer.missing:
            report(logging.WARNING, f"{self._title}: gone: {text}")
        elif answer.unknown and not is_last:
            report(logging.WARNING, f"{self._title}: which rank is gone {text}")
