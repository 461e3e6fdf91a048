"""Reports where all ranks are when this rank has not moved for long:
a stall anywhere in the job.
"""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from ..channel.answers import NEVER_HEARD
from ..channel.daemon import Daemon
from ..facts import CAN_PAGE, HAS_PAGED, HAS_WARNED, NO_PAGE, RankFacts
from ..judging.found import Found
from ..judging.missing_rank import Stall, been
from ..judging.rank_groups import grouped
from ..judging.verdict import Verdict, judged
from ..sync.rounds import Group, listeners
from ..sync.settings import Settings
from ..text import named
from . import on_stall
from .descendants import Descendants, end, ends_by_itself
from .log_line import report
from .looks import Look
from .process_id import own_process
from .progress import Progress
from .report_file import ReportFile
from .training_notes import LastCall, TrainingNotes

EXIT_CODE = 83  # of a process that stall_exit has ended
# Times stall_timeout, for waits that may end by themselves, or are only guesses.
_LONG_FACTOR = 10
# Times stall_timeout, while the job has not begun its steps.
_FIRST_LOOKS = (1, 2, 4, 8, _LONG_FACTOR)
_MOST_PLACES = 2
_MOST_INFOS = 2  # INFO lines while no rank moves; then it is a warning
_LEAD_S = 0.3  # a rank begins to look this long before its report is due
_SLACK_PART = 1 / 8  # of stall_exit: ranks are not asked all at the same moment
_MOST_SLACK_S = 1.0
# For the others to reach the same decision: the first rank to end breaks their connections.
_TOGETHER_S = 5.0
_EXIT_LIMIT_S = 5.0  # for on_stall to end, where stall_exit ends the process
_FLUSH_LIMIT_S = 1.0  # for the streams


