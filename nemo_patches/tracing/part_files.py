"""The files of a trace: parts of bounded size. The last two are kept, with the important records of earlier ones."""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from nemo_patches.sync.rank_log import report
from nemo_patches.tracing.records import CheckFinding, Encoder, Failed, Header, Kept, Raised, Record, Sigterm, encode
from nemo_patches.tracing.signal_stack import StackOnSignal

MOST_ENCODERS = 64  # at the head of a part; a script may make copies without end
_MOST_KEPT = 64  # the first and the last exceptions and findings of what is gone
_KEPT_SHARE = 8  # of the bound, they take one of so many parts at most


@dataclass
class _Contents:
    """What a part has, or all those that are gone: how many records, and of them exceptions and findings."""

    count: int = 0
    kept: list[Kept] = field(default_factory=list)

    def add(self, records: list[Kept], count: int) -> None:
        self.count += count
        self.kept += records
        while len(self.kept) > _MOST_KEPT:
            del self.kept[_MOST_KEPT // 2]


@dataclass(frozen=True)
class _Written:
    """What we have written of the present part. at_s: since the trace began, at the end of the last write."""

    bytes: int
    mtime_ns: int
    at_s: float


class PartFiles:
    """The present part, open. header: of the first part; its `bound` is for two parts, each of half that."""

    def __init__(self, folder: Path, header: Header) -> None:
        self.header = header
        self.file: Path | None = None  # the present part, once it is open
        self._folder = folder
        self._descriptor = -1
        self._sigterm = StackOnSignal(signal.SIGTERM, chain=True)
        self._named_after = header.started
        self._part = self._size = self._head = 0
        self._began = time.monotonic()
        self._written = _Written(0, 0, 0.0)
        self._sigterm_noted = False
        self._lines: list[bytes] = []
        self._encoders: dict[int, Encoder] = {}
        self._gone, self._before, self._present = _Contents(), _Contents(), _Contents()

    def begin(self) -> None:
        """Open the first part. Raises OSError, as all that follows."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while self._path(0).exists():  # this process has begun a trace here in this very second
            self._named_after += 1
        self._begin_part()

    def add(self, record: Record) -> None:
        """Take the next record; flush() writes it."""
        line = encode(record)
        if self._size + len(line) > self.header.bound // 2 and self._size > self._head:
            self._begin_next_part()
        if isinstance(record, Encoder):
            self._encoders[record.e] = record
            if len(self._encoders) > MOST_ENCODERS:
                self._encoders.pop(min(self._encoders))
        kept = [Kept(record.t, line.decode().rstrip())] if isinstance(record, Raised | Failed | CheckFinding) else []
        self._present.add(kept, 1)
        self._lines.append(line)
        self._size += len(line)

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        content = self._sigterm_record() + b"".join(lines)
        left = memoryview(content)
        while left:
            left = left[os.write(self._descriptor, left) :]
        status = self._note_written(self._written.bytes + len(content))
        # Where the count of names is not kept, it is 0 too: then the folder is asked.
        if self.file is not None and not status.st_nlink and not self.file.exists():
            raise FileNotFoundError(errno.ENOENT, "it was removed", str(self.file))

    def _note_written(self, count: int) -> os.stat_result:
        status = os.fstat(self._descriptor)
        self._written = _Written(count, status.st_mtime_ns, time.monotonic() - self._began)
        return status

    def _sigterm_record(self) -> bytes:
        """When SIGTERM came, if its stack is in the file since the last write: nothing else has written there."""
        status = os.fstat(self._descriptor)
        if self._sigterm_noted or status.st_size <= self._written.bytes:
            return b""
        self._sigterm_noted = True
        # By one clock only, be it a file server's: so long after our last write.
        since_s = (status.st_mtime_ns - self._written.mtime_ns) / 1e9
        return encode(Sigterm(round(self._written.at_s + max(since_s, 0.0), 6)))

    def close(self) -> None:
        """Also in a forked child: the files are its parent's."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self.leave_sigterm()

    def leave_sigterm(self) -> None:
        """SIGTERM no longer leaves a stack. On any thread: the writer's may wait for the disk for ever."""
        self._sigterm.remove()

    def _begin_next_part(self) -> None:
        self.flush()
        os.close(self._descriptor)
        self._descriptor = -1
        self._part += 1
        if self._part == 2:
            mib = f"trace_size={self.header.bound / (1 << 20):g} MiB"
            report(logging.INFO, f"the trace has reached {mib}: its oldest records go, but for exceptions and findings")
        self._path(self._part - 2).unlink(missing_ok=True)
        if self._part > 1:
            self._gone.add(self._before.kept, self._before.count)
        self._before, self._present = self._present, _Contents()
        self._begin_part()

    def _begin_part(self) -> None:
        self.file = self._path(self._part)
        self._descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        self._note_written(0)
        notes_sigterm = self._sigterm.place(self._descriptor)
        header = replace(self.header, part=self._part, notes_sigterm=notes_sigterm, gone=self._gone.count)
        kept = [encode(record) for record in self._gone.kept]
        while sum(map(len, kept)) > self.header.bound // _KEPT_SHARE:
            del kept[len(kept) // 2]
        self._lines = [encode(header), *map(encode, self._encoders.values()), *kept]
        self._size = self._head = sum(map(len, self._lines))
        self.flush()

    def _path(self, part: int) -> Path:
        return self._folder / file_name(self.header, self._named_after, part)


def file_name(header: Header, named_after: float, part: int) -> str:
    """named_after: seconds since 1970."""
    began = time.strftime("%Y%m%dT%H%M%S", time.gmtime(named_after))
    return f"rank-{header.rank:05}.{began}.{header.pid}.{part}.jsonl"
