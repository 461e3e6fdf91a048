"""Logs all threads' stacks, once, if an encoder call lasts longer than call_timeout; interrupts nothing."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging

from . import stacks
from .log_line import report
from .training_notes import FORWARD, TrainingNotes


class CallWatchdog:
    """The stall monitor's thread calls `look`, and alone writes the fields."""

    def __init__(self, notes: TrainingNotes) -> None:
        self._notes = notes
        self._said_since = 0.0  # when the last reported call began

    def look(self, now: float, limit_s: float) -> None:
        """limit_s: 0.0 for never."""
        last, phase = self._notes.last, self._notes.phase()
        if not limit_s or last.sync is None or self._said_since == last.since or now - last.since < limit_s:
            return
        if phase == FORWARD and not last.in_forward():
            return
        self._said_since = last.since
        report(
            logging.WARNING,
            f"{last.sync.title}: call {last.call} has lasted {now - last.since:.1f} s, more than call_timeout; it is "
            f"in: {phase}. Nothing is interrupted. | " + " | ".join(stacks.all_threads()),
        )
