"""This rank has not moved for long: where all ranks are, a stall anywhere in the job."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import logging
import math
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..channel.answers import NEVER_HEARD, NO_ANSWER, silent_by
from ..facts import CAN_PAGE, HAS_PAGED, HAS_WARNED
from ..sync.encoder_rounds import listeners
from ..sync.length_sync import current
from .incidents import Incident, Incidents, Reason
from .log_line import report
from .looks import Told
from .training_notes import LastCall

if TYPE_CHECKING:
    from ..judging.judgement import Judgement
    from ..judging.verdict import Verdict
    from .report_file import ReportFile

# Times stall_timeout, for waits that may end by themselves, or are only guesses.
LONG_FACTOR = 10
# Times stall_timeout, while the job has not begun its steps.
_FIRST_LOOKS = (1, 2, 4, 8, LONG_FACTOR)
# More than two questions take: the line comes before stall_exit ends the process.
_SOON = timedelta(seconds=10)
_MOST_PLACES = 2
_MOST_INFOS = 2  # INFO lines while no rank moves; then it is a warning


class Stalls(Reason):
    """At most one at a time: it is over when this rank takes a step."""

    lead_s = 0.3

    def __init__(self, incidents: Incidents) -> None:
        super().__init__(incidents)
        self.is_over = False  # nothing of this group is a stall any more
        self.stall: SinceLastStep | None = (
            None  # the present one, from half its time on
        )
        # Of the last verdict that was idle: said once, not per stall.
        self._idle_outline: list[tuple[object, ...]] = []
        self._report_file: ReportFile | None = None

    @property
    def page(self) -> str:
        """RankFacts.page, where there is a command."""
        return self.stall.page if self.stall is not None else CAN_PAGE

    def idle(self, now: float) -> str:
        """For how long this rank has taken no step."""
        called_at = self._called_at()
        what = "no encoder call" if called_at else "no step"
        return f"{what} for {now - (called_at or self.progress.stepped_at):.0f} s"

    def find(self, now: float, is_last: bool) -> dict[Any, float]:
        progress = self.progress
        limit_s = current().stall_timeout.total_seconds()
        if self.is_over or is_last or not limit_s:
            self.stall = None
            return {}
        stall = self.stall
        if stall is None or stall.stepped_at != progress.stepped_at:
            stall = None
            if now - progress.stepped_at >= limit_s / 2:
                since = self._called_at() or progress.stepped_at
                stall = SinceLastStep(self.notes.last, progress.stepped_at, since)
            self.stall = stall
        if stall is None:
            return {}
        if stall.anew_at != progress.anew_at:
            # So were the others, perhaps: earlier observations are no evidence.
            stall.begin_anew(progress.anew_at)
        return {stall: stall.since}

    def next_at(self, incident: Incident) -> float:
        stall: SinceLastStep = incident.subject
        if stall.leaves_at:
            return math.inf
        moved_at = max(self.progress.moved_at, stall.anew_at)
        return moved_at + self._times(stall) * current().stall_timeout.total_seconds()

    def say(self, incident: Incident, told: Told, now: float) -> None:
        stall: SinceLastStep = incident.subject
        if told.judgement is None:
            return
        silent = set(silent_by(told.silent, NO_ANSWER))
        limit = current().stall_exit
        ends_soon = limit and limit - current().stall_timeout < _SOON
        if not (ends_soon or silent <= stall.silent):
            # A debugger stops a rank for a moment: it is asked again.
            stall.silent |= silent
            return
        stall.silent = set()
        stall.looks += 1
        verdict = told.judgement.job
        may_last = verdict.level >= logging.WARNING or verdict.stays_info
        if not may_last and stall.infos >= _MOST_INFOS:
            moved_at = max(self.progress.moved_at, stall.anew_at)
            verdict = verdict.overdue(now - moved_at)
        is_slow = not self.progress.has_started and self._times(stall) <= LONG_FACTOR
        if is_slow and not verdict.is_sure_at_the_start:
            return
        stall.verdict = verdict
        if verdict.level < logging.WARNING:
            if incident.said_at and verdict.stays_info:
                return  # once is enough
            if verdict.is_idle and verdict.outline() == self._idle_outline:
                return  # so it is between any two requests
            stall.infos += 1
        if verdict.is_idle:
            self._idle_outline = verdict.outline()
        trouble = self.exchange.trouble
        idle = f"{self.idle(now)}. "
        text = f"{idle}{verdict.text()}{f' | {trouble}' if trouble else ''}"
        hosts = [one.host if one else "" for one in self.exchange.members]
        short = verdict.short(self.group.rank, hosts)
        report(verdict.level, idle + short if short else text)
        incident.said_at = now
        self._publish(incident, verdict, text)
        if verdict.level >= logging.WARNING:
            content = self._content(verdict, text, now)
            self._act(stall, told.judgement, content, not short)

    def over(self, incident: Incident, now: float) -> None:
        stall: SinceLastStep = incident.subject
        if not incident.said_at or self.progress.stepped_at == stall.stepped_at:
            return
        from ..judging.missing_rank import been

        missing = stall.verdict.missing if stall.verdict is not None else ()
        what = "this rank's collectives go on"
        if self.notes.last is not stall.last:
            what = "encoder calls go on"
        after_s = now - incident.since
        report(
            logging.INFO, f"{what}, after {after_s:.0f} s{been(missing[:_MOST_PLACES])}"
        )

    def answer(self, judgement: Judgement, now: float) -> dict[str, Any]:
        """For a process that asks this rank: as on_stall gets it."""
        verdict = judgement.job
        return self._content(verdict, f"{self.idle(now)}. {verdict.text()}", now)

    def _called_at(self) -> float:
        """The last encoder call of this process group; 0.0: none."""
        last = self.notes.last
        is_ours = last.sync is not None and last.sync.group is self.group
        return last.since if is_ours else 0.0

    def _times(self, stall: SinceLastStep) -> int:
        """stall_timeout, until the next report."""
        if self.progress.has_started:
            return int(2**stall.looks)
        more = stall.looks - len(_FIRST_LOOKS)
        return _FIRST_LOOKS[stall.looks] if more < 0 else LONG_FACTOR * 2 ** (more + 1)

    def _publish(self, incident: Incident, verdict: Verdict, text: str) -> None:
        """After the line: `stalls` may be looking."""
        from ..judging.missing_rank import Stall

        waited = verdict.level >= logging.WARNING
        missing = verdict.missing if waited else ()
        listeners.tracer.stall_reported(
            missing, text, waited=waited, groups=verdict.groups
        )
        incident.stall = None
        if waited:
            stall: SinceLastStep = incident.subject
            sync = stall.last.sync if self._called_at() else None
            incident.stall = Stall(
                sync.title if sync is not None else "",
                stall.last.call if sync is not None else 0,
                timedelta(0),
                verdict.missing,
                self.group.size,
                verdict.remark,
                text=text,
            )

    def _act(
        self,
        stall: SinceLastStep,
        judgement: Judgement,
        content: dict[str, Any],
        says_where: bool,
    ) -> None:
        """on_stall on one rank, and a report in the job's folder."""
        from .report_file import ReportFile

        is_first = stall.page == CAN_PAGE
        if command := current().on_stall:
            self._run_on_stall(stall, judgement, command, json.dumps(content))
        if is_first and stall.page == CAN_PAGE:
            stall.page = HAS_WARNED
        if self._report_file is None:
            group = self.group
            self._report_file = ReportFile(
                group.rank, group.store_port, self._may_read_memory
            )
        self._report_file.write(content, is_first, says_where)

    def _run_on_stall(
        self, stall: SinceLastStep, judgement: Judgement, command: str, text: str
    ) -> None:
        """Unless a rank has in this stall. The first one does that stands still, too, and so tells
        the same, but for those whose os.wait() might get what starts the command. If it has not by
        the next line, the first one that has told does.
        """
        from . import on_stall

        pagers = judgement.pagers
        own = self.group.rank
        if pagers.has_paged >= 0:
            stall.pager = pagers.has_paged  # also once it is gone
            return
        is_first = stall.pager < 0
        # Who was to do it and is not heard any more may have.
        if not (is_first or stall.pager in judgement.still_s()):
            return
        pager = pagers.first if is_first else pagers.later
        stall.pager = pager if pager >= 0 else pagers.lowest
        if pager == own:
            stall.page = HAS_PAGED
            stall.command = on_stall.start(command, text)
        elif is_first and pager < 0 and pagers.lowest == own:
            why = "each rank that can be asked is in os.wait(), for any child"
            report(logging.WARNING, f"on_stall={command!r} is not run: {why}")

    def _may_read_memory(self) -> bool:
        """Not before an exit, nor where the training thread may wait for the GPU."""
        from .kernel_call import kernel_call

        thread = self.progress.training_thread.known()
        return (
            not current().stall_exit
            and thread is not None
            and not kernel_call(thread.native).may_wait_for_a_device
        )

    def _content(self, verdict: Verdict, text: str, now: float) -> dict[str, Any]:
        """For JSON; docs/stalls.md describes the fields."""
        from .process_id import own_process

        return {
            "rank": self.group.rank,
            "time": round(time.time(), 3),
            "world_size": self.group.size,
            "level": logging.getLevelName(verdict.level),
            "idle_s": round(now - (self._called_at() or self.progress.stepped_at), 1),
            "text": text,
            "remark": verdict.remark,
            "process": own_process(),
            "missing": [asdict(one) for one in verdict.missing],
            "groups": [group.to_json() for group in verdict.groups],
        }


