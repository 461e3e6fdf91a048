"""Says where all ranks are when this one has begun no encoder call for long: a stall anywhere in the job."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import json
import logging
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
from .rank_groups import Verdict, judged
from .rank_text import first_line, named
from .settings import StallSettings
from .training_notes import LastCall, TrainingNotes

EXIT_CODE = 83  # of a process that stall_exit has ended
_FIRST_CALLS = 2  # before these have begun, set-up and compilation may take any time
_PATIENCE_S = 2.5  # for a census that is not done when it is due
_COMMAND_LIMIT_S = 60.0  # for on_stall
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
        make_heartbeat: Callable[[], Heartbeat],
        send_heartbeat: Callable[[], None],
    ) -> None:
        self._notes, self._surroundings = notes, surroundings
        world = torch.distributed.group.WORLD  # outlives its destruction in a DDP module; None: destroyed just now
        self._world: Callable[[], object] = weakref.ref(world) if world is not None else lambda: None
        self._make_heartbeat, self._send_heartbeat = make_heartbeat, send_heartbeat
        self._last = LastCall()  # the one that the fields below are of
        self._census: Census | None = None
        self._verdict: Verdict | None = None  # the last that was found
        self._said = ""  # the last line
        self._looks = 0  # censuses that are over
        self._command: threading.Thread | None = None  # of this stall

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
        if is_last or not limit_s or last.calls < _FIRST_CALLS:
            return
        due_at = last.since + limit_s * 2**self._looks
        lead_s = min(2 * self._surroundings.period_s + 0.5, limit_s / 2)
        if self._census is None and now >= due_at - lead_s:
            self._send_heartbeat()  # whoever takes the census is to know where this rank is
            self._census = Census(CensusQuestion(self._surroundings, self._make_heartbeat, due_at, limit_s / 2))
        elif self._census is not None and now >= due_at:
            counted = self._census.counted
            # Its beginning counts, too: a process that was stopped asks when the report is long due.
            if counted is not None or now >= max(due_at, self._census.began) + lead_s + _PATIENCE_S:
                self._end_census(self._census, counted, now, settings)
        self._exit_if_due(now, settings)

    def _forget(self, now: float, last: LastCall) -> None:
        """An encoder call has begun, or nobody wants to know."""
        if self._said and last is not self._last and last.calls:
            report(logging.INFO, f"encoder calls go on, after {now - self._last.since:.0f} s{self._been()}")
        if self._census is not None:
            self._census.cancel()
        self._last, self._census, self._verdict, self._said, self._looks = last, None, None, "", 0
        self._command = None

    def _been(self) -> str:
        missing = self._verdict.missing if self._verdict is not None else ()
        places = [f"{named([rank.rank])} had been in {rank.where}" for rank in missing if rank.where]
        return "".join(f"; {place}" for place in places[:2])

    def _end_census(self, census: Census, counted: Counted | None, now: float, settings: StallSettings) -> None:
        census.cancel()
        self._census, self._looks = None, self._looks + 1
        idle = f"no encoder call for {now - self._last.since:.0f} s"
        if counted is None:
            why = census.trouble() or "it was not found out in time"
            self._say(logging.WARNING, f"{idle}; where the ranks are cannot be told: {why}")
            return
        before, verdict = self._verdict, judged(counted.groups)
        self._verdict = verdict
        is_first_warning = verdict.level >= logging.WARNING and (before is None or before.level < logging.WARNING)
        directly = f" | {counted.trouble}; the ranks themselves were asked" if counted.trouble else ""
        if verdict.level == logging.INFO and self._said:
            return  # once is enough
        text = f"{idle}. {verdict.text()}{directly}"
        self._say(verdict.level, text)
        bus.publish(JobStalled(self._last.since, verdict.level, text, verdict.missing))
        if is_first_warning and counted.taken_here and settings.on_stall:
            self._command = _start_command(settings.on_stall, self._as_json(verdict, text, now))

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

    def _exit_if_due(self, now: float, settings: StallSettings) -> None:
        limit_s = settings.stall_exit.total_seconds()
        verdict = self._verdict
        if not limit_s or verdict is None or verdict.level < logging.WARNING or now - self._last.since < limit_s:
            return
        report(
            logging.ERROR,
            f"no encoder call for {now - self._last.since:.0f} s, more than stall_exit={limit_s:g} s: this process "
            f"ends now with exit code {EXIT_CODE}, so that its launcher can start the job again",
        )
        bus.publish(StallExits())
        if self._command is not None:
            self._command.join(_EXIT_LIMIT_S)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            flushing = threading.Thread(target=_flush, daemon=True)
            flushing.start()
            flushing.join(_FLUSH_LIMIT_S)  # the training thread may hold a stream's lock
        os._exit(EXIT_CODE)  # the training thread is in a collective, which Python cannot interrupt


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
