"""The file of a trace: one for each start of a rank's process. It ends at its size."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from nemo_patches.tracing.records import AT_ITS_SIZE, End, Header, Timed, encode

LARGEST = 256 << 20  # bytes: some 700,000 calls, which `diagnose` reads in a minute
_FOR_THE_LAST = 1 << 10  # bytes


class TraceFile:
    """The writer's thread uses it; any thread may read `file`."""

    def __init__(self, folder: Path, header: Header) -> None:
        self.header = header
        self.file: Path | None = None  # once it is open
        self._folder = folder
        self._descriptor = -1
        self._size = 0
        self._lines: list[bytes] = []

    def begin(self) -> None:
        """Open it. Raises OSError, as `flush` does."""
        self._folder.mkdir(parents=True, exist_ok=True)
        named_after = self.header.started
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        while self._descriptor < 0:
            file = self._folder / file_name(self.header, named_after)
            try:
                self._descriptor = os.open(file, flags, 0o666)
                self.file = file
            except (
                FileExistsError
            ):  # this process has begun a trace here in this very second
                named_after += 1
        self._append(encode(self.header))
        self.flush()

    def add(self, record: Timed) -> bool:
        """Take the next record, which `flush` writes. False: the file ends here, at its size."""
        line = encode(record)
        is_full = self._size + len(line) > LARGEST - _FOR_THE_LAST
        if is_full:
            line = encode(End(record.t, AT_ITS_SIZE))
        self._append(line)
        return not is_full

    def flush(self) -> None:
        left = memoryview(b"".join(self._lines))
        self._lines.clear()
        while left:
            left = left[os.write(self._descriptor, left) :]
        # Where the count of names is not kept, it is 0 too: then the folder is asked.
        if (
            os.fstat(self._descriptor).st_nlink
            or self.file is None
            or self.file.exists()
        ):
            return
        raise FileNotFoundError(errno.ENOENT, "it was removed", str(self.file))

    def close(self) -> None:
        """Also in a forked child: the file is its parent's."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self._size += len(line)


def file_name(header: Header, named_after: float) -> str:
    """named_after: seconds since 1970."""
    began = time.strftime("%Y%m%dT%H%M%S", time.gmtime(named_after))
    return f"rank-{header.rank:05}.{began}.{header.pid}.jsonl"
