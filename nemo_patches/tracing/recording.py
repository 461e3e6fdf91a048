"""What a trace and a dump record in the same way; a subclass says where the records go."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from nemo_patches.stall.job_stall import JobStalled
from nemo_patches.stall.missing_rank import MissingRank, StallReported
from nemo_patches.sync.events import CallLeft, Grown
from nemo_patches.text import first_line
from nemo_patches.tracing import records
from nemo_patches.tracing.records import Missing, Record, Stalled


class Recording(ABC):
    """Subscribes to events. The length sync's come on the training thread, a stall report on its monitor's."""

    def __init__(self) -> None:
        self.failed = ""  # the exception that ends this process, in a line, unless an encoder is called again

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """For the event bus."""
        return {
            CallLeft: self.call_left,
            Grown: self.grown,
            StallReported: self.stall_reported,
            JobStalled: self.job_stalled,
        }

    @abstractmethod
    def now(self) -> float:
        """The time of a record that is made now: seconds since the header's `started`."""

    @abstractmethod
    def put(self, record: Record) -> None:
        """Any thread."""

    @abstractmethod
    def call_left(self, event: CallLeft) -> None: ...

    @abstractmethod
    def grown(self, event: Grown) -> None: ...

    def stall_reported(self, event: StallReported) -> None:
        ranks, kinds, where = _of_each(event.missing)
        collectives = [rank.collective for rank in event.missing]
        self.put(Missing(self.now(), event.encoder, event.call, ranks, kinds, where, event.unknown, collectives))

    def job_stalled(self, event: JobStalled) -> None:
        waited = event.level >= logging.WARNING
        self.put(Stalled(self.now(), *_of_each(event.missing if waited else ()), event.text, waited))

    def note_failed(self, error: BaseException, thread: str = "") -> None:
        """An exception that nobody catches in this thread; without a name: it ends the process, as far as is known."""
        said = first_line(error)
        if not thread:
            if said == self.failed:
                return  # the trainer's callback has told of it, and now the interpreter does
            self.failed = said
        self.put(records.failed(self.now(), thread, error))


def _of_each(missing: tuple[MissingRank, ...]) -> tuple[list[int], list[str], list[str]]:
    return [rank.rank for rank in missing], [rank.kind for rank in missing], [rank.where for rank in missing]