class SinceLastStep:
    """Since this rank has last taken a step. Only the stall monitor's thread writes it. Times are
    monotonic; 0.0: not yet.
    """

    def __init__(self, last: LastCall, stepped_at: float, since: float) -> None:
        self.last = last
        self.stepped_at = stepped_at
        self.since = since
        self.page = CAN_PAGE  # what it has come to
        self.pager = -1  # the rank that was to run on_stall, at the last line
        self.command: threading.Thread | None = None  # on_stall's, if it is run here
        self.begin_anew(0.0)

    def begin_anew(self, anew_at: float) -> None:
        """After a pause of the thread that looks, at this time."""
        self.anew_at = anew_at
        self.looks = 0
        self.infos = 0  # INFO lines
        self.silent: set[int] = set()  # ranks that did not answer, before the next line
        self.verdict: Verdict | None = None  # the last that was found
        # What follows is for exits.py.
        self.look_at = 0.0  # the next look, if later than stall_exit says
        # By rank: when it was last seen to move, or first seen silent.
        self.moved_at: dict[int, float] = {}
        self.have_waited: set[int] = set()  # ranks that were seen in a collective
        self.leaves_at = 0.0  # the process ends then
        self.leaves_since = 0.0  # decided when this rank had last moved

    def take(self, told: Told, now: float) -> None:
        """Where the ranks are, by any verdict of this stall."""
        if told.judgement is not None:
            self.have_waited |= told.judgement.job.waiting_for_sure
            for rank, still_s in told.judgement.still_s().items():
                at = now - max(still_s, 0.0)
                self.moved_at[rank] = max(at, self.moved_at.get(rank, at))
        for rank in told.silent.keys() - silent_by(told.silent, *NEVER_HEARD):
            self.moved_at.setdefault(rank, now)
