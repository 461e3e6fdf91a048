"""A rank's process: what it has said so far, and its end."""

from __future__ import annotations

import contextlib
import os
import signal

import ranks  # its fork server imports NeMo, once for all
from group import Rank
from scenario import Ended, Stands, play

from nemo_patches.tools.demo import job_logs


class RankProcess:
    """Started at once."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.stands: Stands | None = None
        self._ended: Ended | None = None
        self._events, theirs = ranks._context.Pipe(duplex=False)
        self._process = ranks.rank_process(play, (rank, theirs))
        self._process.start()
        theirs.close()

    @property
    def is_running(self) -> bool:
        return self._process.exitcode is None

    @property
    def is_complete(self) -> bool:
        """Whether the scenario came to its end."""
        return self._ended == Ended("")

    def receive(self) -> None:
        """Take in what it has said."""
        with contextlib.suppress(EOFError, OSError):  # it has ended
            while self._events.poll():
                event = self._events.recv()
                if isinstance(event, Ended):
                    self._ended = event
                    event = None
                self.stands = event

    def hold(self) -> None:
        """Stop it where it is: when another rank is killed, it would move."""
        if self.is_running and (pid := self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def end(self) -> str:
        """Kill it and its workers if they still run, and say how it ended, or where it stood."""
        was_running = self.is_running
        self.receive()
        self.kill()
        if was_running and not self.is_complete:
            return self.stands.where if self.stands else "still waiting, killed"
        if self._ended is None:
            return (
                f"died: {job_logs.cause_of_exit(self._process.exitcode, self.rank.log)}"
            )
        return f"died: {self._ended.error}" if self._ended.error else "completed"

    def kill(self) -> None:
        if pid := self._process.pid:
            for kill in (os.killpg, os.kill):  # it may have no group of its own yet
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        self._process.join(10)
