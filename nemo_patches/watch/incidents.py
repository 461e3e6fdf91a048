"""The one loop of what is wrong on this rank:

An incident is due, all ranks are asked, one judges, this rank says its line; and later again. What
can be an incident, the reasons know.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..channel.exchange import Exchange
from ..facts import RankFacts
from ..sync.encoder_rounds import Group
from .late_modules import LateModules
from .looks import Look, Looks, Told
from .progress import Progress
from .training_notes import TrainingNotes

if TYPE_CHECKING:
    from ..judging.missing_rank import Stall


class Incident:
    """One subject of a reason. Only the stall monitor's thread writes the fields; times are
    monotonic, 0.0: not yet.
    """

    def __init__(self, subject: Any, since: float) -> None:
        self.subject = subject
        self.since = since
        self.look: Look | None = None  # the one under way
        self.looked_at = 0.0  # when the last one began
        self.said_at = 0.0
        self.repeats = 0
        self.level = logging.WARNING  # of its lines
        self.stall: Stall | None = None  # for status(), from its line on


class Reason:
    """What may be wrong. The stall monitor's thread calls the methods."""

    needs_judgement = True
    lead_s = 0.0  # a look begins so long before a line is due
    patience_s = 5.0  # for a look that is not done when its line is due
    takes_earlier = False  # whether an earlier verdict serves where the look has none

    def __init__(self, incidents: Incidents) -> None:
        self.incidents = incidents
        self.group = incidents.group
        self.exchange = incidents.exchange
        self.notes = incidents.notes
        self.progress = incidents.progress
        incidents.reasons.append(self)

    def find(self, now: float, is_last: bool) -> dict[Any, float]:
        """The subjects of its incidents, and since when each is one. is_last: this process or its
        process group ends.
        """
        raise NotImplementedError

    def next_at(self, incident: Incident) -> float:
        """When the next line is due."""
        raise NotImplementedError

    def say(self, incident: Incident, told: Told, now: float) -> None:
        """Log what a verdict shows. It has no judgement where this process ends before there is
        one.
        """
        raise NotImplementedError

    def over(self, incident: Incident, now: float) -> None:
        """Log that an incident is over."""

    def heard(self, told: Told, own: RankFacts) -> None:
        """A verdict, also one that another rank has asked for, and what this rank had said."""


@dataclass(eq=False)
class Incidents:
    """Of one process group on this rank. The stall monitor's thread calls `tick` and `heard`; any
    thread may call `stalls`.
    """

    group: Group
    exchange: Exchange
    notes: TrainingNotes
    progress: Progress
    late: LateModules
    looks: Looks
    reasons: list[Reason] = field(default_factory=list)  # each adds itself
    _open: dict[tuple[Reason, Any], Incident] = field(default_factory=dict)

    @property
    def need_judgement(self) -> bool:
        return any(reason.needs_judgement for reason, _ in self._open)

    def stalls(self) -> tuple[Stall, ...]:
        """The reported rounds that have not completed, the ranks that have ended, a stall of the
        job.
        """
        now = time.monotonic()
        return tuple(
            replace(stall, since=timedelta(seconds=now - incident.since))
            for incident in list(self._open.values())
            if (stall := incident.stall) is not None
        )

    def heard(self, told: Told, own: RankFacts) -> None:
        for reason in self.reasons:
            reason.heard(told, own)

    def tick(self, is_last: bool) -> None:
        for reason in self.reasons:
            now = time.monotonic()
            found = reason.find(now, is_last)
            for subject, since in found.items():
                key = reason, subject
                if key not in self._open:
                    self._open[key] = Incident(subject, since)
                self._step(reason, self._open[key], is_last)
            for key in [key for key in self._open if key[0] is reason]:
                if key[1] not in found:
                    reason.over(self._open.pop(key), now)

    def _step(self, reason: Reason, incident: Incident, is_last: bool) -> None:
        due_at = reason.next_at(incident)
        now = time.monotonic()
        if now < due_at - reason.lead_s:
            incident.look = None  # it has moved meanwhile
            return
        if reason.needs_judgement:
            self.late.run()
        if incident.look is None and not is_last:
            incident.look = self.looks.begin()
        look = incident.look
        if now < due_at:
            return
        told = self.looks.latest if reason.takes_earlier else None
        if look is None:
            told = told or Told({}, None, None)
        else:
            if not (look.is_done or is_last or now - look.began >= reason.patience_s):
                return
            told = look.told or told or self.looks.alone()
            incident.looked_at = look.began
            incident.look = None
        reason.say(incident, told, now)
