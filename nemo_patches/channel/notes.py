"""Notes of ranks that cannot reach rank 0, in the job's store: one key for each, only then.

Rank 0 reads them while ranks are absent, in a thread of its own: a store that does not answer holds
its client's lock, and rank 0's exchange is to answer questions meanwhile.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from . import meeting
from .daemon import Daemon
from .meeting import Member

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 4.0
# A request each, at one time; the others have their turn next.
_MOST_AT_ONCE = 32


class Notes:
    """As rank 0 knows them. The exchange's thread writes the fields; its reader is another one."""

    def __init__(self, post: Callable[[Callable[[], object]], None]) -> None:
        """post: has a call done by the exchange's thread."""
        self.of: dict[int, Member] = {}  # by rank; trouble: why it cannot reach rank 0
        self._post = post
        self._reader: Daemon | None = None
        # While it is read, its reader keeps it.
        self._store: Callable[[], Any] = lambda: None
        self._asked = 0  # of the absent ranks, how many have had their turn
        self._next_at = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def look(self, store: Any, token: bytes, absent: list[int], now: float) -> float:
        """Read some of the absent ranks' notes, if it is time; return after what time to look
        again.
        """
        if now < self._next_at:
            return self._next_at - now
        self._next_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        unknown = [rank for rank in absent if rank not in self.of]
        if unknown and (self._reader is None or not self._reader.is_alive()):
            first = self._asked % len(unknown)
            self._asked = first + _MOST_AT_ONCE
            ranks = unknown[first : first + _MOST_AT_ONCE]
            self._store = weakref.ref(store)
            self._reader = Daemon("notes", self._read, store, token, ranks)
            self._reader.begin()
        return self._pause_s

    def end(self, limit_s: float) -> None:
        """At exit: no request may return into an interpreter that ends."""
        reader, store = self._reader, self._store()
        if reader is not None and reader.is_alive() and store is not None:
            meeting.end_requests(store)
            reader.join(limit_s)

    def _read(self, store: Any, token: bytes, ranks: list[int]) -> None:
        # The store is gone: rank 0 says so of itself.
        with contextlib.suppress(Exception):
            found = meeting.find_notes(store, token, ranks)
            self._post(lambda: self.of.update(found))
