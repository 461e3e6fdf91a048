"""The stall monitor's log lines, which it waits for only briefly: a stderr that nobody reads blocks who writes."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading

from ..channel.daemon import Daemon
from ..sync import rank_log

_WRITE_LIMIT_S, _MOST_BLOCKED = 0.5, 64


class LogLines:
    """Any thread may call `report`; the fields are written under the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocked: list[threading.Thread] = []  # that have not written their line yet
        self._lost = 0  # lines since the last that was taken

    def report(self, level: int, text: str) -> None:
        """As rank_log.report, within a time limit. While a line is blocked nobody waits for another one."""
        with self._lock:
            self._blocked = [thread for thread in self._blocked if thread.is_alive()]
            if len(self._blocked) >= _MOST_BLOCKED:
                self._lost += 1  # which the next one says
                return
            text += f" | {self._lost} lines before this one are lost: nobody took them" if self._lost else ""
            self._lost, limit_s = 0, 0.0 if self._blocked else _WRITE_LIMIT_S
        line = Daemon("line", rank_log.report, level, text)
        if line.begin():
            rank_log.report(level, text)
            return
        with self._lock:
            self._blocked.append(line)
        line.join(limit_s)


report = LogLines().report
