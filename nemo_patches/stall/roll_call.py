"""The roll call: whether every rank is here and patched, with the same versions and settings.

A rank of stock NeMo never joins the others. It waits in the default process group, where the patched ranks' next
collective meets its reduce; nobody can help it from outside, so it must be seen. Once all have joined, one rank
compares what the others say of their versions and settings.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from ..channel import keys
from ..channel.presence import ranks_with_bit
from ..channel.side_channel import SideChannel
from ..channel.store_client import StoreClient, StoreRequest
from ..channel.tree import FORMAT
from ..sync.events import Group, bus
from ..sync.length_sync import current
from ..text import named
from .found import Found
from .log_line import report
from .missing_rank import UNPATCHED, Stall
from .rank_kinds import UNANNOUNCED
from .rank_survey import Look
from .training_notes import TrainingNotes

_LONGEST_PAUSE_S = 60.0  # between two looks at the store, or at all ranks
_MOST_COMPARISONS = 8  # looks: ranks may call apply() at different times, and none may call an encoder
_MOST_DIFFERENCES = 8


class AllAnnounced(NamedTuple):
    """An event, on rank 0 at its first encoder call: every rank has joined, so each is patched."""

    size: int


class RollCall:
    """One process group's roll call, as seen by this rank.

    The stall monitor's thread calls `look`, and alone writes the fields but `_absent`, which a request's thread writes.
    """

    def __init__(
        self,
        group: Group,
        channel: SideChannel,
        client: StoreClient,
        notes: TrainingNotes,
        begin_look: Callable[[], Look],
        has_late_round: Callable[[], bool],
        stalls: Callable[[], tuple[Stall, ...]],
    ) -> None:
        """has_late_round: whether one is about to be reported. stalls: the reported ones, which may name the same."""
        self.missing: tuple[int, ...] = ()  # at the last look; any thread may read it
        self.is_done = False
        self._group, self._channel, self._client, self._notes = group, channel, client, notes
        self._begin_look, self._has_late_round, self._stalls = begin_look, has_late_round, stalls
        self._absent: tuple[int, ...] | None = None  # as the store has it
        self._request: StoreRequest | None = None
        self._began = 0.0  # this rank's first encoder call
        self._next_look = 0.0
        self._said_at = 0.0
        self._is_seen = False  # whether `missing` is from after the sync's timeout
        self._is_warned = self._has_joined = self._is_told = False
        self._comparison: Look | None = None
        self._comparisons = 0
        self._differences: tuple[str, ...] = ()  # at the last one

    def look(self, now: float) -> None:
        """Take the next step, if it is time."""
        if self.is_done:
            return
        if self._channel.is_joined:
            self._joined(now)
            return
        last = self._notes.last
        if not self._began and last.calls:
            self._began = last.since
            self._next_look = last.since + current().timeout.total_seconds() / 2
        if self._began:
            self._look_at_the_store(now)

    def _look_at_the_store(self, now: float) -> None:
        request = self._request
        limit_s, waited_s = current().timeout.total_seconds(), now - self._began
        trouble = request.trouble() if request is not None else ""
        if request is None and now >= self._next_look:
            self._absent = None
            self._request = self._client.ask(self._see)
        elif request is not None and request.is_done:
            self._request = None
            self.missing = self._absent or ()
            self._is_seen = waited_s >= limit_s and not trouble
            self._next_look = self._began + limit_s if waited_s < limit_s else now + min(waited_s, _LONGEST_PAUSE_S)
        if trouble and waited_s >= limit_s and not self._said_at:
            self._said_at = now
            report(logging.WARNING, f"cannot see whether every rank is patched: {trouble}")
        elif self._is_seen and self.missing and not self._is_warned:
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

    def _see(self, store: dist.Store) -> None:
        present = ranks_with_bit(store, keys.PRESENT, self._group.size)
        self._absent = tuple(sorted(set(range(self._group.size)) - present))

    def _warning(self) -> str:
        verb = "has not announced itself" if len(self.missing) == 1 else "have not announced themselves"
        why = f"not patched, or not started. {UNPATCHED}"
        limit_s = current().timeout.total_seconds()
        return f"{named(self.missing)} of {self._group.size} {verb} within {limit_s:g} s: {why}"

    def _joined(self, now: float) -> None:
        if not self._has_joined:
            self._has_joined, self.missing = True, ()
            if self._said_at:
                late_by = f"{now - self._began:.2f} s after this one"
                report(logging.WARNING, f"every rank has announced itself now, {late_by}")
            self._say_who_has_no_reports()
            self._next_look = 0.0
        if self._group.rank == 0 and not self._is_told and self._notes.last.calls:
            self._is_told = True
            bus.publish(AllAnnounced(self._group.size))
        speaks = next((rank for rank, one in enumerate(self._channel.residents) if one.format == FORMAT), -1)
        if self._group.rank not in (0, speaks) or self._comparisons >= _MOST_COMPARISONS:
            self.is_done = True
        elif self._group.rank != speaks:
            self.is_done = self._is_told
        elif self._comparison is None:
            if now >= self._next_look and self._notes.last.calls and self._channel.is_whole:
                self._comparison = self._begin_look()
        elif self._comparison.is_done:
            found, self._comparison = self._comparison.found, None
            self._comparisons += 1
            self._next_look = now + 2.0**self._comparisons
            # A rank that has not called its first encoder yet may still be about to choose its settings; and ranks
            # that change them do not do so at the same moment.
            if all(state.calls for state in found.states.values()) and found.is_complete:
                before, self._differences = self._differences, self._compared(found)
                self.is_done = before == self._differences or not self._differences
                for text in self._differences if self.is_done else ():
                    report(logging.WARNING, text)

    def _say_who_has_no_reports(self) -> None:
        """Logged by the first of the ranks that have them."""
        without = [rank for rank, one in enumerate(self._channel.residents) if one.format != FORMAT]
        others = set(range(self._group.size)) - set(without)
        if without and self._group.rank == min(others, default=-1):
            of_all = f"{named(without)} of {self._group.size}"
            report(logging.WARNING, f"{of_all}: there are no stall reports there; stderr there says why")

    def _compared(self, found: Found) -> tuple[str, ...]:
        """Differences in what should be the same on all ranks."""
        own, texts = found.states[self._group.rank], list[str]()
        for name in ("versions", "settings"):
            others: dict[str, list[int]] = {}
            for group in found.groups:
                if (told := getattr(group.state, name)) != getattr(own, name):
                    others.setdefault(told, []).extend(group.ranks)
            if others:
                told_by = [f"{named(sorted(ranks))}: {value}" for value, ranks in others.items()]
                differing = "; ".join(told_by[:_MOST_DIFFERENCES])
                texts.append(f"ranks differ in their {name}: here {getattr(own, name)}; {differing}")
        return tuple(texts)
