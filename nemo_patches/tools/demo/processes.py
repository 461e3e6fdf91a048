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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich.console import Console
from rich.text import Text

from nemo_patches.tools.demo import logs
from nemo_patches.tools.demo.errors import DemoError
from nemo_patches.tools.demo.jobs import IMPORT_LIMIT, RankJob, RankOutcome, RunOutcome, Task
from nemo_patches.tools.demo.progress import progress

GRACE = timedelta(seconds=15)  # for the other ranks once one has died

# One thread per rank, because they share this machine's cores; no GPU, so that the demo is the same everywhere.
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
    """The folder for the ranks' logs. is_kept: not removed, since something did not come out as it should."""

    path: Path
    is_kept: bool = False


@contextlib.contextmanager
def logs_folder(console: Console) -> Iterator[LogsFolder]:
    """Remove the folder at the end, unless it is to be kept, which is printed, or a DemoError names a log in it."""
    folder = LogsFolder(Path(tempfile.mkdtemp(prefix="nemo-patches-demo-")))
    try:
        yield folder
        if folder.is_kept:
            console.print(Text(f"The ranks' logs: {folder.path}"), soft_wrap=True)
    except DemoError:
        folder.is_kept = True
        raise
    finally:
        if not folder.is_kept:
            shutil.rmtree(folder.path, ignore_errors=True)


def prepare() -> None:
    """Have SIGTERM end the ranks as Ctrl-C does. Raises DemoError without NeMo, before anything starts."""
    if importlib.util.find_spec("nemo") is None:
        raise DemoError("NeMo is not installed; the demo needs it: pip install 'nemo_toolkit[asr]'")
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def fork_server(console: Console, log: Path) -> Iterator[None]:
    """Import NeMo once, in a process from which every rank is forked. Raises DemoError if the import fails.

    Changes this process's environment, and works once in it.
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
            # Fails, or ends with an exit code, if the fork server could not import, or was killed for taking too long.
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
        if server.poll():  # by itself it would end seconds after this command
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                pid = server.recv()
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _import_only(log: Path, server: Connection) -> None:
    """In a fork: if the fork server could not import, the import fails again here, and the log has the error."""
    server.send(os.getppid())
    with logs.written_to(log):
        import nemo_patches.tools.demo.rank  # noqa: F401


def run(console: Console, task: Task, patched: bool, devices: int, folder: Path, stall: timedelta) -> RunOutcome:
    """Start one process per rank and see them to their end: their own, or the time limit. Needs the fork server."""
    began = time.monotonic()
    port = free_port()
    jobs = [RankJob(task, patched, rank, devices, port, folder, stall) for rank in range(devices)]
    title = f"{jobs[0].version}, {task}"
    deadline = _Deadline(jobs[0], began)
    ranks: list[RankProcess] = []
    verdict: tuple[str, ...] = ()
    try:
        with progress(console, title) as shown:
            ranks.extend(map(start, jobs))
            others = [rank for rank in ranks if not rank.outcome.job.stays_away]
            while any(rank.is_running for rank in others) and not deadline.has_passed:
                wait([rank.events or rank.process.sentinel for rank in ranks if rank.is_running], timeout=0.5)
                for rank in ranks:
                    rank.receive()
                deadline.look(ranks)
                shown.update(f"{title}: " + " | ".join(f"rank {r.outcome.job.rank} {r.outcome.now}" for r in ranks))
            if deadline.is_for_hang and all(rank.is_running for rank in ranks):
                shown.update(f"{title}: nemo-patches diagnose looks at it")
                from nemo_patches.tools.demo.hang_verdict import verdict_on  # diagnose: only where a run hangs

                verdict = verdict_on([rank.process.pid or 0 for rank in ranks], stall)
            outcomes = tuple(rank.end(deadline.why) for rank in ranks)
            took = time.monotonic() - began
            shown.say(f"{title}: {'; '.join(f'rank {r.job.rank} {r.ended}' for r in outcomes)} ({took:.0f} s)")
    finally:
        for rank in ranks:  # also on Ctrl-C and errors
            rank.kill()
    return RunOutcome(outcomes, timedelta(seconds=took), verdict)


class _Deadline:
    """When a run is ended that has not ended by itself."""

    def __init__(self, job: RankJob, began: float) -> None:
        limit_s = job.limit.total_seconds()
        self.why = f"after {limit_s:.0f} s"
        self.is_for_hang = False  # stock waits for a rank that stays away
        self._job = job
        self._at = began + limit_s
        self._is_for_dead = False

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self._at

    def look(self, ranks: Sequence[RankProcess]) -> None:
        """Change it once a rank has died, or hangs as it should."""
        dead = next((rank.outcome.job.rank for rank in ranks if rank.process.exitcode), None)
        if dead is not None and not self._is_for_dead:
            self._is_for_dead = True
            self._at = min(self._at, time.monotonic() + GRACE.total_seconds())
            self.why = f"{GRACE.total_seconds():.0f} s after rank {dead} died"
        if not self._job.patched and not self.is_for_hang and any(rank.outcome.is_away for rank in ranks):
            stall_s = self._job.stall.total_seconds()
            self.is_for_hang = True
            self._at = time.monotonic() + stall_s
            self.why = f"after {stall_s:g} s"


def start(job: RankJob) -> RankProcess:
    receiver, sender = _context.Pipe(duplex=False)
    process = _context.Process(target=_rank_process, args=(job, sender), daemon=True)
    process.start()
    sender.close()  # the rank's end; with ours open, its death would not be seen
    return RankProcess(process, receiver, RankOutcome(job))


@dataclass
class RankProcess:
    """A rank's process while it runs."""

    process: BaseProcess
    events: Connection | None
    outcome: RankOutcome

    @property
    def is_running(self) -> bool:
        return self.process.exitcode is None

    def receive(self) -> None:
        """Take in every event that is there; a closed pipe means that the process has ended or is ending."""
        while self.events is not None and self.events.poll():
            try:
                self.outcome = self.outcome.after(self.events.recv())
            except (EOFError, OSError):
                self.events.close()
                self.events = None

    def kill(self) -> bool:
        """Kill the process if it still runs, take in its last events and reap it. Whether it was killed."""
        self.receive()
        pid = self.process.pid
        # If a signal to all has ended the fork server, a rank seems to have ended, too; its pipe is open if it has not.
        if pid is None or (not self.is_running and self.events is None):
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


def _rank_process(job: RankJob, events: Connection) -> None:
    from nemo_patches.tools.demo import rank

    rank.run(job, events)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
