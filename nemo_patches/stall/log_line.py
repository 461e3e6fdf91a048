"""The stall monitor's log lines, which it waits for only briefly: a stderr that nobody reads blocks who writes."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading

from ..sync import rank_log

_WRITE_LIMIT_S = 1.0


def report(level: int, text: str) -> None:
    """As rank_log.report, within a time limit: a launcher that hangs, or a log server, stops no heart and no exit."""
    line = threading.Thread(target=rank_log.report, args=(level, text), name="nemo_patches log line", daemon=True)
    try:
        line.start()
    except RuntimeError:  # as many threads as this user or container may have, or the interpreter ends
        rank_log.report(level, text)
    else:
        line.join(_WRITE_LIMIT_S)
