"""A round that does not come within the timeout: with its missing ranks, and when it has completed.

On a rank that returns to the encoder: that other ranks had waited for it, and gave up.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..facts import RankFacts
from ..limits import PATIENCE_S, REPORT_PER_RANK_S
from ..sync.encoder_rounds import Round, WatchedRounds, listeners
from ..sync.length_sync import current
from ..text import FEW_RANKS, named
from .incidents import Incident, Incidents, Reason
from .log_line import report
from .looks import Told

if TYPE_CHECKING:
    from ..judging.answer import Answer

FIRST_REPEAT_S = 60.0
_IS_SHORT = "; after a wait in vain, the next ones are shorter than the timeout"


class LateRounds(Reason):
    """Of the encoders, data loaders and checkpoints of a process group. A subject is an encoder and
    its round.
    """

    takes_earlier = True  # if it tells of the same round

    def __init__(self, incidents: Incidents) -> None:
        super().__init__(incidents)
        self.patience_s = PATIENCE_S + incidents.group.size * REPORT_PER_RANK_S
        # What RankFacts.late says of each that is late enough to be looked into.
        self._late: dict[tuple[WatchedRounds, Round], tuple[int, int, int, int]] = {}
        self._said_at: dict[WatchedRounds, float] = {}
        # Encoders of which it was said that ranks had fewer batches of an evaluation.
        self._said_uneven: set[WatchedRounds] = set()
        # By key: a round that others waited for, and where this rank was then.
        self._waited_for: dict[str, tuple[int, str]] = {}
        # By key: the last round of which that was said.
        self._returned: dict[str, int] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._late)

    def asks(self) -> dict[str, tuple[int, int, int, int]]:
        """RankFacts.late."""
        in_order = sorted(self._late.items(), key=lambda item: item[1])
        return {sync.key: call for (sync, _), call in in_order}

    def find(self, now: float, is_last: bool) -> dict[Any, float]:
        self._say_returned()
        syncs = self.notes.syncs(self.group)
        late = [
            (sync, round_)
            for sync in syncs
            for round_ in dict.fromkeys((sync.timed_out, sync.round))
            if round_ is not None and self._is_late(sync, round_, now)
        ]
        for sync, round_ in set(late) - self._late.keys():
            if not is_last and now < self._due_at(sync, round_):
                # Where a rank is that comes before the line: the rank that judges knows it.
                self.incidents.looks.begin()
        self._late = {one: self._late.get(one) or self._call(*one) for one in late}
        return {one: one[1].issued_at for one in late}

    def next_at(self, incident: Incident) -> float:
        if incident.said_at:
            return incident.said_at + FIRST_REPEAT_S * 2.0**incident.repeats
        return self._due_at(*incident.subject)

    def say(self, incident: Incident, told: Told, now: float) -> None:
        from ..judging.answer import Answer
        from ..judging.kinds import LATE
        from ..judging.missing_rank import MissingRank, Stall

        sync, round_ = incident.subject
        size = self.group.size
        answer = Answer(unknown="this process ends")
        if told.judgement is not None:
            answer = told.judgement.answer(sync.key, round_.number)
        if answer.unknown and not answer.missing and size == 2:
            # Whatever else is not known: it is the other one.
            other = MissingRank(1 - self.group.rank, LATE)
            answer = replace(answer, missing=(other,))
        if incident.said_at:
            incident.repeats += 1
        if answer.is_allowed:
            self._say_uneven(sync, round_, answer)
            stall = None
        else:
            listeners.tracer.stall_reported(
                answer.missing, answer.unknown, sync.title, round_.call
            )
            self._log(incident, answer, now)
            stall = Stall(
                sync.title,
                round_.call,
                timedelta(0),
                answer.missing,
                size,
                answer.unknown,
            )
        incident.stall = stall  # after the line: `stalls` may be looking
        incident.said_at = self._said_at[sync] = now

    def over(self, incident: Incident, now: float) -> None:
        sync, round_ = incident.subject
        stall = incident.stall
        if stall is None or not sync.has_come(round_):
            return
        from ..judging.missing_rank import been

        missing = stall.missing
        who = named(rank.rank for rank in missing) if missing else "the missing length"
        late_s = _came_at(sync, round_) - round_.issued_at
        text = f"recovered: {who} came {late_s:.2f} s late{been(missing)}"
        report(incident.level, f"{sync.title}: {text}")

    def heard(self, told: Told, own: RankFacts) -> None:
        """Ranks have given up a round: did they wait for this one?"""
        if told.judgement is None:
            return
        now = time.monotonic()
        for late in told.judgement.late:
            key, number = late.key, late.number
            if late.given_up < 0 or number <= self._returned.get(key, 0):
                continue
            if own.rounds.get(key, 0) < number and not own.apart.get(key):
                self._waited_for.setdefault(key, (number, own.where))
            elif any(
                one.number == number and one.issued_at > now - late.given_up
                for _, one in self._rounds_from(key, number)
            ):
                self._waited_for.setdefault(key, (number, ""))

    def _is_late(self, sync: WatchedRounds, round_: Round, now: float) -> bool:
        """From half the timeout on, or where a wait for it has timed out that is not reported."""
        if round_ is sync.timed_out and not self._is_reported(sync, round_):
            return True
        is_early = now - round_.issued_at < current().timeout.total_seconds() / 2
        return not sync.is_over(round_) and (
            (sync, round_) in self._late or not is_early
        )

    def _is_reported(self, sync: WatchedRounds, round_: Round) -> bool:
        """Whether the last report is of later than the last round that came in time before this
        one: then only a whole timeout makes another report.
        """
        return self._said_at.get(sync, 0.0) > round_.in_time_at

    def _due_at(self, sync: WatchedRounds, round_: Round) -> float:
        end = round_.issued_at + current().timeout.total_seconds()
        if round_ is sync.timed_out and not self._is_reported(sync, round_):
            return min(round_.gave_up_at, end)
        return end

    def _call(self, sync: WatchedRounds, round_: Round) -> tuple[int, int, int, int]:
        """What RankFacts.late says of it."""
        latest, (trained, evaluated) = sync.latest_call
        is_uneven = not round_.training and self.notes.may_be_uneven()
        evaluation = trained if is_uneven else -1
        if latest != round_.call:
            trained = evaluated = -1
        return round_.number, trained, evaluated, evaluation

    def _log(self, incident: Incident, answer: Answer, now: float) -> None:
        sync, round_ = incident.subject
        came_at = _came_at(sync, round_) if sync.has_come(round_) else now
        waited_s = (round_.gave_up_at or came_at) - round_.issued_at
        age = timedelta(seconds=round(now - round_.issued_at))
        still = f"still (after {age}) " if incident.repeats else ""
        text = f"{sync.call_title(round_)}: {still}{sync.late(round_, waited_s)}"
        is_short = waited_s < current().timeout.total_seconds()
        if is_short:
            text += _IS_SHORT
        if answer.missing or answer.unknown:
            size = self.group.size
            who = answer.text(size)
            is_told = all(one.rank for one in answer.missing) and not answer.unknown
            if self.group.rank and size > FEW_RANKS and is_told:
                who = f"{who.partition(' | ')[0]} | where: in rank 0's line"
            text += f". Missing: {who}"
        else:
            text += ". Every rank has come by now"
            if is_short:  # on a busy machine
                incident.level = logging.INFO
        report(incident.level, text)

    def _say_uneven(self, sync: WatchedRounds, round_: Round, answer: Answer) -> None:
        """Log it once: a rank without batches is not missing, and every evaluation may end like
        this.
        """
        if sync in self._said_uneven:
            return
        self._said_uneven.add(sync)
        who = named(rank.rank for rank in answer.missing)
        ended = "have ended this evaluation, they"
        if len(answer.missing) == 1:
            ended = "has ended this evaluation, it"
        who = f"{sync.call_title(round_)}: {who}"
        others = "the others go on with their own lengths (metrics=deferred)"
        report(logging.INFO, f"{who} {ended} had fewer batches; {others}")

    def _say_returned(self) -> None:
        """Whether this rank has come to a round that others had waited for."""
        for key, (number, where) in list(self._waited_for.items()):
            came_to = self._rounds_from(key, number)
            if not came_to:
                continue
            del self._waited_for[key]
            self._returned[key] = number
            sync, round_ = min(came_to, key=lambda one: one[1].number)
            text = "other ranks waited for this one, and gave up"
            text += f" ({sync.call_title(round_)})"
            if where:
                text += f"; it had been in {where}"
            report(logging.WARNING, text)

    def _rounds_from(self, key: str, number: int) -> list[tuple[WatchedRounds, Round]]:
        """This round and later ones, as far as they are kept, if this rank has come to them.
        Encoders have their rounds together.
        """
        return [
            (sync, round_)
            for sync in self.notes.syncs(self.group)
            for round_ in list(sync.latest_rounds)
            if sync.key == key and round_.number >= number
        ]


def _came_at(sync: WatchedRounds, round_: Round) -> float:
    """Of a round that has come: the training thread may not have looked yet."""
    return round_.came_at or sync.rounds.latest.came_at
