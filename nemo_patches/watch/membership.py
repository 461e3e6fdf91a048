"""Who takes part: ranks that have ended, that never came, and that differ from the others."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..channel.answers import ENDED, LEFT, NOT_COME, UNREACHED, silent_by
from ..limits import PATIENCE_S
from ..sync.encoder_rounds import listeners
from ..sync.length_sync import current
from ..text import FEW_RANKS, named
from .incidents import Incident, Incidents, Reason
from .late_rounds import LateRounds
from .log_line import report
from .looks import Told

if TYPE_CHECKING:
    from ..judging.answer import Answer

_JOB = "this job"  # in place of an encoder
# This rank's collectives fail, too: it may end at once.
_PATIENCE_AFTER_A_DEATH_S = 0.05
_LONGEST_PAUSE_S = 60.0  # between two looks
_SOON_S = 0.5
_WITHOUT_THEM = (
    "Until they can, no length comes in time, and stall reports do not know where"
    " they are"
)
# Looks: ranks may call apply() at different times, and none may call an encoder.
_MOST_COMPARISONS = 8
# Then it is said that all have joined; what differs is said when it is known.
_WHOLE_S = 60.0


class Gone(Reason):
    """Ranks that have ended: a round has failed, or one ended without a word. One incident for a
    process group, which never ends.
    """

    def __init__(self, incidents: Incidents) -> None:
        super().__init__(incidents)
        self._title = ""  # of the encoder whose rounds ended first
        self._since = 0.0

    @property
    def patience_s(self) -> float:  # type: ignore[override]
        has_died = self.exchange.any_died
        return _PATIENCE_AFTER_A_DEATH_S if has_died else PATIENCE_S

    def find(self, now: float, is_last: bool) -> dict[Any, float]:
        if not self._since:
            syncs = [] if is_last else self.notes.syncs(self.group)
            failed = next((sync.title for sync in syncs if sync.has_failed()), "")
            if failed or self.exchange.any_died:
                self._title = failed or _JOB
                self._since = now
        return {self._title: self._since} if self._since else {}

    def next_at(self, incident: Incident) -> float:
        return math.inf if incident.said_at else incident.since

    def say(self, incident: Incident, told: Told, now: float) -> None:
        from ..judging.missing_rank import Stall

        incident.said_at = now
        answer = self._answer(told)
        title = self._title
        is_last = told.judgement is None
        if answer.missing or (answer.unknown and not is_last):
            listeners.tracer.stall_reported(answer.missing, answer.unknown, title)
        size = self.group.size
        text = answer.text(size)
        if answer.missing:
            report(logging.WARNING, f"{title}: gone: {text}")
            incident.stall = Stall(title, 0, timedelta(0), answer.missing, size, "")
        elif self.exchange.any_failed:
            report(logging.WARNING, f"{title}: no rank is gone: {answer.unknown}")
        elif answer.unknown and not is_last:
            report(logging.WARNING, f"{title}: which rank is gone {text}")

    def _answer(self, told: Told) -> Answer:
        """Ranks that have died are named before those that have left: these may have left because
        of that. So may those of other hosts have ended that only a question found gone.
        """
        from ..judging.answer import Answer, ended
        from ..judging.found import Found

        exchange = self.exchange
        silent = {**told.silent, **exchange.ended}
        found = Found(exchange.size, {}, silent, tuple(exchange.members))
        gone = ended(found)
        died = silent_by(exchange.ended, ENDED)
        hosts = {gone[rank].host for rank in died}
        for rank in list(gone) if died else ():
            how = silent[rank].how
            if how == LEFT or (how == ENDED and gone[rank].host not in hosts):
                del gone[rank]
        in_order = tuple(gone[rank] for rank in sorted(gone))
        return Answer(in_order, "" if gone else exchange.over)


class Absent(Reason):
    """Ranks that have not announced themselves, from half the sync's timeout after this rank's
    first encoder call on.

    A rank of stock NeMo never registers with rank 0. It waits in the default process group, where
    the patched ranks' next collective meets its reduce; nobody can help it from outside, so it must
    be seen. A rank that is patched and cannot reach rank 0 leaves a note, which says that.
    """

    def __init__(self, incidents: Incidents, late_rounds: LateRounds) -> None:
        super().__init__(incidents)
        self._late_rounds = late_rounds
        self.missing: tuple[int, ...] = ()  # at the last look; any thread may read it
        self._began = 0.0  # this rank's first encoder call
        self._next_look = 0.0
        self._said: set[int] = set()  # ranks that this or another line has named

    def find(self, now: float, is_last: bool) -> dict[Any, float]:
        last = self.notes.last
        if not self._began and last.calls:
            self._began = last.since
        if is_last or not self._began or self.exchange.is_joined:
            return {}
        is_late = now >= self._began + current().timeout.total_seconds() / 2
        return {"absent": self._began} if is_late else {}

    def next_at(self, incident: Incident) -> float:
        return self._next_look

    def say(self, incident: Incident, told: Told, now: float) -> None:
        silent = told.silent
        self.missing = tuple(sorted(silent_by(silent, NOT_COME)))
        limit_s = current().timeout.total_seconds()
        waited_s = incident.looked_at - incident.since
        self._next_look = now + min(waited_s, _LONGEST_PAUSE_S)
        trouble = self.exchange.trouble
        if waited_s < limit_s:
            self._next_look = max(incident.since + limit_s, now)
        elif trouble:
            if not incident.said_at:
                text = "cannot see whether every rank is patched"
                report(logging.WARNING, f"{text}: {trouble}")
                incident.said_at = now  # after the line
        elif self._late_rounds.is_busy and not self.incidents.stalls():
            self._next_look = now + _SOON_S  # a line may name the same ranks
        else:
            self._warn(incident, silent_by(silent, UNREACHED), now)

    def over(self, incident: Incident, now: float) -> None:
        if not self.exchange.is_joined:
            return  # this process ends
        self.missing = ()
        if incident.said_at:
            late_s = now - incident.since
            text = "every rank has announced itself now"
            report(logging.WARNING, f"{text}, {late_s:.2f} s after this one")

    def _warn(self, incident: Incident, notes: dict[int, str], now: float) -> None:
        """Log each rank once, unless another line names it; that may also say that it does not
        know.
        """
        from ..judging import kinds
        from ..judging.missing_rank import (
            DETAILED,
            NOT_ANNOUNCED,
            REACHED_BY_NONE,
        )

        of_kinds = (kinds.UNANNOUNCED, kinds.UNREACHED)
        stalls = self.incidents.stalls()
        named_here = self._said | {
            one.rank
            for stall in stalls
            for one in stall.missing
            if one.kind in of_kinds
        }
        lines = []
        if not named_here.issuperset(self.missing):
            verb = "has not announced itself"
            if len(self.missing) > 1:
                verb = "have not announced themselves"
            what = f"{verb} within {current().timeout.total_seconds():g} s"
            if not self.group.rank or self.group.size <= FEW_RANKS:
                what += f": {NOT_ANNOUNCED}"
            lines.append((self.missing, what))
        if new := sorted(notes.keys() - named_here):
            verb = REACHED_BY_NONE
            if len(new) > 1:
                verb = verb.replace("is ", "are ", 1)
            told = " | ".join(notes[rank] for rank in new[:DETAILED])
            lines.append((tuple(new), f"{verb}: {told}. {_WITHOUT_THEM}"))
        for ranks, text in lines:
            of_all = f"{named(ranks)} of {self.group.size}"
            report(logging.WARNING, f"{of_all} {text}")
            incident.said_at = now
        self._said |= {*self.missing, *notes}  # after the lines


class Roll(Reason):
    """On rank 0, once all ranks have joined: it says so, and how they differ, as soon as two looks
    have found the same.
    """

    needs_judgement = False

    def __init__(self, incidents: Incidents) -> None:
        super().__init__(incidents)
        self.is_done = False
        self._joined_at = 0.0
        self._is_told = False
        self._looks = 0
        self._next_look = 0.0
        self._differences: tuple[str, ...] = ()  # at the last look

    def find(self, now: float, is_last: bool) -> dict[Any, float]:
        if self.is_done or not self.exchange.is_joined:
            return {}
        if self.group.rank:
            self.is_done = True
        elif is_last:
            if self._joined_at and not self._is_told:
                self._tell(self._differences)
        elif self.notes.last.calls:
            self._joined_at = self._joined_at or now
            if not self._is_told and now - self._joined_at >= _WHOLE_S:
                self._tell(())
            return {"roll": self._joined_at}
        return {}

    def next_at(self, incident: Incident) -> float:
        return self._next_look if self.exchange.is_whole else math.inf

    def say(self, incident: Incident, told: Told, now: float) -> None:
        self._looks += 1
        self._next_look = now + 2.0**self._looks
        is_done = self._looks >= _MOST_COMPARISONS
        if told.differences is not None:
            before, self._differences = self._differences, told.differences
            if before == self._differences or not self._differences:
                is_done = True
                if self._differences:
                    self._tell(self._differences)
        if is_done and not self._is_told:
            self._tell(())
        self.is_done = is_done  # after the line: another thread may be looking

    def _tell(self, differences: tuple[str, ...]) -> None:
        self._is_told = True
        size = self.group.size
        if listeners.all_announced(size, differences):
            return
        for text in differences:  # nothing is patched
            report(logging.WARNING, text)
