"""The demo's processes: starting them, their time limits, and reaping them."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich.console import Console

from nemo_patches.tools.demo import logs
from nemo_patches.tools.demo.errors import DemoError
from nemo_patches.tools.demo.hang_verdict import verdict_on
from nemo_patches.tools.demo.jobs import IMPORT_LIMIT, Job, RankOutcome, RunOutcome, Task
from nemo_patches.tools.demo.progress import progress

GRACE = timedelta(seconds=15)  # for the other ranks once one has died

# For the ranks. One thread each: they share this machine's cores. Hidden GPUs: the demo is the same everywhere.
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "NEMO_PATCHES_DISABLE": "",
}

_context = multiprocessing.get_context("forkserver")


@dataclass
class LogsFolder:
    """Of one demo's ranks. is_kept: something was not as it should be, and the logs tell of it."""

    path: Path
    is_kept: bool = False


@contextlib.contextmanager
def logs_folder() -> Iterator[LogsFolder]:
    """Removed at the end, unless it is to be kept, or a DemoError names a log."""
    folder = LogsFolder(Path(tempfile.mkdtemp(prefix="nemo-patches-demo-")))
    try:
        yield folder
    except DemoError:
        folder.is_kept = True
        raise
    finally:
        if not folder.is_kept:
            shutil.rmtree(folder.path, ignore_errors=True)


def prepare() -> None:
    """Before anything starts. SIGTERM ends the ranks as Ctrl-C does. Raises DemoError where there is no NeMo."""
    if importlib.util.find_spec("nemo") is None:
        raise DemoError("NeMo is not installed; the demo needs it: pip install 'nemo_toolkit[asr]'")
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def fork_server(console: Console, log: Path) -> Iterator[None]:
    """A process that imports NeMo, once; every rank is forked from it. Raises DemoError if the import fails.

    For a process that does nothing else: its environment is changed, and it cannot start a second fork server.
    """
    os.environ.update(RANK_ENVIRONMENT)  # the fork server inherits it, and every rank from there
    _context.set_forkserver_preload(["nemo_patches.tools.demo.rank", __name__])
    with logs.written_to(log):
        multiprocessing.forkserver.ensure_running()
    server, sender = _context.Pipe(duplex=False)
    probe = _context.Process(target=_import_only, args=(log, sender))
    limit = IMPORT_LIMIT.total_seconds()
    began = time.monotonic()
    try:
        with progress(console, "importing NeMo, once for all ranks") as shown:
            # Fails, or ends with an exit code, if the fork server could not import, or was ended for taking too long.
            with contextlib.suppress(OSError, EOFError):
                probe.start()
                probe.join(limit)
            took = time.monotonic() - began
            if probe.pid is None or probe.exitcode != 0:
                why = f"not done after {limit:.0f} s" if took >= limit else f"died; {logs.last_line(log)}"
                raise DemoError(f"importing NeMo: {why} (log: {log})")
            shown.say(f"NeMo imported in {took:.0f} s")
        yield
    finally:
        if probe.pid and probe.exitcode is None:
            probe.kill()
            probe.join(10)
        if server.poll():  # left to itself, it would need seconds to end, after this command has ended
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                pid = server.recv()
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _import_only(log: Path, server: Connection) -> None:
    """See whether the fork server could import; where it could not, the import fails here again, visibly."""
    server.send(os.getppid())
    with logs.written_to(log):
        import nemo_patches.tools.demo.rank  # noqa: F401


