"""Which ranks have not announced themselves.

Asked from half the sync's timeout after this rank's first encoder call on.

A rank of stock NeMo never registers with rank 0. It waits in the default process group, where the
patched ranks' next collective meets its reduce; nobody can help it from outside, so it must be
seen. A rank that is patched and cannot reach rank 0 leaves a note, which says that.
"""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
from collections.abc import Callable

from ..channel.exchange import Exchange
from ..judging.kinds import UNANNOUNCED, UNREACHED
from ..judging.missing_rank import (
    DETAILED,
    NOT_ANNOUNCED,
    REACHED_BY_NONE,
    UNPATCHED,
    Stall,
)
from ..sync.length_sync import current
from ..text import named
from .log_line import report
from .looks import Look

_LONGEST_PAUSE_S = 60.0  # between two looks
_WITHOUT_THEM = (
    "Until they can, no length comes in time, and stall reports do not know where"
    " they are"
)


class RollCall:
    """One process group's roll call, as seen by this rank.

    The stall monitor's thread calls `look`, and alone writes the fields.
    """

    def __init__(
        self,
        exchange: Exchange,
        begin_look: Callable[[], Look],
        has_late_round: Callable[[], bool],
        stalls: Callable[[], tuple[Stall, ...]],
    ) -> None:
        """has_late_round: whether one is about to be reported. stalls: the reported ones, which may
        name the same.
        """
        self.missing: tuple[int, ...] = ()  # at the last look; any thread may read it
        self._exchange = exchange
        self._begin_look = begin_look
        self._has_late_round = has_late_round
        self._stalls = stalls
        self._look: Look | None = None  # the one under way
        self._next_look = 0.0
        self._said_at = 0.0
        self._is_seen = False  # whether `missing` is from after the sync's timeout
        self._is_warned = False
        self._unreached: dict[int, str] = {}  # at the last look
        self._said_unreached: set[int] = set()

    def look(self, now: float, began: float) -> None:
        """Take the next step, if it is time. began: this rank's first encoder call; 0.0: none
        yet.
        """
        if self._exchange.is_joined:
            self._joined(now, began)
        elif began:
            self._look_for_absent(now, began)

    def _look_for_absent(self, now: float, began: float) -> None:
        limit_s = current().timeout.total_seconds()
        if self._look is None:
            if now >= max(self._next_look, began + limit_s / 2):
                self._look = self._begin_look()
        elif self._look.is_done:
            found = self._look.found
            waited_s = self._look.began - began
            self._look = None
            self.missing = tuple(sorted(found.absent))
            self._unreached = found.unreached
            self._is_seen = waited_s >= limit_s and not found.trouble
            self._next_look = now + min(waited_s, _LONGEST_PAUSE_S)
            if waited_s < limit_s:
                self._next_look = max(began + limit_s, now)
            elif found.trouble and not self._said_at:
                report(
                    logging.WARNING,
                    f"cannot see whether every rank is patched: {found.trouble}",
                )
                self._said_at = now  # after the line
        if self._is_seen and self.missing and not self._is_warned:
            self._warn(now)
        if self._is_seen and self._unreached.keys() - self._said_unreached:
            self._say_unreached(now)

    def _say_unreached(self, now: float) -> None:
        """Log these once, unless a report names them."""
        stalls = self._stalls()
        if self._has_late_round() and not stalls:
            return
        new = sorted(self._unreached.keys() - self._said_unreached)
        self._said_unreached.update(new)
        if not _named_in(stalls, UNREACHED).issuperset(new):
            verb = REACHED_BY_NONE
            if len(new) > 1:
                verb = verb.replace("is ", "are ", 1)
            notes = " | ".join(self._unreached[rank] for rank in new[:DETAILED])
            of_all = f"{named(new)} of {self._exchange.size}"
            report(logging.WARNING, f"{of_all} {verb}: {notes}. {_WITHOUT_THEM}")
            self._said_at = now

    def _warn(self, now: float) -> None:
        """Log it once, unless a report names the same ranks; a report may also say that it does not
        know.
        """
        stalls = self._stalls()
        if self._has_late_round() and not stalls:
            return
        self._is_warned = True
        if not _named_in(stalls, UNANNOUNCED).issuperset(self.missing):
            report(logging.WARNING, self._warning())
            self._said_at = now

    def _warning(self) -> str:
        verb = (
            "has not announced itself"
            if len(self.missing) == 1
            else "have not announced themselves"
        )
        why = f"{NOT_ANNOUNCED}. {UNPATCHED}"
        limit_s = current().timeout.total_seconds()
        return (
            f"{named(self.missing)} of {self._exchange.size} {verb} within {limit_s:g}"
            f" s: {why}"
        )

    def _joined(self, now: float, began: float) -> None:
        self.missing = ()
        self._look = None
        if self._said_at:
            self._said_at = 0.0
            report(
                logging.WARNING,
                f"every rank has announced itself now, {now - began:.2f} s after"
                " this one",
            )


def _named_in(stalls: tuple[Stall, ...], kind: str) -> set[int]:
    return {one.rank for stall in stalls for one in stall.missing if one.kind == kind}
