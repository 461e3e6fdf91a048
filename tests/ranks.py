"""Real ranks for tests: forked from a server that has imported NeMo once, each with a time limit,
all reaped.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import functools
import itertools
import logging
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    import torch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["nemo_once"])
_server_lock = threading.Lock()
SERVER = "RANKS_FORK_SERVER"  # its address

# What a busy machine may add.
# To a call: less than the shortest timeout that is waited for, so that a second wait is seen
SLACK_S = 1.9
REPORT_S = 12.0  # from the timeout until the report is there
AT_ONCE = 4  # jobs, of one file
_Ended = TypeVar("_Ended")
# The timeout where a scenario begins only when the ranks are in step.
CONNECTING_S = 60.0


@dataclass(frozen=True)
class Result:
    """How one rank ended: what its function returned, what it wrote to stderr, its exit code (minus
    the signal).
    """

    value: Any
    stderr: str
    exit_code: int | None

    def lines(self, *words: str) -> list[str]:
        """nemo_patches' own log lines that hold all the words."""
        own = [line for line in self.stderr.splitlines() if " nemo_patches " in line]
        return [line for line in own if all(word in line for word in words)]


def _start_server() -> None:
    """Once, also where several threads run ranks."""
    with _server_lock:
        _start_server_once()


@functools.cache
def _start_server_once() -> None:
    """What ranks are forked from, which finds nemo_once.py only on PYTHONPATH."""
    if address := os.environ.get(SERVER):
        server = forkserver._forkserver
        # As after its own ensure_running: where it is, and a file for the ranks to hold.
        server._forkserver_address = address
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = resource_tracker.ensure_running
        return
    before = os.environ.get("PYTHONPATH")
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, before)))
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def share_server() -> None:
    """Of this process's, with the pytest processes that it starts: NeMo is imported once for all."""
    with _without_output():
        _start_server()
    os.environ[SERVER] = forkserver._forkserver._forkserver_address


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """What is started here prints nothing: a rank's progress bar would stand among the results."""
    before = {number: os.dup(number) for number in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in before:
        os.dup2(nowhere, number)
    try:
        yield
    finally:
        for number, file in before.items():
            os.dup2(file, number)
            os.close(file)
        os.close(nowhere)


def rank_process(target: Callable[..., None], args: tuple[Any, ...]) -> Any:
    """Not a daemon, which may have no children: data loaders have workers."""
    _start_server()
    return _context.Process(target=target, args=args)


@functools.cache
def _own_ports() -> tuple[socket.socket, Iterator[int]]:
    """Holds the first port of a range that no other test process has, and gives the others, again
    and again.

    Below those that the kernel gives to whoever asks for any, or connects: such a one may be taken
    before it is used.
    """
    for number in itertools.count(os.getpid()):
        first, holder = 10_000 + number % 90 * 200, socket.socket()
        with contextlib.suppress(OSError):
            holder.bind(("127.0.0.1", first))
            return holder, itertools.cycle(range(first + 1, first + 200))
    raise AssertionError("no range of ports is free")


def free_port() -> int:
    while True:
        port = next(_own_ports()[1])
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    limit: float = 300.0,
    dies: tuple[int, ...] = (),
    group: bool = True,
    group_timeout: float = 60.0,
) -> list[Result]:
    """Run function(rank, size, *args) in `size` processes with a gloo process group (unless
    group=False).

    A rank in `dies` may end as it likes, and an exception ends it as it ends any process; any other
    must return. After `limit` seconds all are killed, and the test fails.
    """
    port = free_port()
    processes, pipes, logs = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(size):
                ours, theirs = _context.Pipe(duplex=False)
                log = Path(folder, f"rank{rank}.log")
                process = rank_process(
                    _rank,
                    (
                        function,
                        rank,
                        size,
                        args,
                        port,
                        str(log),
                        theirs,
                        group and group_timeout,
                        rank in dies,
                    ),
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
                logs.append(log)
            outcomes = _collect(pipes, limit)
            for process in processes:
                # An interpreter's end, which with torch in it takes a while.
                process.join(30)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        results = [
            Result(
                outcome[1] if outcome and outcome[0] else None,
                log.read_text(errors="replace"),
                process.exitcode,
            )
            for outcome, log, process in zip(outcomes, logs, processes, strict=True)
        ]
    failures = []
    for rank, (outcome, result) in enumerate(zip(outcomes, results, strict=True)):
        if rank not in dies and not (outcome and outcome[0]):
            why = (
                outcome[1]
                if outcome
                else f"no result within {limit} s, exit code {result.exit_code}"
            )
            failures.append(f"rank {rank} of {size}: {why}")
    # Why one has waited in vain often stands with another.
    ends = [
        f"--- rank {rank}'s stderr ends:\n{result.stderr[-3000:]}"
        for rank, result in enumerate(results)
    ]
    assert not failures, "\n".join((*failures, *ends))
    return results


@contextlib.contextmanager
def at_once(
    request: pytest.FixtureRequest, argument: str, job: Callable[[Any], _Ended]
) -> Iterator[dict[Any, Future[_Ended]]]:
    """job(value) for each value that a selected test of this file has as its argument, some of them
    beside each other: they mostly wait.
    """
    values = [
        item.callspec.params[argument]
        for item in request.session.items
        if item.path == request.path
        and argument in getattr(getattr(item, "callspec", None), "params", {})
    ]
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        yield {value: pool.submit(job, value) for value in dict.fromkeys(values)}
    finally:
        pool.shutdown(cancel_futures=True)


class Given(enum.Enum):
    """Stands for an argument of a job that is there only when it runs."""

    FOLDER = enum.auto()  # of its own
    PORT = enum.auto()  # a free one


class Job:
    """What run_ranks is given, for a test that has `@beside_others` and its `results`."""

    def __init__(
        self, function: Callable[..., Any], size: int, *args: Any, **options: Any
    ) -> None:
        self.function, self.size, self.args = function, size, args
        self.options = options

    def __str__(self) -> str:
        """As the test's id has it."""
        words = [getattr(one, "__name__", one) for one in self.settings]
        return " ".join(map(str, [self.function.__name__, *words]))

    @property
    def settings(self) -> list[Any]:
        """Its arguments, but those that are given when it runs."""
        return [one for one in self.args if not isinstance(one, Given)]

    def run(self, folder: Path) -> list[Result]:
        given = {Given.FOLDER: lambda: str(folder), Given.PORT: free_port}
        args = [given[one]() if isinstance(one, Given) else one for one in self.args]
        return run_ranks(self.function, self.size, *args, **self.options)


class Body:
    """Of a test that mostly waits, with its arguments, the last of which is a folder."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self.function, self.args = function, args

    def __str__(self) -> str:
        return " ".join(map(str, self.args)) or "once"

    def run(self, folder: Path) -> None:
        self.function(*self.args, folder)


def beside_others(*jobs: Any) -> pytest.MarkDecorator:
    """The test has the results of one of these (a Job, a Body) each time. The jobs of a file are run some at a time,
    while tests before it wait: see `results` in conftest.py.
    """
    return pytest.mark.parametrize("results", jobs, ids=str, indirect=True)


def waits_beside_others(
    *cases: tuple[Any, ...],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test, a function of a case and a folder, mostly waits: its body runs in a thread, once for
    each case.
    """

    def of_body(test: Callable[..., None]) -> Callable[..., None]:
        def waits(results: None) -> None: ...

        waits.__name__, waits.__doc__ = test.__name__, test.__doc__
        return beside_others(*(Body(test, *case) for case in cases or [()]))(waits)

    return of_body


def _collect(pipes: list[Connection], limit: float) -> list[tuple[bool, Any] | None]:
    outcomes: list[tuple[bool, Any] | None] = [None] * len(pipes)
    deadline = time.monotonic() + limit
    pending = list(pipes)
    while pending and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(pending, left):
            pending.remove(pipe)
            with contextlib.suppress(EOFError):
                outcomes[pipes.index(pipe)] = pickle.loads(pipe.recv_bytes())
    return outcomes


def _rank(
    function: Callable[..., Any],
    rank: int,
    size: int,
    args: Any,
    port: int,
    log: str,
    pipe: Connection,
    group_timeout: float,
    dies: bool,
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    try:
        if group_timeout:
            join_group(rank, size, port, group_timeout)
        outcome = (True, function(rank, size, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
        if dies:
            say_what_is_left()
            raise
    say_what_is_left()
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()


def say_what_is_left() -> None:
    """As the interpreter's exit does, which a forked rank skips: the stall monitor says what it has
    not said yet, and the exchange that this rank leaves."""
    try:
        from nemo_patches.watch import stall_monitor
    except ModuleNotFoundError:  # a vendored NeMo with the core alone
        pass
    else:
        stall_monitor._at_exit()
    from nemo_patches.channel import exchange

    exchange._at_exit()


def join_group(
    rank: int, size: int, port: int, seconds: float = 60.0, host: str = "127.0.0.1"
) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=seconds),
    )


def wait_until(
    condition: Callable[[], object], seconds: float = 60.0, pause_s: float = 0.01
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the limit"
        time.sleep(pause_s)


def waits_for_a_round() -> bool:
    """Whether this process's main thread does."""
    from nemo_patches.watch.frames import stack

    main = threading.main_thread().ident or 0
    return any(
        code.co_name == "wait" and code.co_filename.endswith("channel/rounds.py")
        for code, _ in stack(main)
    )


def all_have_come() -> bool:
    """Whether this rank knows that every rank has joined, and can ask them; one has compared their
    settings.
    """
    try:
        from nemo_patches.watch import subscriber
    except (
        ModuleNotFoundError
    ):  # a vendored NeMo with the core alone, which calls no roll
        return True
    monitor = subscriber.monitor()
    return monitor is not None and monitor.exchange.is_whole and monitor.roll.is_done


def stall_monitor() -> Any:
    """This rank's; there is one since its process group."""
    from nemo_patches.watch import subscriber

    monitor = subscriber.monitor()
    assert monitor is not None
    return monitor


def forget_incidents() -> None:
    """All ranks are in step again, and the next call waits as if none had waited in vain yet: one
    process has several scenarios. For all ranks at once."""
    import torch
    import torch.distributed as dist

    from nemo_patches.sync import length_sync
    from nemo_patches.sync.protocol import LengthProtocol

    group_syncs = length_sync.process.group_syncs
    if group_syncs is None:
        return
    lengths = group_syncs.rounds(length_sync.LENGTHS)
    rounds = lengths.rounds
    # Of the first scenario there is nothing to forget, and the watch comes first.
    if not rounds.issued:
        return
    issued = torch.tensor(rounds.issued)
    dist.all_reduce(issued, dist.ReduceOp.MAX)
    if rounds.issued < issued:
        # The one that is outstanding on other ranks: it then comes on all.
        rounds.issue(0)
    assert rounds.wait(datetime.timedelta(seconds=CONNECTING_S)) is not None
    lengths.protocol, lengths.latest = LengthProtocol(), None
    dist.barrier()


def in_step(**settings: Any) -> torch.nn.Module:
    """A Conformer after two calls that every rank has made; the settings (of `nemo_patches.apply`)
    hold from now on.

    Until here the timeout is long: the first call connects the ranks, which a busy machine may take
    seconds for.
    """
    import encoders
    import torch.distributed as dist

    import nemo_patches

    nemo_patches.apply(**{**settings, "timeout": CONNECTING_S})
    encoder = encoders.conformer()
    dist.barrier()
    for _ in range(2):
        encoders.sync(encoder, 100)
        come_in(encoder)
    wait_until(all_have_come)
    dist.barrier()  # one rank compares all ranks' settings until here
    nemo_patches.apply(**settings)
    dist.barrier()
    return encoder


def come_in(encoder: torch.nn.Module) -> None:
    """Until the round has come on every rank. On a busy machine a barrier may be first, and a rank
    that does not see its round yet at the next call issues none: the others then wait in vain once
    more."""
    import torch.distributed as dist

    from nemo_patches.sync import length_sync

    sync = length_sync.sync_of(encoder)
    assert sync is not None
    wait_until(lambda: sync.round is not None and sync.has_come(sync.round))
    dist.barrier()


def wait_for_others(event: str, count: int) -> None:
    """Until `count` ranks have come here; rank 0, which has the store's server, until the others
    have seen that.
    """
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()

    def count_to(event: str) -> None:
        store.add(event, 1)
        wait_until(lambda: store.add(event, 0) >= count)

    count_to(event)
    if dist.get_rank() == 0:
        count_to(event + " seen")
    else:
        store.add(event + " seen", 1)


class Said(logging.Handler):
    """This process's own warnings, as they come."""

    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        self.levels: list[int] = []
        from nemo_patches.sync import rank_log as reporting

        # First: a handler of the user's own would take the lines away from stderr
        reporting.enable()
        logging.getLogger("nemo_patches").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.levels.append(record.levelno)
        self.lines.append(record.getMessage())
