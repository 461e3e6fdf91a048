"""Ranks of an exchange for tests: forked processes that a test hands functions to, and their store.

Each answer has a time limit, and all processes are killed and reaped at the end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from ranks import free_port

from nemo_patches.channel.exchange import Exchange
from nemo_patches.channel.rounds import RoundFailed

LIMIT_S = 60.0  # for what must come


class Watch:
    """What answers questions on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.key = "same"
        self.still = -1.0
        self.answers = True
        self.judges = True
        self.told_at: list[tuple[float, Any]] = []

    def asked(self, id_: str, reply: Callable[[str, Any, float], None]) -> None:
        if self.answers:
            reply(self.key, {"rank": self.rank}, self.still)

    def judge(self, found: dict[str, Any], reply: Callable[[Any], None]) -> None:
        if not self.judges:
            raise ValueError("an error of the watch")
        reply({"judge": self.rank, **found})

    def told(self, id_: str, verdict: Any) -> None:
        self.told_at.append((time.monotonic(), verdict))


class Rank:
    """One rank, in its process, as the functions of a test see it."""

    def __init__(
        self, number: int, size: int, make_store: Callable[[], dist.Store]
    ) -> None:
        self.number = number
        self.size = size
        self.make_store = make_store
        self.said: list[str] = []
        self.watch = Watch(number)
        self.stopping: list[bool] = []  # a test's thread ends when something is in it
        self.exchange: Exchange
        self.store: dist.Store

    def join(self) -> None:
        """Have an exchange; a second call has another one, on the same key."""
        self.store = self.make_store()
        self.watch = Watch(self.number)
        store = dist.PrefixStore("group", self.store)
        self.exchange = Exchange(
            lambda: store, self.number, self.size, self.said.append
        )
        self.exchange.watch = self.watch
        self.exchange.start()
        self.key = self.exchange.rounds("encoder")

    def close(self) -> None:
        self.exchange.close()

    def rejoin(self) -> None:
        self.close()
        self.join()

    def wait_joined(self) -> None:
        end = time.monotonic() + LIMIT_S
        while not self.exchange.is_joined:
            assert time.monotonic() < end, (self.number, self.said)
            time.sleep(0.01)

    def hold_rounds(self, count: int, pause_s: float = 0.0) -> list[float]:
        """Rounds that every rank takes part in; how long each took, in seconds."""
        took = []
        for _ in range(count):
            time.sleep(pause_s)
            number = self.key.latest.number + 1
            began = time.perf_counter()
            self.key.issue(number * self.size + self.number)
            result = self.key.wait(timedelta(seconds=LIMIT_S))
            took.append(time.perf_counter() - began)
            assert result == number * self.size + self.size - 1, (number, result)
        return took

    def one_round(self, value: int, limit_s: float = LIMIT_S) -> int | str | None:
        """The result; None: not in time; or why there are no more rounds."""
        try:
            self.key.issue(value)
            return self.key.wait(timedelta(seconds=limit_s))
        except RoundFailed as error:
            return str(error)

    def outstanding(self) -> int | None:
        """The result of the round that was issued before."""
        return self.key.wait(timedelta(seconds=LIMIT_S))

    def ask(self) -> tuple[float, Any]:
        """How long the verdict took, in seconds, and the verdict."""
        before = len(self.watch.told_at)
        began = time.monotonic()
        self.exchange.ask()
        while len(self.watch.told_at) <= before:
            assert time.monotonic() < began + LIMIT_S, "no verdict"
            time.sleep(0.005)
        at, verdict = self.watch.told_at[before]
        return at - began, verdict

    def why_over(self) -> str:
        return self.exchange.over

    def times_told(self) -> int:
        return len(self.watch.told_at)


class Job:
    """The test's end: `do` has functions of Rank, or of the test, run on ranks, all at once."""

    def __init__(
        self,
        size: int,
        per_host: int = 0,
        joins: bool = True,
        setup: Callable[[int], object] = lambda rank: None,
        by_file: bool = False,
    ) -> None:
        """per_host: ranks of one host, by its name. by_file: the store is a file, for ranks without
        a network.
        """
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        self._server: dist.TCPStore | None = None
        self.port = free_port()
        self.processes: list[int] = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = multiprocessing.Pipe()
            process = os.fork()
            if process == 0:
                self._run_rank(rank, theirs, per_host, setup, by_file)
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)
        if not by_file:  # after the forks: c10d's server has threads
            self._server = dist.TCPStore(
                "127.0.0.1", self.port, is_master=True, wait_for_workers=False
            )
        if joins:
            self.do(self.all, Rank.join)
            self.do(self.all, Rank.wait_joined)

    @property
    def all(self) -> range:
        return range(self.size)

    def others(self, *ranks: int) -> list[int]:
        return [rank for rank in self.all if rank not in ranks]

    def do(
        self, ranks: Iterable[int], function: Callable[..., Any], *arguments: Any
    ) -> list[Any]:
        """What it returns on each of these ranks. Raises AssertionError where it raises."""
        ranks = list(ranks)
        self.send(ranks, function, *arguments)
        return self.get(ranks)

    def send(
        self, ranks: Iterable[int], function: Callable[..., Any], *arguments: Any
    ) -> None:
        for rank in ranks:
            self._pipes[rank].send((function, arguments))

    def get(self, ranks: Iterable[int]) -> list[Any]:
        end = time.monotonic() + 2 * LIMIT_S
        found = []
        for rank in ranks:
            assert self._pipes[rank].poll(max(end - time.monotonic(), 0)), (
                f"rank {rank}: no answer"
            )
            is_right, value = self._pipes[rank].recv()
            assert is_right, f"rank {rank}: {value}"
            found.append(value)
        return found

    def signal(self, ranks: Iterable[int], number: int) -> None:
        for rank in ranks:
            os.kill(self.processes[rank], number)

    def end_store(self) -> None:
        self._server = None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in filter(None, self.processes):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for pipe in self._pipes:
            pipe.close()
        self._server = None
        self._folder.cleanup()

    def _run_rank(
        self,
        number: int,
        pipe: Connection,
        per_host: int,
        setup: Callable[[int], object],
        by_file: bool,
    ) -> NoReturn:
        kept = pipe.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        faulthandler.disable()
        if per_host:
            socket.gethostname = lambda: f"host{number // per_host}"
        setup(number)

        def make_store() -> dist.Store:
            if by_file:
                return dist.FileStore(str(Path(self._folder.name, "store")), -1)
            limit = timedelta(seconds=LIMIT_S)
            return dist.TCPStore(
                "127.0.0.1",
                self.port,
                is_master=False,
                wait_for_workers=False,
                timeout=limit,
            )

        rank = Rank(number, self.size, make_store)
        with contextlib.suppress(EOFError):
            while True:
                function, arguments = pipe.recv()
                try:
                    pipe.send((True, function(rank, *arguments)))
                except BaseException:
                    pipe.send((False, traceback.format_exc()))
        os._exit(0)


def silences(verdict: Any) -> dict[int, str]:
    """By rank, why nothing is heard of it."""
    return {
        rank: how
        for how, runs, *_ in verdict["silent"]
        for first, last in runs
        for rank in range(first, last + 1)
    }


def heard(verdict: Any) -> set[int]:
    runs = [run for _, runs, _, _ in verdict["groups"] for run in runs]
    return {rank for first, last in runs for rank in range(first, last + 1)}