class JobStallWatch:
    """The stall monitor's thread calls `look`, and alone writes the fields; any thread may read
    `stall`.
    """

    def __init__(
        self,
        notes: TrainingNotes,
        group: Group,
        progress: Progress,
        begin_look: Callable[[], Look],
        report_file: ReportFile,
        ranks_here: Callable[[], Collection[int] | None] = lambda: None,
    ) -> None:
        """ranks_here: the processes of this host's other ranks; None: not known."""
        self._notes = notes
        self._rank = group.rank
        self._size = group.size
        self._progress = progress
        self._begin_look = begin_look
        self._report_file = report_file
        self._ranks_here = ranks_here
        last = notes.last
        is_of_group = last.sync is not None and last.sync.group is group
        # The one that the fields below are of.
        self._last = last if is_of_group else LastCall()
        self._stepped_at = progress.stepped_at  # the same
        self._look: Look | None = None  # the one under way
        self._verdict: Verdict | None = None  # the last that was found
        self._told: tuple[int, str] | None = None  # the last line
        self._looks = 0  # finished reports
        self._infos = 0  # INFO lines
        # Of the last verdict that was idle: said once, not per stall.
        self._idle_outline: list[tuple[object, ...]] = []
        self._exit_look_at = 0.0  # the next look, if later than stall_exit says
        # By rank: when it was last seen to move, or first seen silent.
        self._moved_at: dict[int, float] = {}
        self._have_waited: set[int] = set()  # ranks that were seen in a collective
        self.page = CAN_PAGE  # in this stall: what it has come to
        self._pager = -1  # the rank that was to run on_stall, at the last line
        self._command: threading.Thread | None = None  # of this stall
        self._anew_at = progress.anew_at  # the same
        self._leaves_at = 0.0  # the process ends then
        self._leaves_since = 0.0  # decided when this rank had last moved

    def stall(self) -> Stall | None:
        """Where the ranks were at the last look, if any rank waits for others."""
        verdict, last, told = self._verdict, self._last, self._told
        if verdict is None or told is None or told[0] < logging.WARNING:
            return None
        since = timedelta(seconds=time.monotonic() - (last.since or self._stepped_at))
        title = last.sync.title if last.sync is not None else ""
        return Stall(
            title,
            last.call,
            since,
            verdict.missing,
            self._size,
            verdict.remark,
            text=told[1],
        )

    @property
    def leaves(self) -> bool:
        """Whether stall_exit has decided to end this process."""
        return self._leaves_at > 0

    def look(self, now: float, settings: Settings, is_last: bool) -> None:
        """is_last: this process or its process group ends, and so does any stall."""
        limit_s = settings.stall_timeout.total_seconds()
        progress = self._progress
        last = self._notes.last
        if is_last or not limit_s:
            self._forget(now, last)
            return
        if progress.stepped_at != self._stepped_at:
            self._forget(now, last)
        # And so were the others, perhaps: earlier observations are no evidence.
        if progress.anew_at != self._anew_at:
            self._anew_at = progress.anew_at
            self._forget_looks()
        if self.leaves:
            self._leave_or_stay(now)
            return
        # A rank that moves asks nobody.
        moved_at = max(progress.moved_at, self._anew_at)
        report_at = moved_at + limit_s * self._times()
        exit_s = max(settings.stall_exit.total_seconds(), limit_s)
        exit_at = math.inf
        if settings.stall_exit:
            exit_at = max(moved_at + exit_s, self._exit_look_at)
        due_at = min(report_at, exit_at)
        if self._look is None:
            if now >= due_at - _LEAD_S:
                self._look = self._begin_look()
        elif moved_at > self._look.began:
            self._look = None  # it has moved meanwhile
        elif self._look.is_done and now >= due_at:
            found = self._look.found
            self._look = None
            # One look for both.
            is_due = report_at <= due_at + limit_s / 8
            if is_due:
                self._looks += 1
            verdict = self._judge(found, now)
            why_leave = ""
            if exit_at <= due_at + limit_s / 8:
                why_leave = self._why_leave(found, verdict, now, exit_s, limit_s)
            # Who ends says no place again.
            self._report(found, verdict, now, settings, is_due and not why_leave)
            if why_leave:
                self._decide_to_leave(why_leave, now, exit_s)

    def _times(self) -> int:
        """stall_timeout, until the next report."""
        if self._progress.has_started:
            return int(2**self._looks)
        looks = len(_FIRST_LOOKS)
        return (
            _FIRST_LOOKS[self._looks]
            if self._looks < looks
            else int(_LONG_FACTOR * 2 ** (self._looks - looks + 1))
        )

    def _forget(self, now: float, last: LastCall) -> None:
        """This rank has taken a step, or reports are off."""
        if self._told is not None and self._progress.stepped_at != self._stepped_at:
            what = (
                "encoder calls go on"
                if last is not self._last
                else "this rank's collectives go on"
            )
            began = self._last.since or self._stepped_at
            report(logging.INFO, f"{what}, after {now - began:.0f} s{self._been()}")
        self._last = last
        self._stepped_at = self._progress.stepped_at
        self._told = None
        self._command = None
        self.page = CAN_PAGE
        self._pager = -1
        self._forget_looks()

    def _forget_looks(self) -> None:
        self._look = None
        self._verdict = None
        self._looks = 0
        self._infos = 0
        self._exit_look_at = 0.0
        self._leaves_at = 0.0
        self._moved_at = {}
        self._have_waited = set()

    def _been(self) -> str:
        missing = self._verdict.missing if self._verdict is not None else ()
        return been(missing[:_MOST_PLACES])

    def _judge(self, found: Found, now: float) -> Verdict:
        verdict = judged(grouped(found))
        if (
            verdict.level < logging.WARNING
            and not verdict.stays_info
            and self._infos >= _MOST_INFOS
        ):
            verdict = verdict.overdue(now - max(self._progress.moved_at, self._anew_at))
        self._have_waited |= verdict.waiting_for_sure
        for rank, state in found.states.items():
            self._moved_at[rank] = now - max(state.still, 0.0)
        for rank, silence in found.silent.items():
            if silence.how not in NEVER_HEARD:
                self._moved_at.setdefault(rank, now)
        return verdict

    def _report(
        self,
        found: Found,
        verdict: Verdict,
        now: float,
        settings: Settings,
        is_due: bool,
    ) -> None:
        """Log what is known, unless it has been logged. is_due: by stall_timeout, not by stall_exit
        alone.
        """
        may_be_slow = not self._progress.has_started and self._times() <= _LONG_FACTOR
        if may_be_slow and not verdict.is_sure_at_the_start:
            return
        before = self._verdict
        self._verdict = verdict
        is_known = (
            before is not None
            and before.outline() == verdict.outline()
            and before.level == verdict.level
        )
        if is_known and not is_due:
            return
        if verdict.level == logging.INFO:
            if self._told is not None and (verdict.stays_info or not is_due):
                return  # once is enough
            if verdict.is_idle and verdict.outline() == self._idle_outline:
                return  # so it is between any two requests
            self._infos += 1
        if verdict.is_idle:
            self._idle_outline = verdict.outline()
        trouble = f" | {found.trouble}" if found.trouble else ""
        text = f"{self._idle(now)}. {verdict.text()}{trouble}"
        report(verdict.level, text)
        self._told = (verdict.level, text)  # after the line: `stall` may be looking
        waited = verdict.level >= logging.WARNING
        missing = verdict.missing if waited else ()
        listeners.tracer.stall_reported(missing, text, waited=waited)
        if verdict.level < logging.WARNING:
            return
        content = self._content(verdict, text, now)
        is_first = self.page == CAN_PAGE
        if settings.on_stall:
            self._run_on_stall(found, settings.on_stall, json.dumps(content))
        if is_first and self.page == CAN_PAGE:
            self.page = HAS_WARNED
        self._report_file.write(content, is_first)

    def _run_on_stall(self, found: Found, command: str, text: str) -> None:
        """Unless a rank has in this stall. The first one does that stands still, too, and so tells
        the same, but for those whose os.wait() might get what starts the command. If it has not by
        the next line, the first one that has told does.
        """
        states = found.states
        for rank, state in states.items():
            if state.page == HAS_PAGED:
                self._pager = rank  # also once it is gone
                return
        is_first = self._pager < 0
        # Who was to do it and is not heard any more may have.
        if not (is_first or self._pager in states):
            return
        tell = [
            rank
            for rank, state in states.items()
            if rank == self._rank
            or (_tells(state) if is_first else state.page == HAS_WARNED)
        ]
        can = [rank for rank in tell if not states[rank].waits_for_child]
        self._pager = min(can or tell)
        if self._pager != self._rank:
            return
        if can:
            self.page = HAS_PAGED
            self._command = on_stall.start(command, text)
        elif is_first:
            why = "each rank that can be asked is in os.wait(), for any child"
            report(logging.WARNING, f"on_stall={command!r} is not run: {why}")

    def _idle(self, now: float) -> str:
        what = "no encoder call" if self._last.since else "no step"
        return f"{what} for {now - (self._last.since or self._stepped_at):.0f} s"

    def answer(self, found: Found, now: float) -> dict[str, Any]:
        """The answer for a process that asks this rank: as on_stall gets it."""
        verdict = judged(grouped(found))
        return self._content(verdict, f"{self._idle(now)}. {verdict.text()}", now)

    def _content(self, verdict: Verdict, text: str, now: float) -> dict[str, Any]:
        """For JSON; docs/stalls.md describes the fields."""
        groups: list[dict[str, Any]] = [
            {"ranks": group.ranks, **asdict(group)} for group in verdict.groups
        ]
        for group in groups:
            del group["runs"]
        return {
            "rank": self._rank,
            "time": round(time.time(), 3),
            "world_size": self._size,
            "level": logging.getLevelName(verdict.level),
            "idle_s": round(now - (self._last.since or self._stepped_at), 1),
            "text": text,
            "remark": verdict.remark,
            "process": own_process(),
            "missing": [asdict(one) for one in verdict.missing],
            "groups": groups,
        }

    def _why_leave(
        self, found: Found, verdict: Verdict, now: float, exit_s: float, limit_s: float
    ) -> str:
        """By the last look, and by what this rank itself does at this moment; empty: it is looked
        at again. A rank of which that is not known may have moved just now.
        """
        if not (self._notes.last.calls or self._progress.has_begun):
            self._exit_look_at = now + exit_s  # setting up may take any time
            return ""
        moved_at = max(
            (at for rank, at in self._moved_at.items() if rank not in found.have_ended),
            default=now,
        )
        stood_still_s = now - max(moved_at, self._progress.moved_at, self._anew_at)
        slack_s = min(_SLACK_PART * exit_s, _MOST_SLACK_S)
        if verdict.is_idle:
            self._exit_look_at = now + exit_s
            return ""
        if stood_still_s < exit_s - slack_s:
            self._exit_look_at = now + max(exit_s - stood_still_s, limit_s / 4)
            return ""
        evidence = self._evidence(found, verdict)
        is_alone = self._is_alone(found)
        may_wait = not is_alone or bool(verdict.waiting_for_sure)
        if not evidence and (
            not may_wait
            or stood_still_s < max(_LONG_FACTOR * limit_s, exit_s) - slack_s
        ):
            self._exit_look_at = now + max(
                _LONG_FACTOR * limit_s - stood_still_s, limit_s / 4
            )
            return ""
        if not evidence:
            evidence = "whatever it is, it has not ended"
            if verdict.waiting_for_sure:
                evidence = f"some wait in a collective, and {evidence}"
        return evidence

    def _decide_to_leave(self, evidence: str, now: float, exit_s: float) -> None:
        self._leaves_at = now + _TOGETHER_S
        self._leaves_since = self._progress.moved_at
        why = f"more than stall_exit={exit_s:g} s, and {evidence}"
        report(
            logging.ERROR,
            f"{self._idle(now)}, {why}: this process ends with exit code {EXIT_CODE}",
        )

    def _is_alone(self, found: Found) -> bool:
        """Whether no other rank can be asked."""
        silences = {silence.how for silence in found.silent.values()}
        return found.heard == {self._rank} and silences <= NEVER_HEARD

    def _evidence(self, found: Found, verdict: Verdict) -> str:
        """Why the wait will not end by itself; empty if it may."""
        is_alone = self._is_alone(found)
        if is_alone and verdict.waiting_for_sure:
            collective = found.states[self._rank].collective
            return (
                f"this rank waits in {collective}, and the others cannot be asked"
                if self._progress.has_started
                else ""
            )
        if (
            not is_alone
            and verdict.is_certain
            and (self._progress.has_started or verdict.is_sure_at_the_start)
        ):
            return "no rank moves" if verdict.lead else "some wait in a collective"
        # stall_exit may have ended them a moment ago: the rank that they waited for must end, too.
        gone = self._have_waited & found.have_ended
        is_slow = verdict.is_busy or not self._progress.has_started
        return (
            ""
            if is_slow or not gone
            else f"{named(sorted(gone))} waited in a collective, and is gone now"
        )

    def _leave_or_stay(self, now: float) -> None:
        if self._progress.moved_at > self._leaves_since:
            self._leaves_at = 0.0
            report(logging.INFO, "this rank goes on: stall_exit does not end it")
        elif now >= self._leaves_at:
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
        ranks = self._ranks_here()
        started = Descendants().look(ranks or (), with_orphans=False)
        found = [pid for pid in started if not ends_by_itself(pid)]
        if not found:
            return
        pids = ", ".join(map(str, sorted(found)))
        what = f"what this rank has started (pids {pids})"
        if ranks is None:
            report(
                logging.WARNING,
                f"{what} goes on: it is not known which of these are other ranks",
            )
            return
        report(logging.INFO, f"{what} is ended with it")
        if left := end(found):
            report(logging.WARNING, f"of {what} some could not be ended: pid {left}")


def _tells(state: RankFacts) -> bool:
    """Whether a rank reports the stall, too, and has a command for that."""
    return state.page != NO_PAGE and not state.goes_on


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Closed, or its disk is full: it cannot be reported anywhere.
        with contextlib.suppress(Exception):
            stream.flush()
