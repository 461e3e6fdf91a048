"""Ranks for tests of the exchange: forked from one process that has imported torch.distributed, and
no NeMo.

A rank has a real store and a real exchange. Each run has a time limit; all its processes are killed
at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch.distributed as dist

    from nemo_patches.channel.exchange import Exchange
from nemo_patches.channel.rounds import Rounds

# c10d's own warning, of stock ranks as well, on a machine that has no names for addresses.
_NO_NAME = "[c10d] The hostname of the client socket cannot be retrieved"
SOON_S = 10.0  # what a busy machine may take for what happens at once
LONG = timedelta(seconds=60)  # for what must come
_PR_SET_PDEATHSIG = 1


class Rank:
    """One rank, as a scenario sees it."""

    def __init__(self, number: int, size: int, host: str, port: int) -> None:
        import torch.distributed as dist

        self.number, self.size, self.host, self.port = number, size, host, port
        self.store = dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=LONG
        )
        self.said: list[str] = []  # what the exchange has logged

    @functools.cached_property
    def exchange(self) -> Exchange:
        return self.exchange_on(self.store)

    @functools.cached_property
    def rounds(self) -> Rounds:
        return self.exchange.rounds("encoder")

    def exchange_on(self, store: dist.Store) -> Exchange:
        from nemo_patches.channel.exchange import Exchange

        return Exchange(lambda: store, self.number, self.size, self.said.append)

    def hold_rounds(self, count: int = 3) -> None:
        """Rounds that every rank takes part in, and their results."""
        first = self.rounds.latest.number
        for number in range(first, first + count):
            self.rounds.issue(number * self.size + self.number)
            assert self.rounds.wait(LONG) == number * self.size + self.size - 1

    def meet(self, event: str, size: int = 0) -> None:
        """Until all ranks (or so many) have come here."""
        if self.store.add(f"{event} came", 1) == (size or self.size):
            self.store.set(event, "1")
        self.store.wait([event], LONG)


@dataclass(frozen=True)
class Exit:
    """What a scenario returns where the rank's interpreter is to end as any does; else it is left
    without ado.
    """

    code: int
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    value: Any  # what the scenario returned
    at: float  # time.monotonic() when the process was gone
    exit_code: int  # minus the signal
    stderr: str


@dataclass(frozen=True)
class _Run:
    scenario: Callable[..., Any]
    size: int
    args: tuple[Any, ...]
    fan_out: int
    host: str  # the store's
    limit_s: float
    folder: Path


def run(
    scenario: Callable[..., Any],
    size: int,
    *args: Any,
    dies: tuple[int, ...] = (),
    fan_out: int = 2,
    host: str = "127.0.0.1",
    limit_s: float = 240.0,
) -> list[Ended]:
    """Run scenario(rank, *args), a function of a module in this folder, on so many ranks.

    Any rank but those in `dies` must return. The tree has `fan_out`, so that few ranks make a deep
    one.
    """
    with tempfile.TemporaryDirectory() as folder:
        nest = _nest()
        pickle.dump(
            _Run(scenario, size, args, fan_out, host, limit_s, Path(folder)), nest.stdin
        )
        nest.stdin.flush()
        ended: list[Ended | None] = pickle.load(nest.stdout)
    problems = []
    for number, rank in enumerate(ended):
        if rank is None:
            problems.append(f"rank {number} of {size} did not end within {limit_s} s")
        elif number not in dies and not isinstance(rank.value, Exit) and rank.exit_code:
            problems.append(
                f"rank {number} of {size}: exit code {rank.exit_code}\n{rank.stderr[-3000:]}"
            )
    assert not problems, f"{len(problems)} ranks failed. " + "\n".join(problems[:4])
    return [rank for rank in ended if rank is not None]


@functools.cache
def _nest() -> Any:
    """The process that all ranks are forked from: pytest's own has threads."""
    command = [sys.executable, "-c", "import light_ranks; light_ranks.serve()"]
    # torch asks for the name of every store connection's other end; where no server answers, that
    # takes 5 s.
    environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}
    nest = subprocess.Popen(
        command,
        cwd=Path(__file__).parent,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(nest.kill)
    return nest


def _end_with_parent() -> None:
    """Where pytest is killed, nothing is left behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve() -> None:
    """The nest: one run after the other."""
    _end_with_parent()
    import torch.distributed  # noqa: F401

    import nemo_patches.channel.exchange  # noqa: F401

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            run = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        gc.collect()
        gc.freeze()  # a rank's garbage collector leaves alone, and shared, what it was forked with
        if (mother := os.fork()) == 0:
            _end_with_parent()
            os.setsid()
            answers.close()
            _conduct(run)
        _, status = os.waitpid(mother, 0)
        with contextlib.suppress(ProcessLookupError):
            # What ranks have left behind, and the store.
            os.killpg(mother, signal.SIGKILL)
        assert status == 0, status
        pickle.dump([_ended(run.folder, number) for number in range(run.size)], answers)
        answers.flush()


def _ended(folder: Path, number: int) -> Ended | None:
    try:
        at, exit_code = pickle.loads((folder / f"{number}.end").read_bytes())
    except FileNotFoundError:
        return None
    value = folder / f"{number}.value"
    lines = (
        (folder / f"{number}.stderr")
        .read_text(errors="replace")
        .splitlines(keepends=True)
    )
    stderr = "".join(line for line in lines if _NO_NAME not in line)
    return Ended(
        pickle.loads(value.read_bytes()) if value.exists() else None,
        at,
        exit_code,
        stderr,
    )


def _conduct(run: _Run) -> NoReturn:
    """In a process of this run's own: the store, the ranks, and their ends."""
    ours, theirs = os.pipe()
    if os.fork() == 0:
        _serve_store(run, theirs)
    port = int(os.read(ours, 100))
    os.close(ours), os.close(theirs)
    numbers = {}
    for number in range(run.size):
        if (process := os.fork()) == 0:
            _rank(run, number, port)
        numbers[process] = number
    deadline = time.monotonic() + run.limit_s
    while numbers and time.monotonic() < deadline:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in numbers:
            end = (time.monotonic(), os.waitstatus_to_exitcode(status))
            (run.folder / f"{numbers.pop(process)}.end").write_bytes(pickle.dumps(end))
        elif not process:
            time.sleep(0.01)
    os._exit(0)


def _serve_store(run: _Run, pipe: int) -> NoReturn:
    import torch.distributed as dist

    _end_with_parent()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = dist.TCPStore(run.host, 0, is_master=True, wait_for_workers=False)
    os.write(pipe, str(server.port).encode())
    while True:
        signal.pause()


def _rank(run: _Run, number: int, port: int) -> NoReturn:
    _end_with_parent()
    log = os.open(
        run.folder / f"{number}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    os.dup2(log, 1), os.dup2(log, 2), os.close(log)
    try:
        from nemo_patches.channel import meeting

        meeting.FAN_OUT = run.fan_out
        value = run.scenario(Rank(number, run.size, run.host, port), *run.args)
        (run.folder / f"{number}.value").write_bytes(pickle.dumps(value))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if isinstance(value, Exit):
        sys.exit(value.code)
    sys.stderr.flush()
    os._exit(0)


# What befalls a connection.


def reset(connection: socket.socket) -> None:
    """As a firewall, or `ss -K`: both ends learn that there is no such connection. The file stays
    open.
    """
    nowhere = struct.pack("H14x", socket.AF_UNSPEC)
    ctypes.CDLL(None).connect(connection.fileno(), nowhere, len(nowhere))


# What a process has.


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # the folder itself


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@dataclass(frozen=True)
class Listener:
    address: str  # as /proc has it, in hexadecimal
    port: int


def listeners() -> list[Listener]:
    """The ports that this process listens at."""
    own = set()
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            own.add(os.readlink(f"/proc/self/fd/{file}"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                address, port = local.split(":")
                found.append(Listener(address, int(port, 16)))
    return found
