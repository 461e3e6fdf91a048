"""Writes a rank's records to their output in a separate thread:
a slow disk never stops training.
"""

from __future__ import annotations

import logging
import queue
import time
from datetime import timedelta
from pathlib import Path
from time import sleep

from nemo_patches.channel.daemon import Daemon
from nemo_patches.sync.settings import STDERR
from nemo_patches.tracing.records import End, Header, Timed
from nemo_patches.tracing.stderr_lines import StderrLines
from nemo_patches.tracing.trace_file import LARGEST, TraceFile
from nemo_patches.watch.log_line import report

# Records, of some 5,000 calls: minutes in which the disk took nothing.
MOST_WAITING = 20_000
_GATHER_S = 0.001  # so that a call's few records wake the thread once or twice


class TraceWriter:
    """The trace of one rank and process start: `put` enqueues, a daemon thread does all the rest.

    `ended` is set once nothing more is written, be it that the disk is full; that is said.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self.folder = folder
        self.output = (
            StderrLines(header) if folder == STDERR else TraceFile(folder, header)
        )
        self.ended = False
        self._began = time.monotonic()
        self._queue: queue.SimpleQueue[Timed] = queue.SimpleQueue()
        self._thread = Daemon("trace", self._run)
        if why := self._thread.begin():
            self._end_early(why)

    def now(self) -> float:
        """Seconds since this writer began: the time of a record that is made now."""
        return round(time.monotonic() - self._began, 6)

    def put(self, record: Timed) -> None:
        """Enqueue a record; after an End no more are taken. Never blocks, any thread."""
        if self.ended:
            return
        if self._queue.qsize() >= MOST_WAITING:
            why = f"{MOST_WAITING} records wait for {self.folder}"
            self._end_early(why)
            record = End(self.now(), why)
        self._queue.put(record)

    def close(self, limit: timedelta, last: End | None = None) -> None:
        """Write what waits, and the last record. Give up after `limit`, and say so."""
        if self.ended:
            return
        self._queue.put(last or End(self.now()))
        self._thread.join(limit.total_seconds())
        if self._thread.is_alive():
            self.ended = True
            why = f"{self.folder} did not take it within {limit.total_seconds():g} s"
            report(logging.ERROR, f"the trace has no end: {why}")

    def abandon(self) -> None:
        """In a forked child: the file and the thread are the parent's."""
        self.ended = True
        self.output.close()

    def _end_early(self, why: str) -> None:
        report(logging.ERROR, f"tracing has ended, training goes on: {why}")
        self.ended = True

    # What follows runs in the writer's thread.

    def _run(self) -> None:
        try:
            self.output.begin()
            while self._write_batch():
                pass
        except OSError as error:
            where = error.filename or self.output.file or self.folder
            self._end_early(f"{where}: {error.strerror or error}")
        except Exception as error:
            report(
                logging.ERROR,
                "tracing has ended by an error of its own, please report it:"
                f" {error!r}",
            )
        finally:
            self.ended = True
            self.output.close()

    def _write_batch(self) -> bool:
        """Write what has gathered; false where that was the last."""
        batch = [self._queue.get()]
        if not isinstance(batch[0], End):
            sleep(_GATHER_S)
        batch += [self._queue.get() for _ in range(self._queue.qsize())]
        for record in batch:
            has_room = self.output.add(record)
            if not has_room:
                mib = LARGEST >> 20
                report(
                    logging.WARNING,
                    f"the trace ends at its size, {mib} MiB: {self.output.file}",
                )
            if not has_room or isinstance(record, End):
                self.output.flush()
                return False
        self.output.flush()
        return True
