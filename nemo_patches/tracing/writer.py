"""Writes a rank's records to its file, in a thread of its own, in parts of bounded size; no disk stops training."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from nemo_patches.sync.rank_log import report
from nemo_patches.tracing.process_end import SigtermNote, can_note_sigterm
from nemo_patches.tracing.records import Encoder, End, Header, Lost, Record, Stopped, encode

MOST_WAITING = 20_000  # records that wait for the disk; what comes then is lost, and counted
MOST_ENCODERS = 64  # at the head of a part; a script may make copies without end
_GATHER = 0.001  # seconds in which records gather, so that a call's few records wake the thread once or twice


@dataclass(frozen=True)
class _Later:
    """A record that is made in the writer's thread."""

    make: Callable[[], Record]


@dataclass(frozen=True)
class _Last:
    """After this record the thread ends."""

    record: Record


class TraceWriter:
    """The file of one rank and process start: `put` enqueues, a daemon thread does all the rest.

    header: of the first part. Its `bound` is for all parts together: two, each of half that, of which the older goes
    when a third begins. `ended` is set once nothing more is written, be it that the disk is full; that is said.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self.folder, self.header = folder, header
        self.file: Path | None = None  # the present part, once it is open
        self.ended = False
        self._monotonic = time.monotonic()
        self._queue: queue.SimpleQueue[Record | _Later | _Last] = queue.SimpleQueue()
        self._lost = 0
        self._lost_lock = threading.Lock()  # the stall monitor's thread puts records, too
        self._descriptor = -1
        self._sigterm: SigtermNote | None = None
        self._named_after = header.started
        self._part = self._size = self._head = 0
        self._encoders: dict[int, Encoder] = {}
        self._thread = threading.Thread(target=self._run, name="nemo_patches trace", daemon=True)
        self._thread.start()

    def now(self) -> float:
        """Seconds since this writer began: the time of a record that is made now."""
        return round(time.monotonic() - self._monotonic, 6)

    def put_later(self, make: Callable[[], Record]) -> None:
        """Enqueue a record that takes long to make: `make` runs in the writer's thread."""
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
        if self.ended:
            return
        if self._lost:
            self._queue.put(Lost(self.now(), self._lost))
        self._queue.put(_Last(last or End(self.now())))
        self._thread.join(limit.total_seconds())
        if self._thread.is_alive():
            self.ended = True
            report(
                logging.ERROR, f"the trace has no end: {self.folder} did not take it within {limit.total_seconds():g} s"
            )

    def abandon(self) -> None:
        """In a forked child: the file and the thread are the parent's."""
        self.ended = True
        self._close_file()
        self._forget_sigterm()

    # What follows runs in the writer's thread.

    def _run(self) -> None:
        try:
            self._begin_part()
            last = False
            while not last:
                last = self._write_batch([self._queue.get()])
            self._close_file()
        except OSError as error:
            where = error.filename or self.file or self.folder
            report(logging.ERROR, f"tracing has ended, training goes on: {where}: {error.strerror or error}")
        except Exception as error:
            report(logging.ERROR, f"tracing has ended by an error of its own, please report it: {error!r}")
        finally:
            self.ended = True
            self._forget_sigterm()

    def _write_batch(self, batch: list[Record | _Later | _Last]) -> bool:
        """Write what has gathered, beginning with `batch`; true where it holds the last record."""
        if not isinstance(batch[0], _Last):
            time.sleep(_GATHER)
        batch += [self._queue.get() for _ in range(self._queue.qsize())]
        lines: list[bytes] = []
        for item in batch:
            last = isinstance(item, _Last)
            self._add(_record_of(item), lines)
            if last:
                break
        self._write(lines)
        return last

    def _add(self, record: Record, lines: list[bytes]) -> None:
        line = encode(record)
        if self._size + len(line) > self.header.bound // 2 and self._size > self._head:
            self._write(lines)
            lines.clear()
            self._close_file()
            self._part += 1
            self._begin_part()
        if isinstance(record, Encoder):
            self._encoders[record.e] = record
            if len(self._encoders) > MOST_ENCODERS:
                self._encoders.pop(min(self._encoders))
        lines.append(line)
        self._size += len(line)

    def _begin_part(self) -> None:
        if self._part == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            while self._path(0).exists():  # this process has begun a trace here in this very second
                self._named_after += 1
        else:
            self._path(self._part - 2).unlink(missing_ok=True)
        self.file = self._path(self._part)
        self._descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        if self._sigterm is not None:
            self._sigterm.move_to(self._descriptor)
        elif self._part == 0 and can_note_sigterm():
            self._sigterm = SigtermNote(self._descriptor)
        header = replace(self.header, part=self._part, notes_sigterm=self._sigterm is not None)
        head: list[Record] = [header, *self._encoders.values()]
        lines = [encode(one) for one in head]
        self._size = self._head = sum(map(len, lines))
        self._write(lines)

    def _path(self, part: int) -> Path:
        return self.folder / file_name(self.header, self._named_after, part)

    def _write(self, lines: list[bytes]) -> None:
        left = memoryview(b"".join(lines))
        while left:
            left = left[os.write(self._descriptor, left) :]

    def _forget_sigterm(self) -> None:
        note, self._sigterm = self._sigterm, None
        if note is not None:
            note.remove()

    def _close_file(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def file_name(header: Header, named_after: float, part: int) -> str:
    """named_after: seconds since 1970."""
    began = time.strftime("%Y%m%dT%H%M%S", time.gmtime(named_after))
    return f"rank-{header.rank:05}.{began}.{header.pid}.{part}.jsonl"


def _record_of(item: Record | _Later | _Last) -> Record:
    if isinstance(item, _Last):
        return item.record
    return item.make() if isinstance(item, _Later) else item
