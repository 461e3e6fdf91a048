"""Writes a rank's records to their output in a separate thread: a slow disk never stops training."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from nemo_patches.channel.daemon import Daemon
from nemo_patches.stall.log_line import report
from nemo_patches.tracing.part_files import PartFiles
from nemo_patches.tracing.records import End, Header, Lost, Record, Stopped
from nemo_patches.tracing.settings import STDERR
from nemo_patches.tracing.stderr_lines import StderrLines

MOST_WAITING = 20_000  # records that wait for the disk; further ones are lost, and counted
_GATHER = 0.001  # seconds in which records gather, so that a call's few records wake the thread once or twice
_LOOK_S = 0.02  # how often a record that was not there yet is asked for
_MOST_NOT_YET = 64  # of those; then the oldest is given up


@dataclass(frozen=True)
class _Later:
    """A record that is made in the writer's thread. make: None as long as there is none yet."""

    make: Callable[[], Record | None]


@dataclass(frozen=True)
class _Last:
    """After this record the thread ends."""

    record: Record


class TraceWriter:
    """The trace of one rank and process start: `put` enqueues, a daemon thread does all the rest.

    `ended` is set once nothing more is written, be it that the disk is full; that is said.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self.folder = folder
        self.output = StderrLines(header) if folder == STDERR else PartFiles(folder, header)
        self.ended = False
        self._monotonic = time.monotonic()
        self._queue: queue.SimpleQueue[Record | _Later | _Last] = queue.SimpleQueue()
        self._lost = 0
        self._lost_lock = threading.Lock()  # the stall monitor's thread puts records, too
        self._not_yet: deque[_Later] = deque(maxlen=_MOST_NOT_YET)
        self._thread = Daemon("trace", self._run)
        if why := self._thread.begin():
            self.ended = True
            report(logging.ERROR, f"tracing has ended, training goes on: {why}")

    def now(self) -> float:
        """Seconds since this writer began: the time of a record that is made now."""
        return round(time.monotonic() - self._monotonic, 6)

    def put_later(self, make: Callable[[], Record | None]) -> None:
        """Enqueue a record that takes long to make: `make` runs in the writer's thread, until it gives one."""
        self.put(_Later(make))

    def put(self, record: Record | _Later) -> None:
        """Enqueue a record. Never blocks, never raises for the disk's sake."""
        if self.ended:
            return
        if self._queue.qsize() >= MOST_WAITING:
            with self._lost_lock:
                self._lost += 1
            return
        if self._lost:
            with self._lost_lock:
                lost, self._lost = self._lost, 0
            self._queue.put(Lost(self.now(), lost))
        self._queue.put(record)

    def close(self, limit: timedelta, last: Stopped | End | None = None) -> None:
        """Write what waits, and the last record (None: an End). Give up after `limit`, and say so."""
        if not self.ended:
            self._end(limit, last or End(self.now()))
        self.output.leave_sigterm()

    def _end(self, limit: timedelta, last: Stopped | End) -> None:
        if self._lost:
            self._queue.put(Lost(self.now(), self._lost))
        self._queue.put(_Last(last))
        self._thread.join(limit.total_seconds())
        if self._thread.is_alive():
            self.ended = True
            report(
                logging.ERROR, f"the trace has no end: {self.folder} did not take it within {limit.total_seconds():g} s"
            )

    def abandon(self) -> None:
        """In a forked child: the file and the thread are the parent's."""
        self.ended = True
        self.output.close()

    # What follows runs in the writer's thread.

    def _run(self) -> None:
        try:
            self.output.begin()
            last = False
            while not last:
                last = self._write_batch()
        except OSError as error:
            where = error.filename or self.output.file or self.folder
            report(logging.ERROR, f"tracing has ended, training goes on: {where}: {error.strerror or error}")
        except Exception as error:
            report(logging.ERROR, f"tracing has ended by an error of its own, please report it: {error!r}")
        finally:
            self.ended = True
            self.output.close()

    def _write_batch(self) -> bool:
        """Write what has gathered; true where it holds the last record."""
        batch: list[Record | _Later | _Last] = []
        with contextlib.suppress(queue.Empty):  # records that are not there yet are asked for again
            batch = [self._queue.get(timeout=_LOOK_S if self._not_yet else None)]
        if not any(isinstance(item, _Last) for item in batch):
            time.sleep(_GATHER)
        batch = [*self._not_yet, *batch, *(self._queue.get() for _ in range(self._queue.qsize()))]
        self._not_yet.clear()
        last = False
        for item in batch:
            last = isinstance(item, _Last)
            record = _record_of(item)
            if record is not None:
                self.output.add(record)
            elif isinstance(item, _Later):
                self._not_yet.append(item)
            if last:
                break
        self.output.flush()
        return last


def _record_of(item: Record | _Later | _Last) -> Record | None:
    if isinstance(item, _Last):
        return item.record
    return item.make() if isinstance(item, _Later) else item
