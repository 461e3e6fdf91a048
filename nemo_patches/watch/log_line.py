"""The stall monitor's log lines, with a short timeout:
a stderr that is not read blocks the writer.
"""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading

from ..channel.daemon import Daemon
from ..sync import rank_log

_WRITE_LIMIT_S = 0.5
_MOST_BLOCKED = 64


class LogLines:
    """Any thread may call `report`; the fields are written under the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Threads that have not written their line yet.
        self._blocked: list[threading.Thread] = []
        self._lost = 0  # lines lost since the last one that was written

    def report(self, level: int, text: str) -> None:
        """Like rank_log.report, with a timeout. While a line is blocked, there is no wait for
        another one.
        """
        with self._lock:
            self._blocked = [thread for thread in self._blocked if thread.is_alive()]
            if len(self._blocked) >= _MOST_BLOCKED:
                self._lost += 1  # which the next one says
                return
            if self._lost:
                text += (
                    f" | {self._lost} lines before this one are lost: nobody took them"
                )
            self._lost = 0
            limit_s = 0.0 if self._blocked else _WRITE_LIMIT_S
        line = Daemon("line", rank_log.report, level, text)
        if line.begin():
            rank_log.report(level, text)
            return
        with self._lock:
            self._blocked.append(line)
        line.join(limit_s)


report = LogLines().report
