"""Once all ranks have joined: rank 0 says so, and how their versions, settings and encoders differ.

It looks at what the ranks say of themselves, and judges nothing.
"""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
from collections.abc import Callable

from ..channel.answers import ENDED, LEFT, NO_WATCH, OTHERS
from ..channel.exchange import Exchange
from ..sync.rounds import Group, listeners
from ..text import named, safe
from .log_line import report
from .looks import Heard, Look
from .training_notes import TrainingNotes

# Looks: ranks may call apply() at different times, and none may call an encoder.
_MOST_COMPARISONS = 8
_MOST_DIFFERENCES = 8
# Then it is said that all have joined; what differs is said when it is known.
_PATIENCE_S = 60.0


class AllRanks:
    """Of one process group. The stall monitor's thread calls `look`, and alone writes the
    fields.
    """

    def __init__(
        self,
        group: Group,
        exchange: Exchange,
        notes: TrainingNotes,
        begin_look: Callable[[], Look],
    ) -> None:
        self.first_call_at = 0.0  # this rank's, by time.monotonic()
        self.is_done = False
        self._group = group
        self._exchange = exchange
        self._notes = notes
        self._begin_look = begin_look
        self._look: Look | None = None  # the one under way
        self._next_look = 0.0
        self._joined_at = 0.0
        self._is_told = False
        self._comparisons = 0
        self._differences: tuple[str, ...] = ()  # at the last one

    def look(self, now: float) -> None:
        """Take the next step, if it is time."""
        last = self._notes.last
        if not self.first_call_at and last.calls:
            self.first_call_at = last.since
        if self.is_done or not self._exchange.is_joined:
            return
        if self._group.rank:
            self.is_done = True
            return
        if not last.calls:
            return
        self._joined_at = self._joined_at or now
        is_done = False
        if self._look is not None and self._look.is_done:
            heard = self._look.heard
            self._look = None
            self._comparisons += 1
            self._next_look = now + 2.0**self._comparisons
            is_done = self._compare(heard) or self._comparisons >= _MOST_COMPARISONS
        elif self._look is None and now >= self._next_look and self._exchange.is_whole:
            self._look = self._begin_look()
        if not self._is_told and (is_done or now - self._joined_at >= _PATIENCE_S):
            self._tell(())
        self.is_done = is_done  # after the line: another thread may be looking

    def end(self) -> None:
        """This process or its process group ends: say what is known by now."""
        if self._joined_at and not self._is_told:
            self._tell(self._differences)

    def _compare(self, heard: Heard) -> bool:
        """Tell the differences, once two looks have found the same; whether that was the last.

        A rank that has not called its first encoder yet may still be about to choose its settings;
        and ranks that change them do not do so at the same moment.
        """
        silent = heard.answers.silent
        gone = {
            rank for rank, silence in silent.items() if silence.how in (LEFT, ENDED)
        }
        without = {rank for rank, silence in silent.items() if silence.how == NO_WATCH}
        groups = [group for key, group in heard.answers.groups.items() if key != OTHERS]
        told = {rank: _texts(group.state) for group in groups for rank in group.ranks}
        if len(told.keys() | gone | without) < heard.size or not all(told.values()):
            return False
        before = self._differences
        self._differences = _compared(told, self._group.rank)
        if without:
            of_all = f"{named(sorted(without))} of {heard.size}"
            said = f"{of_all}: there are no stall reports there; stderr there says why"
            self._differences = (said, *self._differences)
        is_done = before == self._differences or not self._differences
        if is_done and self._differences:
            self._tell(self._differences)
        return is_done

    def _tell(self, differences: tuple[str, ...]) -> None:
        self._is_told = True
        size = self._group.size
        if listeners.all_announced(size, differences):
            return
        for text in differences:  # nothing is patched
            report(logging.WARNING, text)


def _texts(state: object) -> dict[str, str]:
    """What should be the same on all ranks; empty before its first encoder call, or if no rank of
    this format sends that.
    """
    if not isinstance(state, dict) or not state.get("calls"):
        return {}
    return {name: safe(str(state.get(name, ""))) for name in ("versions", "settings")}


def _compared(told: dict[int, dict[str, str]], own: int) -> tuple[str, ...]:
    """The differences in what should be the same on all ranks."""
    texts: list[str] = []
    for name, here in told[own].items():
        others: dict[str, list[int]] = {}
        for rank in sorted(told):
            if told[rank][name] != here:
                others.setdefault(told[rank][name], []).append(rank)
        if others:
            told_by = [f"{named(ranks)}: {value}" for value, ranks in others.items()]
            texts.append(
                f"ranks differ in their {name}: here {here};"
                f" {'; '.join(told_by[:_MOST_DIFFERENCES])}"
            )
    return tuple(texts)
