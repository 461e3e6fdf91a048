"""The roll call: whether every rank is here and patched, with the same versions and settings.

A rank of stock NeMo never registers with rank 0. It waits in the default process group, where the patched ranks' next
collective meets its reduce; nobody can help it from outside, so it must be seen. Once all have joined, rank 0 compares
what the others say of their versions and settings.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
from collections.abc import Callable

from ..channel.answers import NO_WATCH
from ..channel.exchange import Exchange
from ..sync.events import Group, observers
from ..sync.length_sync import current
from ..text import named
from .found import Found
from .log_line import report
from .looks import Look
from .missing_rank import NOT_ANNOUNCED, UNPATCHED, Stall
from .rank_kinds import UNANNOUNCED
from .training_notes import TrainingNotes

_LONGEST_PAUSE_S = 60.0  # between two looks
_MOST_COMPARISONS = 8  # looks: ranks may call apply() at different times, and none may call an encoder
_MOST_DIFFERENCES = 8


class RollCall:
    """One process group's roll call, as seen by this rank.

    The stall monitor's thread calls `look`, and alone writes the fields.
    """

    def __init__(
        self,
        group: Group,
        exchange: Exchange,
        notes: TrainingNotes,
        begin_look: Callable[[], Look],
        has_late_round: Callable[[], bool],
        stalls: Callable[[], tuple[Stall, ...]],
    ) -> None:
        """has_late_round: whether one is about to be reported. stalls: the reported ones, which may name the same."""
        self.missing: tuple[int, ...] = ()  # at the last look; any thread may read it
        self.is_done = False
        self._group = group
        self._exchange = exchange
        self._notes = notes
        self._begin_look = begin_look
        self._has_late_round = has_late_round
        self._stalls = stalls
        self._began = 0.0  # this rank's first encoder call
        self._look: Look | None = None  # the one under way
        self._next_look = 0.0
        self._said_at = 0.0
        self._is_seen = False  # whether `missing` is from after the sync's timeout
        self._is_warned = False
        self._has_joined = False
        self._is_told = False
        self._comparisons = 0
        self._differences: tuple[str, ...] = ()  # at the last one

    def look(self, now: float) -> None:
        """Take the next step, if it is time."""
        if self.is_done:
            return
        if self._exchange.is_joined:
            self._joined(now)
            return
        last = self._notes.last
        if not self._began and last.calls:
            self._began = last.since
            self._next_look = last.since + current().timeout.total_seconds() / 2
        if self._began:
            self._look_for_absent(now)

    def _look_for_absent(self, now: float) -> None:
        limit_s = current().timeout.total_seconds()
        if self._look is None:
            if now >= self._next_look:
                self._look = self._begin_look()
        elif self._look.is_done:
            found = self._look.found
            waited_s = self._look.began - self._began
            self._look = None
            self.missing = tuple(sorted(found.absent))
            self._is_seen = waited_s >= limit_s and not found.trouble
            self._next_look = now + min(waited_s, _LONGEST_PAUSE_S)
            if waited_s < limit_s:
                self._next_look = max(self._began + limit_s, now)
            elif found.trouble and not self._said_at:
                self._said_at = now
                report(logging.WARNING, f"cannot see whether every rank is patched: {found.trouble}")
        if self._is_seen and self.missing and not self._is_warned:
            self._warn(now)

    def _warn(self, now: float) -> None:
        """Log it once, unless a report names the same ranks; a report may also say that it does not know."""
        stalls = self._stalls()
        if self._has_late_round() and not stalls:
            return
        self._is_warned = True
        named_there = {one.rank for stall in stalls for one in stall.missing if one.kind == UNANNOUNCED}
        if not named_there.issuperset(self.missing):
            self._said_at = now
            report(logging.WARNING, self._warning())

    def _warning(self) -> str:
        verb = "has not announced itself" if len(self.missing) == 1 else "have not announced themselves"
        why = f"{NOT_ANNOUNCED}. {UNPATCHED}"
        limit_s = current().timeout.total_seconds()
        return f"{named(self.missing)} of {self._group.size} {verb} within {limit_s:g} s: {why}"

    def _joined(self, now: float) -> None:
        if not self._has_joined:
            self._has_joined = True
            self.missing = ()
            self._look = None
            if self._said_at:
                late_by = f"{now - self._began:.2f} s after this one"
                report(logging.WARNING, f"every rank has announced itself now, {late_by}")
            self._next_look = 0.0
        if self._group.rank:
            self.is_done = True
            return
        if not self._is_told and self._notes.last.calls:
            self._is_told = True
            observers.tell(lambda observer: observer.all_announced(self._group.size))
        if self._comparisons >= _MOST_COMPARISONS:
            self.is_done = True
        elif self._look is None:
            if now >= self._next_look and self._notes.last.calls and self._exchange.is_whole:
                self._look = self._begin_look()
        elif self._look.is_done:
            found = self._look.found
            self._look = None
            self._comparisons += 1
            self._next_look = now + 2.0**self._comparisons
            self._compare(found)

    def _compare(self, found: Found) -> None:
        """Log the differences, once two looks have found the same.

        A rank that has not called its first encoder yet may still be about to choose its settings; and ranks that
        change them do not do so at the same moment.
        """
        without = {rank for rank, silence in found.silent.items() if silence.how == NO_WATCH}
        if len(found.heard | found.have_ended | without) < found.size:
            return
        if not all(state.calls for state in found.states.values()):
            return
        before = self._differences
        self._differences = self._compared(found)
        if without:
            of_all = f"{named(sorted(without))} of {found.size}"
            said = f"{of_all}: there are no stall reports there; stderr there says why"
            self._differences = (said, *self._differences)
        self.is_done = before == self._differences or not self._differences
        for text in self._differences if self.is_done else ():
            report(logging.WARNING, text)

    def _compared(self, found: Found) -> tuple[str, ...]:
        """Differences in what should be the same on all ranks."""
        own = found.states[self._group.rank]
        texts: list[str] = []
        for name in ("versions", "settings"):
            others: dict[str, list[int]] = {}
            for rank, state in sorted(found.states.items()):
                told = getattr(state, name)
                if told != getattr(own, name):
                    others.setdefault(told, []).append(rank)
            if others:
                told_by = [f"{named(ranks)}: {value}" for value, ranks in others.items()]
                differing = "; ".join(told_by[:_MOST_DIFFERENCES])
                texts.append(f"ranks differ in their {name}: here {getattr(own, name)}; {differing}")
        return tuple(texts)
