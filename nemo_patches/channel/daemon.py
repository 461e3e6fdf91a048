"""Our threads:
all are daemons, and where this process may have no more of them it goes on without.
"""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from . import signals


class OwnThreads:
    """Ours in this process: what they use of a core is no work of the job's.

    Each thread writes what it alone has the key of, so there is no lock for a fork to find held.
    """

    def __init__(self) -> None:
        self._running: dict[int, tuple[int, int]] = {}  # by Python's number
        self._ended_s: dict[int, float] = {}

    def running(self) -> dict[int, int]:
        """The kernel's numbers of those that run here, by Python's: not those of a parent."""
        here = os.getpid()
        everywhere = self._running.copy().items()
        return {ident: native for ident, (pid, native) in everywhere if pid == here}

    def ended_s(self) -> float:
        """The CPU time in seconds of those that have ended."""
        return sum(self._ended_s.copy().values())

    def began(self) -> None:
        self._running[threading.get_ident()] = os.getpid(), threading.get_native_id()

    def ends(self) -> None:
        ident = threading.get_ident()
        self._ended_s[ident] = self._ended_s.get(ident, 0.0) + time.thread_time()
        self._running.pop(ident, None)


class Daemon(threading.Thread):
    """A thread that an interpreter does not wait for; `begin` starts it."""

    def __init__(
        self, name: str, run: Callable[..., object], *arguments: object
    ) -> None:
        super().__init__(
            target=run, args=arguments, name=f"nemo_patches {name}", daemon=True
        )

    def run(self) -> None:
        """No write in it ends this process by a signal."""
        signals.block()
        own_threads.began()
        try:
            super().run()
        finally:
            own_threads.ends()

    def begin(self) -> str:
        """Why it cannot start; empty where it runs.

        As many as this user or container may have run already, or the interpreter ends. `ident` is
        None then, as where a signal handler raised before it started.
        """
        try:
            self.start()
        except RuntimeError as error:
            return str(error)
        return ""


own_threads = OwnThreads()
