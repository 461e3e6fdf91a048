"""Keeps signals off a write of ours, which would end this process: the write fails instead."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

# Nobody reads any more; a file is at the limit of its size. Python ignores both, but a script may
# give them their default action, which ends the process, or a handler. Empty where there are none.
_OF_A_WRITE = {
    getattr(signal, name)
    for name in ("SIGPIPE", "SIGXFSZ")
    if hasattr(signal, name) and hasattr(signal, "sigtimedwait")
}


def block() -> None:
    """In the calling thread, one of ours, until it ends."""
    if _OF_A_WRITE:
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_A_WRITE)


def unblock() -> None:
    """In the calling thread, one of ours: a process that it starts has its signals."""
    if _OF_A_WRITE:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_A_WRITE)


@contextlib.contextmanager
def kept_off() -> Iterator[None]:
    """Around a write of ours in any thread. Raises what a signal handler raises meanwhile."""
    if not _OF_A_WRITE:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    others = signal.sigpending()
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_A_WRITE)
        yield
    finally:
        try:
            while ours := (signal.sigpending() - others) & _OF_A_WRITE:
                signal.sigtimedwait(ours, 0)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
