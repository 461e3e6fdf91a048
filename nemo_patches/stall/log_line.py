"""The stall monitor's log lines, which it waits for only briefly: a stderr that nobody reads blocks who writes."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading

from ..sync import rank_log

_WRITE_LIMIT_S, _MOST_BLOCKED = 0.5, 64
_blocked: list[threading.Thread] = []  # that have not written their line yet: nobody waits for another one then


def report(level: int, text: str) -> None:
    """As rank_log.report, within a time limit: a launcher that hangs, or a log server, stops no heart and no exit."""
    _blocked[:] = [thread for thread in _blocked if thread.is_alive()]
    if len(_blocked) >= _MOST_BLOCKED:
        return  # there is nowhere to say it
    line = threading.Thread(target=rank_log.report, args=(level, text), name="nemo_patches log line", daemon=True)
    try:
        line.start()
    except RuntimeError:  # as many threads as this user or container may have, or the interpreter ends
        rank_log.report(level, text)
        return
    line.join(0 if _blocked else _WRITE_LIMIT_S)
    _blocked.append(line)
