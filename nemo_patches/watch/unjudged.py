"""What is logged where nothing can be judged, since judging cannot be loaded:
the ranks' facts, as JSON.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from .log_line import report
from .looks import Look
from .progress import Progress


class Unjudged:
    """The stall monitor's thread calls `look`."""

    def __init__(self, progress: Progress, begin_look: Callable[[], Look]) -> None:
        self._progress = progress
        self._begin_look = begin_look
        self._look: Look | None = None
        self._said = -1.0  # the last step before the stall that was said

    def look(self, now: float, limit_s: float, why: str) -> None:
        """Once per stall. limit_s: stall_timeout. why: judging cannot be loaded."""
        stepped_at = self._progress.stepped_at
        if not limit_s or now - stepped_at < limit_s or stepped_at == self._said:
            return
        if self._look is None:
            self._look = self._begin_look()
        elif self._look.is_done:
            facts = json.dumps(self._look.heard.answers.to_json())
            self._look = None
            self._said = stepped_at
            stall = f"no step for {now - stepped_at:.0f} s"
            report(
                logging.WARNING,
                f"{stall}. This cannot be judged here ({why}); what the ranks say: {facts}",
            )
