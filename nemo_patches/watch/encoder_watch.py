"""Watches one encoder's rounds:
reports a late round with its missing ranks, and when it has completed.
"""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from ..judging.answer import Answer, Question, answered
from ..judging.found import Found
from ..judging.kinds import LATE
from ..judging.missing_rank import MissingRank, Stall, been
from ..sync.rounds import Round, WatchedRounds, listeners
from ..text import named
from .log_line import report
from .looks import Look

_PATIENCE_S = 2.6  # for a look that is not done when its report is due
_PATIENCE_PER_RANK_S = 0.002
FIRST_REPEAT_S = 60.0


class EncoderWatch:
    """The stall monitor's thread calls `look`, and alone writes the fields; any thread may read
    `stall`.
    """

    def __init__(
        self,
        sync: WatchedRounds,
        rank: int,
        size: int,
        begin_look: Callable[[], Look],
        may_be_uneven: Callable[[], bool] = lambda: False,
    ) -> None:
        """may_be_uneven: whether the user allows ranks fewer batches of an evaluation."""
        self._sync = sync
        self._rank = rank
        self._size = size
        self._begin_look = begin_look
        self._may_be_uneven = may_be_uneven
        self._patience_s = _PATIENCE_S + size * _PATIENCE_PER_RANK_S
        self._late: _LateRound | None = None
        self._said_at = 0.0  # time.monotonic() of the last report
        self._seen: Round | None = None  # the timeout that was taken last
        # Taken, but its round is not the one being reported.
        self._pending: Round | None = None
        # Logged that ranks had fewer batches of an evaluation, as the user allows.
        self._said_uneven = False

    @property
    def busy(self) -> bool:
        """Whether a round is late enough to be looked into, or a timeout is still to be."""
        return self._late is not None or self._pending is not None

    def stall(self) -> Stall | None:
        """The round that was reported and has not completed."""
        late = self._late
        if late is None or not late.said_at or late.answer.is_allowed:
            return None
        since = timedelta(seconds=time.monotonic() - late.round.issued_at)
        answer = late.answer
        return Stall(
            self._sync.title,
            late.round.call,
            since,
            answer.missing,
            self._size,
            answer.unknown,
        )

    def look(self, now: float, timeout_s: float, is_last: bool) -> None:
        """is_last: this process or its process group ends: report what is due, without asking other
        ranks.
        """
        self._take_timeout()
        late, pending = self._late, self._pending
        if late is None:
            round_ = pending if pending is not None else self._sync.round
            if round_ is None:
                return
            if pending is None and (
                self._sync.is_over(round_) or now - round_.issued_at < timeout_s / 2
            ):
                return
            # An open incident was already reported: only a whole timeout makes another one.
            question = self._question(round_)
            late = self._late = _LateRound(
                round_, not self._incident_open(round_), question, pending
            )
            if not is_last and now < late.due_at(timeout_s):
                late.early = self._begin_look()
        if pending is not None and pending is late.round:
            late.timed_out = pending
            self._pending = None
        self._step(late, time.monotonic(), timeout_s, is_last)

    def _take_timeout(self) -> None:
        timed_out = self._sync.timed_out
        if timed_out is None or timed_out is self._seen:
            return
        self._seen = timed_out
        if not self._incident_open(timed_out):
            self._pending = timed_out

    def _incident_open(self, round_: Round) -> bool:
        """Whether the last report is of later than the last round that came in time before this
        one.
        """
        return self._said_at > round_.in_time_at

    def _question(self, round_: Round) -> Question:
        latest, clock = self._sync.latest_call
        is_uneven = not round_.training and self._may_be_uneven()
        evaluation = clock[0] if is_uneven else None
        return Question(
            self._sync.key,
            round_.number,
            clock if latest == round_.call else None,
            evaluation,
        )

    def _step(
        self, late: _LateRound, now: float, timeout_s: float, is_last: bool
    ) -> None:
        came = self._sync.has_come(late.round)
        if came and not late.came_at:
            late.came_at = late.round.came_at or now
        over = self._sync.is_over(late.round)
        due_at = late.due_at(timeout_s)
        # Else its failure is reported by itself.
        is_anybodys = came or not over or late.timed_out is not None
        due = is_anybodys and due_at <= (late.came_at or now)
        if over and not due:
            self._late = None
            return
        if due and late.look is None and not is_last:
            # Look again: ranks that were missing at the early look may have come.
            late.look = self._begin_look()
        look = late.look
        may_say = look is None or look.is_done or now - look.began >= self._patience_s
        if due and not late.said_at and (may_say or is_last):
            self._say(late, now, timeout_s)
        if late.said_at and over:
            if came and not late.answer.is_allowed:
                self._say_recovered(late)
            self._late = None
        elif late.said_at and now >= late.said_at + FIRST_REPEAT_S * 2**late.repeats:
            if late.look is None or late.look.began <= late.said_at:
                late.look = self._begin_look()
            elif late.look.is_done or now - late.look.began >= self._patience_s:
                late.repeats += 1
                self._say(late, now, timeout_s)

    def _say(self, late: _LateRound, now: float, timeout_s: float) -> None:
        round_ = late.round
        early = late.early.found if late.early is not None else None
        answer = Answer(unknown="this process ends")
        if (found := late.found()) is not None:
            answer = answered(late.question, found, early)
        if answer.unknown and not answer.missing and self._size == 2:
            # Whatever else is not known: it is the other one.
            answer = replace(answer, missing=(MissingRank(1 - self._rank, LATE),))
        late.answer = answer
        waited_s = (round_.gave_up_at or late.came_at or now) - round_.issued_at
        still = (
            f"still (after {timedelta(seconds=round(now - round_.issued_at))}) "
            if late.repeats
            else ""
        )
        missing = answer.text(self._size)
        text = (
            f"{self._sync.call_title(round_)}:"
            f" {still}{self._sync.late(round_, waited_s)}. Missing: {missing}"
        )
        if answer.is_allowed:
            self._say_uneven(round_, answer)
        else:
            title = self._sync.title
            call = round_.call
            listeners.tracer.stall_reported(answer.missing, answer.unknown, title, call)
            if waited_s < timeout_s and not answer.missing and not answer.unknown:
                # A wait that earlier ones have shortened, on a busy machine.
                late.level = logging.INFO
            report(late.level, text)
        late.said_at = now  # after the line: `stall` may be looking
        self._said_at = now

    def _say_uneven(self, round_: Round, answer: Answer) -> None:
        """Log it once: a rank without batches is not missing, and every evaluation may end like
        this.
        """
        if not self._said_uneven:
            self._said_uneven = True
            who = named(rank.rank for rank in answer.missing)
            ended = (
                "has ended this evaluation, it"
                if len(answer.missing) == 1
                else "have ended this evaluation, they"
            )
            others = "the others go on with their own lengths (metrics=deferred)"
            report(
                logging.INFO,
                f"{self._sync.call_title(round_)}: {who} {ended} had fewer batches;"
                f" {others}",
            )

    def _say_recovered(self, late: _LateRound) -> None:
        missing = late.answer.missing
        who = named(rank.rank for rank in missing) if missing else "the missing length"
        late_s = (late.came_at or time.monotonic()) - late.round.issued_at
        report(
            late.level,
            f"{self._sync.title}: recovered: {who} came {late_s:.2f} s late{been(missing)}",
        )


@dataclass(eq=False)
class _LateRound:
    """A round that is late, from half the timeout on, or from a wait that timed out."""

    round: Round
    # Whether a wait that timed out makes it one to report, or only the whole timeout.
    heeds_wait: bool
    question: Question
    timed_out: Round | None = None  # its wait, as soon as it has timed out
    early: Look | None = None  # at half the timeout
    look: Look | None = None  # for the report; None at exit, when no rank is asked
    answer: Answer = Answer()  # noqa: RUF009  # frozen; replaced as a whole, other threads read it
    came_at: float = 0.0  # as soon as the monitor or the training thread has seen it
    said_at: float = 0.0
    repeats: int = 0
    level: int = logging.WARNING  # of its lines

    def found(self) -> Found | None:
        """The answer known by now."""
        looks = [look for look in (self.look, self.early) if look is not None]
        # The latest look that has heard any rank.
        return next(
            (look.found for look in looks if look.is_done or len(look.found.heard) > 1),
            None,
        ) or (looks[0].found if looks else None)

    def due_at(self, timeout_s: float) -> float:
        end = self.round.issued_at + timeout_s
        return (
            min(self.round.gave_up_at, end)
            if self.heeds_wait and self.timed_out is not None
            else end
        )
