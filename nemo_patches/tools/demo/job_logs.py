"""The logs of the demo's processes:
written to, and read for warnings and for why a process died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

_LONGEST = 100  # characters of a cause


def write_to(log: Path) -> None:
    """Send standard output and error of this process, also those of C++ code, to the log."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


@contextlib.contextmanager
def written_to(log: Path) -> Iterator[None]:
    """Like write_to, for the block: NeMo's import alone prints a screenful."""
    saved = (os.dup(1), os.dup(2))
    write_to(log)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(saved, 1):
            os.dup2(copy, number)
            os.close(copy)


def lines(log: Path) -> list[str]:
    return (
        log.read_text(encoding="utf-8", errors="replace").splitlines()
        if log.exists()
        else []
    )


def warnings(log: Path) -> list[str]:
    """What nemo_patches logged at WARNING."""
    return [
        after
        for line in lines(log)
        if (after := line.partition(" nemo_patches WARNING ")[2])
    ]


def cause_of_exit(code: int | None, log: Path) -> str:
    """Why a process has ended: the signal, or the last line of its log."""
    if code is not None and code < 0:
        return signal.Signals(-code).name
    printed = [line for line in lines(log) if line.strip()]
    return printed[-1][:_LONGEST] if printed else f"exit code {code}"
