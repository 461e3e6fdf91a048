"""Says, on a rank that comes back from a long time without encoder calls, that other ranks have waited for it."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import logging
import threading
import time

from ..channel import keys
from .log_line import report
from .store_client import StoreClient
from .training_notes import TrainingNotes
from .wire import decode_texts

_LOOKS_S = (0.0, 1.0, 3.0)  # after it came back: the others may still be finding out


class LateReturn:
    """The stall monitor's thread calls `look` and `cancel`; each question has its own thread."""

    def __init__(self, rank: int, client: StoreClient, notes: TrainingNotes) -> None:
        self._rank, self._client, self._notes = rank, client, notes
        self._seen_calls, self._seen_since = 0, 0.0
        self._cancelled = threading.Event()  # of the latest question
        self._said: set[str] = set()  # incidents; the questions' threads say them, one thread after the other

    def look(self, away_after_s: float, where: str) -> bool:
        """Whether this rank calls an encoder again, or for the first time, after at least `away_after_s`.

        where: what its training thread did when it last said so.
        """
        last = self._notes.last
        if last.calls == self._seen_calls:
            return False
        away_s = last.since - self._seen_since
        self._seen_calls, self._seen_since = last.calls, last.since
        if away_s < away_after_s:
            return False
        self.cancel()
        self._cancelled = cancelled = threading.Event()
        self._client.ask_in_thread(lambda: self._ask(where, cancelled))
        return True

    def cancel(self) -> None:
        self._cancelled.set()

    def _ask(self, where: str, cancelled: threading.Event) -> None:
        # Errors are nobody's concern: a store that is gone is the waiting ranks' to report.
        with contextlib.suppress(Exception):
            began, key = time.monotonic(), keys.WAITED_FOR.format(rank=self._rank)
            for seconds in _LOOKS_S:
                if cancelled.wait(began + seconds - time.monotonic()):  # the store may end with this process
                    break
                with self._client.asking() as store:
                    data = store.get(key) if store.check([key]) else b""
                if cancelled.is_set() or (data and self._say(decode_texts(data), where)):
                    break

    def _say(self, texts: dict[str, str], where: str) -> bool:
        """False where it was said before: the store keeps the last incident."""
        if texts.get("id", "") in self._said:
            return False
        self._said.add(texts.get("id", ""))
        place = texts.get("where") or where
        been = f"; it had been in {place}" if place else ""
        report(logging.WARNING, f"other ranks waited for this one, and gave up ({texts.get('incident', '')}){been}")
        return True