def run(console: Console, task: Task, patched: bool, devices: int, folder: Path, stall: timedelta) -> RunOutcome:
    """Start one process per rank and see them to their end: their own, or the time limit. Needs the fork server."""
    began = time.monotonic()
    port = free_port()
    jobs = [Job(task, patched, rank, devices, port, folder, stall) for rank in range(devices)]
    limit = jobs[0].limit.total_seconds()
    deadline, why = began + limit, f"after {limit:.0f} s"
    title = f"{jobs[0].version}, {task}"
    ranks: list[RankProcess] = []
    verdict: tuple[str, ...] = ()
    try:
        with progress(console, title) as shown:
            for job in jobs:
                ranks.append(start(job))
            dead: RankProcess | None = None
            waited = False  # the clock runs for a stock rank that waits for one that stays away
            others = [rank for rank in ranks if not rank.outcome.job.stays_away]
            while any(r.process.exitcode is None for r in others) and time.monotonic() < deadline:
                running = [r for r in ranks if r.process.exitcode is None]
                wait([r.events or r.process.sentinel for r in running], timeout=0.5)
                for rank in ranks:
                    rank.receive()
                if not dead and (dead := next((r for r in ranks if r.process.exitcode), None)):
                    deadline = min(deadline, time.monotonic() + GRACE.total_seconds())
                    why = f"{GRACE.total_seconds():.0f} s after rank {dead.outcome.job.rank} died"
                if not patched and not waited and any(rank.outcome.is_away for rank in ranks):
                    waited, deadline = True, time.monotonic() + stall.total_seconds()
                    why = f"after {stall.total_seconds():g} s"
                shown.update(f"{title}: " + " | ".join(f"rank {r.outcome.job.rank} {r.outcome.now}" for r in ranks))
            if waited and all(rank.process.pid and rank.process.exitcode is None for rank in ranks):
                shown.update(f"{title}: nemo-patches diagnose looks at it")
                verdict = verdict_on([rank.process.pid or 0 for rank in ranks], stall)
            outcomes = tuple(rank.end(why) for rank in ranks)
            took = time.monotonic() - began
            shown.say(f"{title}: {'; '.join(f'rank {r.job.rank} {r.ended}' for r in outcomes)} ({took:.0f} s)")
    finally:
        for rank in ranks:  # also on Ctrl-C and errors
            rank.kill()
    return RunOutcome(outcomes, timedelta(seconds=took), verdict)


def start(job: Job) -> RankProcess:
    receiver, sender = _context.Pipe(duplex=False)
    # A daemon may have no children: in the hangs, data loaders have workers.
    process = _context.Process(target=_rank_process, args=(job, sender), daemon=job.hang is None)
    process.start()
    sender.close()  # the rank's end; with ours open, its death would not be seen
    return RankProcess(process, receiver, RankOutcome(job))


@dataclass
class RankProcess:
    """A rank's process while it runs."""

    process: BaseProcess
    events: Connection | None
    outcome: RankOutcome

    def receive(self) -> None:
        """Take in every event that is there; a closed pipe means that the process has ended or is ending."""
        while self.events is not None and self.events.poll():
            try:
                self.outcome = self.outcome.after(self.events.recv())
            except (EOFError, OSError):
                self.events.close()
                self.events = None

    def kill(self) -> bool:
        """Take in its last events and reap the process; killed before if it still runs, which is what is returned."""
        self.receive()
        pid = self.process.pid
        if pid is not None and self.outcome.job.hang is not None:
            with contextlib.suppress(ProcessLookupError):  # where it has not begun yet
                os.killpg(pid, signal.SIGKILL)
        # Where a signal to all has ended the fork server, a rank seems to have ended too; its open pipe tells.
        if pid is None or (self.process.exitcode is not None and self.events is None):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.process.join(10)
        self.receive()
        return True

    def end(self, why: str) -> RankOutcome:
        """Kill it if it still runs, and settle how it ended."""
        killed = self.kill()
        rank = self.outcome
        if rank.is_away and killed:
            return replace(rank, completed=True, ended="stayed away")
        if killed:
            ended = f"{'completed, but did not exit' if rank.completed else 'still waiting'} {why}, killed"
        elif rank.completed:
            ended = "completed"
        else:
            ended = rank.ended or f"died: {logs.cause_of_exit(self.process.exitcode, rank.job.log)}"
        return replace(rank, completed=rank.completed and not killed, ended=ended)


def _rank_process(job: Job, events: Connection) -> None:
    from nemo_patches.tools.demo import rank

    rank.run(job, events)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
