"""stall_exit: this process ends where no rank moves, and the wait will not end by itself."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ..channel.answers import ENDED, LEFT, NEVER_HEARD, silent_by
from ..channel.daemon import Daemon
from ..facts import RankFacts
from ..sync.encoder_rounds import listeners
from ..sync.length_sync import current
from ..text import named
from .incidents import Incident, Incidents, Reason
from .log_line import report
from .looks import Told
from .stalls import LONG_FACTOR, SinceLastStep, Stalls

if TYPE_CHECKING:
    from ..judging.verdict import Verdict

EXIT_CODE = 83  # of a process that stall_exit has ended
_SLACK_PART = 1 / 8  # of stall_exit: ranks are not asked all at the same moment
_MOST_SLACK_S = 1.0
# For the others to reach the same decision: the first rank to end breaks their connections.
_TOGETHER_S = 5.0
_EXIT_LIMIT_S = 5.0  # for on_stall to end
_FLUSH_LIMIT_S = 1.0  # for the streams


class Exits(Reason):
    """Of the stall that Stalls knows. `leave` is for the exit, too."""

    lead_s = 0.3

    def __init__(self, incidents: Incidents, stalls: Stalls) -> None:
        super().__init__(incidents)
        self._stalls = stalls
        self._command: threading.Thread | None = None  # on_stall's, as it decides

    @property
    def leaves(self) -> bool:
        """Whether it has decided to end this process."""
        stall = self._stalls.stall
        return stall is not None and stall.leaves_at > 0

    def find(self, now: float, is_last: bool) -> dict[Any, float]:
        stall = self._stalls.stall
        if stall is None or not current().stall_exit:
            return {}
        if stall.leaves_at:
            self._leave_or_stay(stall, now)
        return {stall: stall.since}

    def next_at(self, incident: Incident) -> float:
        stall: SinceLastStep = incident.subject
        if stall.leaves_at:
            return math.inf
        moved_at = max(self.progress.moved_at, stall.anew_at)
        return max(moved_at + _exit_s(), stall.look_at)

    def heard(self, told: Told, own: RankFacts) -> None:
        if self._stalls.stall is not None:
            self._stalls.stall.take(told, time.monotonic())

    def say(self, incident: Incident, told: Told, now: float) -> None:
        stall: SinceLastStep = incident.subject
        if told.judgement is None:
            return
        stall.take(told, now)
        if evidence := self._why_leave(stall, told, told.judgement.job, now):
            stall.leaves_at = now + _TOGETHER_S
            stall.leaves_since = self.progress.moved_at
            self._command = stall.command
            why = f"more than stall_exit={_exit_s():g} s, and {evidence}"
            end = f"this process ends with exit code {EXIT_CODE}"
            report(logging.ERROR, f"{self._stalls.idle(now)}, {why}: {end}")

    def _why_leave(
        self, stall: SinceLastStep, told: Told, verdict: Verdict, now: float
    ) -> str:
        """By the last look, and by what this rank itself does at this moment; empty: it is looked
        at again. A rank of which that is not known may have moved just now.
        """
        exit_s = _exit_s()
        limit_s = current().stall_timeout.total_seconds()
        progress = self.progress
        if verdict.is_idle or not (self.notes.last.calls or progress.has_begun):
            stall.look_at = now + exit_s  # setting up may take any time
            return ""
        have_ended = set(silent_by(told.silent, LEFT, ENDED))
        moved_at = max(
            (at for rank, at in stall.moved_at.items() if rank not in have_ended),
            default=now,
        )
        stood_still_s = now - max(moved_at, progress.moved_at, stall.anew_at)
        slack_s = min(_SLACK_PART * exit_s, _MOST_SLACK_S)
        if stood_still_s < exit_s - slack_s:
            stall.look_at = now + max(exit_s - stood_still_s, limit_s / 4)
            return ""
        evidence = self._evidence(stall, told, verdict, have_ended)
        long_s = max(LONG_FACTOR * limit_s, exit_s)
        may_wait = not self._is_alone(told) or bool(verdict.waiting_for_sure)
        if not evidence and (not may_wait or stood_still_s < long_s - slack_s):
            left_s = LONG_FACTOR * limit_s - stood_still_s
            stall.look_at = now + max(left_s, limit_s / 4)
            return ""
        some = "some wait in a collective, and " if verdict.waiting_for_sure else ""
        return evidence or f"{some}whatever it is, it has not ended"

    def _is_alone(self, told: Told) -> bool:
        """Whether no other rank can be asked."""
        others = set(range(self.group.size)) - {self.group.rank}
        silent = told.silent
        return others == silent.keys() == silent_by(silent, *NEVER_HEARD).keys()

    def _evidence(
        self, stall: SinceLastStep, told: Told, verdict: Verdict, have_ended: set[int]
    ) -> str:
        """Why the wait will not end by itself; empty if it may."""
        has_started = self.progress.has_started
        is_alone = self._is_alone(told)
        if is_alone and verdict.waiting_for_sure:
            own = next(one for one in verdict.groups if self.group.rank in one.ranks)
            what = f"this rank waits in {own.collective}"
            why = f"{what}, and the others cannot be asked"
            return why if has_started else ""
        is_sure = has_started or verdict.is_sure_at_the_start
        if not is_alone and verdict.is_certain and is_sure:
            return "no rank moves" if verdict.lead else "some wait in a collective"
        # stall_exit may have ended them a moment ago: the rank that they waited for must end, too.
        gone = stall.have_waited & have_ended
        if verdict.is_busy or not has_started or not gone:
            return ""
        return f"{named(gone)} waited in a collective, and is gone now"

    def _leave_or_stay(self, stall: SinceLastStep, now: float) -> None:
        if self.progress.moved_at > stall.leaves_since:
            stall.leaves_at = 0.0
            report(logging.INFO, "this rank goes on: stall_exit does not end it")
        elif now >= stall.leaves_at:
            self.leave()

    def leave(self) -> None:
        """End this process."""
        listeners.tracer.process_exits(EXIT_CODE)
        if self._command is not None:
            self._command.join(_EXIT_LIMIT_S)
        self._end_what_it_has_started()
        flushing = Daemon("flush", _flush)
        if not flushing.begin():
            # The training thread may hold a stream's lock.
            flushing.join(_FLUSH_LIMIT_S)
        # The training thread is in a collective, which Python cannot interrupt.
        os._exit(EXIT_CODE)

    def _end_what_it_has_started(self) -> None:
        """It would hold this process's stdout, and the next attempt's memory."""
        from .descendants import Descendants, end, ends_by_itself

        ranks = self.incidents.looks.ranks_here()
        started = Descendants().look(ranks or (), with_orphans=False)
        found = [pid for pid in started if not ends_by_itself(pid)]
        if not found:
            return
        pids = ", ".join(map(str, sorted(found)))
        what = f"what this rank has started (pids {pids})"
        if ranks is None:
            why = "it is not known which of these are other ranks"
            report(logging.WARNING, f"{what} goes on: {why}")
            return
        report(logging.INFO, f"{what} is ended with it")
        if left := end(found):
            report(logging.WARNING, f"of {what} some could not be ended: pid {left}")


def _exit_s() -> float:
    settings = current()
    return max(settings.stall_exit, settings.stall_timeout).total_seconds()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Closed, or its disk is full: it cannot be reported anywhere.
        with contextlib.suppress(Exception):
            stream.flush()
