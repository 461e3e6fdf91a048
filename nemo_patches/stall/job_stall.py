"""Says where all ranks are when this one has begun no encoder call for long: a stall anywhere in the job."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import NamedTuple

import torch.distributed

from ..sync.events import bus
from .census import Census, CensusQuestion, Counted
from .heartbeat import Heartbeat
from .log_line import report
from .missing_query import Surroundings
from .missing_rank import MissingRank, Stall
from .occupation import is_guess
from .progress import Progress
from .rank_groups import Verdict, judged
from .rank_text import LEFT, SILENT, UNANNOUNCED, first_line, named
from .settings import StallSettings
from .training_notes import LastCall, TrainingNotes

EXIT_CODE = 83  # of a process that stall_exit has ended
_FIRST_CALLS = 2  # before these have begun, set-up and compilation may take any time
_PATIENCE_S = 2.5  # for a census that is not done when it is due
_COMMAND_LIMIT_S = 60.0  # for on_stall
_HELD_UP_S, _HELD_UP_PART = 2.0, 1 / 4  # of stall_timeout: after such a pause, whichever is longer, time has no count
_LEAD_PART = 1 / 3  # of stall_exit, at most: for what is told a heartbeat's period before
_EXIT_LIMIT_S, _FLUSH_LIMIT_S = 5.0, 1.0  # for on_stall to end, and for the streams, where stall_exit ends the process


class JobStalled(NamedTuple):
    """An event: this rank has logged where all ranks are. missing: those that the others wait for, as far as known.

    level: logging.WARNING where somebody waits for what is not known to end by itself, else logging.INFO. since:
    time.monotonic() of the last encoder call's begin: the same for all reports of one stall.
    """

    since: float
    level: int
    text: str
    missing: tuple[MissingRank, ...]


class StallExits(NamedTuple):
    """An event: stall_exit ends this process as soon as this is handled."""


class JobStallWatch:
    """The stall monitor's thread calls `look`, and alone writes the fields; any thread may read `stall`."""

    def __init__(
        self,
        notes: TrainingNotes,
        surroundings: Surroundings,
        progress: Progress,
        make_heartbeat: Callable[[], Heartbeat],
        send_heartbeat: Callable[[], None],
    ) -> None:
        self._notes, self._surroundings, self._progress = notes, surroundings, progress
        world = torch.distributed.group.WORLD  # outlives its destruction in a DDP module; None: destroyed just now
        self._world: Callable[[], object] = weakref.ref(world) if world is not None else lambda: None
        self._make_heartbeat, self._send_heartbeat = make_heartbeat, send_heartbeat
        self._last = LastCall()  # the one that the fields below are of
        self._census: Census | None = None
        self._verdict: Verdict | None = None  # the last that was found
        self._said = ""  # the last line
        self._looks = 0  # reports that are over
        self._exit_look_at = 0.0  # the next, where it is later than stall_exit says
        self._silent_since: dict[int, float] = {}  # ranks without a heartbeat, and when that was first seen
        self._have_waited: set[int] = set()  # ranks that were seen in a collective
        self._is_paged = False
        self._command: threading.Thread | None = None  # of this stall
        self._looked_at = math.inf
        self._anew_at = 0.0  # when this thread went on after it had been held up

    def stall(self) -> Stall | None:
        """Where the ranks were at the last census, if somebody waits for others."""
        verdict, last = self._verdict, self._last
        if verdict is None or verdict.level < logging.WARNING or last.sync is None:
            return None
        since = timedelta(seconds=time.monotonic() - last.since)
        title, size = last.sync.title, self._surroundings.size
        return Stall(title, last.call, since, verdict.missing, size, verdict.remark, text=verdict.text())

    def censuses(self) -> list[Census]:
        return [self._census] if self._census is not None else []

    def look(self, now: float, settings: StallSettings, is_last: bool) -> None:
        """is_last: this process ends, or its process group: nobody stalls any more."""
        is_last = is_last or torch.distributed.group.WORLD is not self._world()
        last, limit_s = self._notes.last, settings.stall_timeout.total_seconds()
        if last is not self._last or is_last or not limit_s:
            self._forget(now, last)
        if is_last or not limit_s:
            return
        if now - self._looked_at > max(_HELD_UP_S, _HELD_UP_PART * limit_s):
            self._begin_anew(now)  # stopped and continued, with the job or alone, or without Python's lock
        self._looked_at = now
        self._progress.look(now, at_the_stack=last.calls > 0 and now - last.since >= limit_s / 2)
        if last.calls < _FIRST_CALLS:
            return
        began, exit_s = max(last.since, self._anew_at), max(settings.stall_exit.total_seconds(), limit_s)
        report_at = began + limit_s * 2**self._looks
        exit_at = max(began + exit_s, self._exit_look_at) if settings.stall_exit else math.inf
        lead_s = min(2 * self._surroundings.period_s + 0.5, limit_s / 2)
        due_at = exit_at if exit_at < report_at + lead_s else report_at  # one look for both
        if self._census is None and now >= due_at - lead_s:
            self._send_heartbeat()  # whoever takes the census is to know where this rank is
            self._census = Census(CensusQuestion(self._surroundings, self._make_heartbeat, due_at, limit_s / 2))
        elif self._census is not None and now >= due_at:
            counted = self._census.counted
            # Its beginning counts, too: a process that was stopped asks when the report is long due.
            if counted is not None or now >= max(due_at, self._census.began) + lead_s + _PATIENCE_S:
                census, self._census = self._census, None
                census.cancel()
                self._looks += report_at <= due_at
                verdict = self._report(census, counted, now, settings, is_again=due_at < exit_at)
                if exit_at <= due_at:
                    self._exit_or_look_again(verdict, now, exit_s, limit_s, lead_s)

    def _forget(self, now: float, last: LastCall) -> None:
        """An encoder call has begun, or nobody wants to know."""
        if self._said and last is not self._last and last.calls:
            report(logging.INFO, f"encoder calls go on, after {now - self._last.since:.0f} s{self._been()}")
        if self._census is not None:
            self._census.cancel()
        self._last, self._census, self._verdict, self._said, self._looks = last, None, None, "", 0
        self._exit_look_at, self._is_paged, self._command = 0.0, False, None
        self._silent_since, self._have_waited = {}, set()

    def _begin_anew(self, now: float) -> None:
        """This thread was held up, and so may the others have been: what was seen until now is no evidence."""
        if self._census is not None:
            self._census.cancel()
        self._census, self._verdict, self._looks = None, None, 0
        self._silent_since, self._have_waited = {}, set()
        self._anew_at = now
        self._progress.begin_anew(now)

    def _been(self) -> str:
        missing = self._verdict.missing if self._verdict is not None else ()
        places = [f"{named([rank.rank])} had been in {rank.where}" for rank in missing if rank.where]
        return "".join(f"; {place}" for place in places[:2])

    def _report(
        self, census: Census, counted: Counted | None, now: float, settings: StallSettings, is_again: bool
    ) -> Verdict | None:
        """is_again: also what is known is said; else it is a look for stall_exit."""
        idle = f"no encoder call for {now - self._last.since:.0f} s"
        if counted is None:
            why = census.trouble() or "it was not found out in time"
            if is_again or not self._said:
                self._say(logging.WARNING, f"{idle}; where the ranks are cannot be told: {why}")
            return None
        before, verdict = self._verdict, judged(counted.groups)
        self._verdict = verdict
        self._have_waited |= verdict.waiting_for_sure
        self._see_silent(verdict, now if counted.trouble else census.began)  # who was asked was asked once
        is_known = before is not None and _outline(before) == _outline(verdict) and not is_again
        if is_known or (verdict.level == logging.INFO and self._said):
            return verdict  # once is enough
        directly = f" | {counted.trouble}; the ranks themselves were asked" if counted.trouble else ""
        text = f"{idle}. {verdict.text()}{directly}"
        self._say(verdict.level, text)
        bus.publish(JobStalled(self._last.since, verdict.level, text, verdict.missing))
        if verdict.level >= logging.WARNING and not self._is_paged:
            self._is_paged = True  # by the rank that has taken this census
            if counted.taken_here and settings.on_stall:
                self._command = _start_command(settings.on_stall, self._as_json(verdict, text, now))
        return verdict

    def _see_silent(self, verdict: Verdict, since: float) -> None:
        silent = [rank for group in verdict.groups if group.kind == SILENT for rank in group.ranks]
        self._silent_since = {rank: self._silent_since.get(rank, since) for rank in silent}

    def _say(self, level: int, text: str) -> None:
        self._said = text
        report(level, text)

    def _as_json(self, verdict: Verdict, text: str, now: float) -> str:
        """For on_stall; docs/stalls.md tells of the fields."""
        groups = [{"ranks": group.ranks, **asdict(group)} for group in verdict.groups]
        for group in groups:
            del group["runs"]
        return json.dumps(
            {
                "rank": self._surroundings.rank,
                "world_size": self._surroundings.size,
                "idle_s": round(now - self._last.since, 1),
                "text": text,
                "remark": verdict.remark,
                "missing": [asdict(rank) for rank in verdict.missing],
                "groups": groups,
            }
        )

    def _exit_or_look_again(
        self, verdict: Verdict | None, now: float, exit_s: float, limit_s: float, lead_s: float
    ) -> None:
        """By what was seen just now, and by what this rank itself does at this moment."""
        own = self._make_heartbeat()
        stood_still_s = min(own.still, self._stood_still_s(verdict, now))
        if stood_still_s < exit_s - min(lead_s, _LEAD_PART * exit_s):  # told before the look, by most
            self._exit_look_at = now + exit_s - stood_still_s
            return
        if verdict is not None:
            evidence = "some wait in a collective" if verdict.is_certain else self._those_who_waited(verdict)
        else:  # nobody can be asked
            waits = own.collective and not is_guess(own.collective)
            evidence = f"this rank waits in {own.collective}, and the others cannot be asked" if waits else ""
        if not evidence or self._notes.last is not self._last:
            self._exit_look_at = now + limit_s
            return
        self._exit(
            f"no encoder call for {now - self._last.since:.0f} s, more than stall_exit={exit_s:g} s. No rank has been "
            f"seen to move for {stood_still_s:.0f} s, and {evidence}: this process ends now with exit code "
            f"{EXIT_CODE}, so that its launcher can start the job again"
        )

    def _those_who_waited(self, verdict: Verdict) -> str:
        """stall_exit may have ended them a moment ago: whom they waited for is to end as well."""
        gone = self._have_waited & self._silent_since.keys()
        return "" if verdict.is_busy or not gone else f"{named(sorted(gone))} waited in a collective, and is gone now"

    def _stood_still_s(self, verdict: Verdict | None, now: float) -> float:
        """Seconds for which no rank has been seen to move, of those that can be seen to."""
        shortest_s = math.inf
        for group in verdict.groups if verdict is not None else ():
            if group.kind == SILENT:  # it said so before it fell silent
                silent_s = now - max(self._silent_since[rank] for rank in group.ranks)
                shortest_s = min(shortest_s, max(group.still, 0.0) + silent_s)
            elif group.kind not in (LEFT, UNANNOUNCED) and group.still >= 0:
                shortest_s = min(shortest_s, group.still)
        return shortest_s

    def _exit(self, text: str) -> None:
        report(logging.ERROR, text)
        bus.publish(StallExits())
        if self._command is not None:
            self._command.join(_EXIT_LIMIT_S)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            flushing = threading.Thread(target=_flush, daemon=True)
            flushing.start()
            flushing.join(_FLUSH_LIMIT_S)  # the training thread may hold a stream's lock
        os._exit(EXIT_CODE)  # the training thread is in a collective, which Python cannot interrupt


def _outline(verdict: Verdict) -> list[tuple[object, ...]]:
    """What it says, but for where in their code the ranks are."""
    return [(group.runs, group.kind, group.collective, group.activity) for group in verdict.groups]


def _start_command(command: str, text: str) -> threading.Thread | None:
    thread = threading.Thread(target=_run_command, args=(command, text), name="nemo_patches on_stall", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # as many as this user or container may have
        report(logging.WARNING, f"on_stall={command!r} has failed: {error}")
        return None
    return thread


def _run_command(command: str, text: str) -> None:
    try:
        process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, start_new_session=True)
        try:
            process.communicate(text.encode(), _COMMAND_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.wait()
        if process.returncode:
            report(logging.WARNING, f"on_stall={command!r} has ended with exit code {process.returncode}")
    except Exception as error:
        report(logging.WARNING, f"on_stall={command!r} has failed: {first_line(error)}")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its disk is full: there is nowhere left to say it
            stream.flush()
