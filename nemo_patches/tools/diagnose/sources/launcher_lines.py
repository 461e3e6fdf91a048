"""Lines of launchers, schedulers and the kernel on processes that ended:
torchrun, DeepSpeed, Ray, Slurm, mpirun.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose.facts import NOT_TOLD, Fact, Fate, Member
from nemo_patches.tools.diagnose.rank_end import STALL_EXIT
from nemo_patches.tools.diagnose.sources.log_facts import (
    MOST_KEPT,
    LaunchFacts,
    Line,
    shown,
)

# Each line that this reader understands, but for torchrun's table, has one of these.
_WORDS = (
    *(
        "emory",
        "MEMLIMIT",
        "oom_kill",
        "oom-kill",
        "bus error",
        "killed by",
        "return",
        "srun: ",
        "on signal",
    ),
    *(
        "with signal",
        "died",
        "CANCELLED",
        " Killed ",
        "terminated with",
        "Node failure",
        "with PID",
    ),
    *("lost communication", "Remote daemon"),
)
# In place of a host: times in their tables are to the second, so hosts' clocks are taken to agree
CLOCK = "launchers"
_TIME = re.compile(r"\btime      : (\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)")
_HOST = re.compile(r"\bhost      : (\S{1,255})")
_RANK = re.compile(r"\brank      : (\d{1,7}) \(local_rank: (\d{1,7})\)")
_EXIT_CODE = re.compile(r"\bexitcode  : (-?\d{1,9}) \(pid: (\d{1,9})\)")
FAILED_LINE = re.compile(
    r"failed ?\(exitcode: ?(-?\d{1,9})\) ?local_rank: ?(\d{1,7}) ?\(pid: ?(\d{1,9})\)"
)  # a terminal may have wrapped it at a blank
_SENT = re.compile(r"[Ss]ending process (\d{1,9}) closing signal ")
_DEATH = re.compile(
    r"Received (?:Signals\.)?(\w{1,10}) death signal, shutting down workers"
)
_FORCED = re.compile(
    r"[Pp]rocess (\d{1,9}) via (?:(?:Signals\.)?SIGTERM|15), forcefully exiting"
)  # 15: Python 3.11
_SIGNALS = {
    9: "SIGKILL",
    6: "SIGABRT",
    7: "SIGBUS",
    11: "SIGSEGV",
    15: "SIGTERM",
    2: "SIGINT",
    1: "SIGHUP",
}
_BY_OTHERS = frozenset({15, 2, 1})
_BY_NOBODY_ELSE = frozenset({9, 7})  # no rank that waits for others ends so
DEEPSPEED = re.compile(r"exits ?with ?return ?code ?= ?(-?\d{1,9})")
_SRUN = re.compile(
    r"srun: error: (\S{1,80}): tasks? ([\d,\-\[\]]{1,200}): "
    r"(?:(Killed|Bus error|Segmentation fault)|Exited with exit code"
    r" (\d{1,3})|(Aborted|Terminated))"
)
# How a scheduler ends a job; each group is named as that.
_CANCELLED = re.compile(
    r"error: \*\*\* (?:STEP|JOB) \S{1,80} ON \S{1,80} (?P<Slurm>CANCELLED AT .{1,120}?)"
    r" ?\*\*\*|"
    r"^(?P<LSF>TERM_(?:RUNLIMIT|PREEMPT|OWNER)\b.{0,120})|(?P<PBS>PBS: job killed:"
    r" walltime .{1,80})"
)
_NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S{1,200})")
# Of what it gives as its reason: how the job ended.
_REASONS = (
    *((words, fates.TIME_LIMIT) for words in ("TIME LIMIT", "RUNLIMIT", "walltime")),
    ("PREEMPT", fates.PREEMPTED),
    ("JOB REQUEUE", fates.REQUEUED),
)
# Open MPI's, PRRTE's: the node is in a line after it.
_LOST_NODE = re.compile(
    r"(?:PRTE|ORTE|PMIX|mpirun) has lost communication with a remote daemon"
)
_REMOTE_DAEMON = re.compile(r"Remote daemon: .{1,200} on node (\S{1,200})")
# Bash, of a process in its script.
_SHELL = re.compile(r": line \d{1,9}: {1,8}(\d{1,9}) Killed {2,40}\S")
MPIRUN = re.compile(
    r"process rank (\d{1,7}) with PID \d{1,9} on node (\S{1,80}) (?:exited on ?signal"
    r" (\d{1,3})|exiting ?improperly)"
)
# mpirun's on the first process that failed, in two lines.
_MPI_PROCESS = re.compile(
    r"Process name: \[(?:\[\d{1,9},\d{1,9}\]|[\w.@\-]{1,200}),(\d{1,7})\]"
)
_MPI_CODE = re.compile(r"^\s{1,8}Exit code: {1,8}(\d{1,3})$")
_LIGHTNING = re.compile(
    r"\[rank: (\d{1,7})\] Child process with PID (\d{1,9}) terminated with code"
    r" (-?\d{1,3})\."
)
_SPAWNED = re.compile(
    r"ProcessExitedException: (process \d{1,7} terminated with (?:(signal"
    r" SIG(?:KILL|BUS|SEGV))|exit code \d{1,3}))"
)
# What programs write when training has come to its end, in good order.
_FINISHED = re.compile(
    r"[Rr]eturning from train|[Tt]raining (?:has |is"
    r" )?(?:finished|completed?|done)|[Ff]inished training|"
    r"`Trainer\.fit` stopped: `max_"
)
# Of Slurm, the kernel and Ray; each has words of its own, and none tells the rank.
_OUT_OF_MEMORY = re.compile(
    r"oom[_-]kill event|srun: error: \S{1,80}: tasks? [\d,\-\[\]]{1,200}: Out Of"
    r" Memory|"
    r"Out of memory: Killed process \d+|"
    r"exceeded (?:job )?memory limit|^TERM_MEMLIMIT|"
    r"Memory cgroup out of memory|worker was killed due to the node running low on"
    r" memory|killed due to memory pressure"
)
_SHARED_MEMORY = re.compile(
    r"Unexpected bus error encountered in worker\. This might be caused by insufficient"
)
_WORKER_KILLED = re.compile(
    r"DataLoader worker \(pid[^)]{1,80}\) is killed by signal: (?!Terminated).{0,200}"
)
_RAY_DIED = re.compile(
    r"(?:ActorDiedError|RayActorError): (The actor died .{0,80})|A worker died or was"
    r" killed"
)
_RAY_PID = re.compile(r"^\s{0,16}pid: (\d{1,9})$|Worker PID: (\d{1,9})")
_RAY_REASON = re.compile(r"Worker exit type: (\w{1,40})")
_BY_DESIGN = ("INTENDED_USER_EXIT", "INTENDED_SYSTEM_EXIT", "USER_ERROR")
_RAY_LINES = 12  # in which the process id and the reason of a death follow
_Kept = TypeVar("_Kept")
# Of a table's times: torchrun looks at its processes one after the other.
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class _Failure:
    """An entry of torchrun's table. at: to the second, 0 where not told."""

    rank: int
    code: int
    pid: int
    at: float
    host: str
    line: Line


class LauncherLines:
    """One launch's lines. Each node's torchrun writes its own table, with the first failure
    last.
    """

    def __init__(self, found: LaunchFacts) -> None:
        self._found = found
        self._table: list[_Failure] = []
        # Ranks in the table: their later lines are of a later launch.
        self.ended: set[int] = set()
        self._in_lines: list[tuple[int, int, int, Line]] = []  # code, local rank, pid
        # Files and pids that torchrun sent SIGTERM, as others had failed.
        self._sent: set[tuple[str, int]] = set()
        # Files that tell that Slurm has ended the job.
        self._cancelled: set[str] = set()
        # Pids that torchrun killed, as they did not heed SIGTERM.
        self._forced: set[int] = set()
        self._at, self._host, self._rank = 0.0, "", NOT_TOLD
        self._ray: Line | None = None  # a death whose process id may follow
        self._ray_lines = 0
        self._lost_node: Line | None = None  # a lost daemon whose node may follow
        self._mpi_rank = NOT_TOLD  # whose exit code may follow
        # By SIGTERM, says srun; Slurm's reason may follow.
        self._terminated: list[tuple[Fate, Line]] = []
        self._is_requeued = False
        self._saw_srun = False  # srun has told of a task's end
        # The last that tells of an end in good order.
        self._finished: Line | None = None

    @property
    def is_requeued(self) -> bool:
        """Whether Slurm has ended all of it, to start it again."""
        return self._is_requeued and self._saw_srun

    def take(self, line: Line) -> None:
        text = line.text
        if " : " in text:
            self._take_table(line)
        for words, pattern, note in _NOTED:
            if words in text and (found := pattern.search(text)):
                note(self, found, line)
        if _FINISHED.search(text):
            self._finished = line
        if self._ray is not None or any(words in text for words in _WORDS):
            self._take_end(line)
            self._take_ray(line)

    def _note_failed(self, found: re.Match[str], line: Line) -> None:
        if len(self._in_lines) < MOST_KEPT:
            self._in_lines.append(
                (_signed(found[1]), int(found[2]), int(found[3]), line)
            )

    def _note_death(self, found: re.Match[str], line: Line) -> None:
        number = int(found[1]) if found[1].isdigit() else 0
        signal = _SIGNALS.get(number, f"signal {shown(found[1])}")
        self._found.add(
            NOT_TOLD, Fate(fates.TERMINATED, f"torchrun got {signal}"), line, own=False
        )

    def _note_cancelled(self, found: re.Match[str], line: Line) -> None:
        self._cancelled.add(line.file)
        scheduler = found.lastgroup or ""
        why = found[scheduler].removeprefix("PBS: ")
        text = f"{scheduler}: {shown(why)}"
        self._is_requeued |= "JOB REQUEUE" in why
        if "NODE FAIL" in why:
            self._found.add(NOT_TOLD, Fate(fates.NODE, text), line, own=False)
            return
        reason = next((reason for words, reason in _REASONS if words in why), "")
        self._found.add(
            NOT_TOLD,
            Fate(fates.TERMINATED, f"{reason}; {text}" if reason else text),
            line,
            own=False,
        )

    def _note_node(self, found: re.Match[str], line: Line) -> None:
        self._found.add(
            NOT_TOLD,
            Fate(fates.NODE, f"Slurm: node failure on {shown(found[1])}"),
            line,
            own=False,
        )

    def _note_daemon(self, found: re.Match[str], line: Line) -> None:
        if self._lost_node is not None:
            text = f"mpirun lost the connection to node {shown(found[1])}"
            self._found.add(
                NOT_TOLD, Fate(fates.NODE, text), self._lost_node, own=False
            )
            self._lost_node = None

    def _of_mpirun(self, found: re.Match[str], line: Line) -> None:
        who = f"mpirun, of node {shown(found[2])}"
        fate = Fate(fates.FAILED, f"it exited improperly, says {who}")
        self._tell(
            _fate_of(-int(found[3]), who) if found[3] else fate, line, int(found[1])
        )

    def _note_mpi_process(self, found: re.Match[str], line: Line) -> None:
        self._mpi_rank = int(found[1])

    def _note_mpi_code(self, found: re.Match[str], line: Line) -> None:
        if self._mpi_rank != NOT_TOLD:
            self._tell(_fate_of(_signed(found[1]), "mpirun"), line, self._mpi_rank)
            self._mpi_rank = NOT_TOLD

    def _take_end(self, line: Line) -> None:
        """The end of a process that one line tells. The first pattern that matches counts."""
        for pattern, tell in _ENDS:
            if found := pattern.search(line.text):
                tell(self, found, line)
                return

    def _worker_killed(self, found: re.Match[str], line: Line) -> None:
        if not line.has_prefix:  # else its rank's traceback tells it
            self._tell(
                Fate(fates.RAISED, f"RuntimeError: {shown(found[0])}"), line, line.rank
            )

    def _of_srun(self, found: re.Match[str], line: Line) -> None:
        self._saw_srun = True
        if line.file not in self._cancelled:
            task, how = f"task {found[2]} on {shown(found[1])}", found[3]
            code = {"Aborted": -6, "Terminated": -15}.get(found[5] or "") or _signed(
                found[4] or "0"
            )
            told = (
                Fate(fates.KILLED, f"Slurm's {task}: {how}")
                if how
                else _of_exit(code, found[4], f"Slurm, of {task}")
            )
            if told is not None and told.kind == fates.TERMINATED:
                self._terminated.append((told, line))
            else:
                self._tell(told, line)

    def _of_lightning(self, found: re.Match[str], line: Line) -> None:
        fate = _fate_of(
            _signed(found[3]), f"Lightning, of local rank {found[1]} (pid {found[2]})"
        )
        self._tell(fate, line, self._rank_of(int(found[2])))

    def _of_spawn(self, found: re.Match[str], line: Line) -> None:
        kind = fates.KILLED if found[2] else fates.FAILED
        self._tell(Fate(kind, f"torch.multiprocessing: {found[1]}"), line)

    def _rank_of(self, pid: int) -> int:
        return self._found.rank_of_pid.get(pid, NOT_TOLD)

    def _take_table(self, line: Line) -> None:
        text = line.text
        if at := _TIME.search(text):
            self._at = _seconds(at[1])
        elif host := _HOST.search(text):
            self._host = shown(host[1])
        elif rank := _RANK.search(text):
            self._rank = int(rank[1])
            self._found.several_hosts |= rank[1] != rank[2]
        elif (
            (code := _EXIT_CODE.search(text))
            and self._rank >= 0
            and len(self._table) < MOST_KEPT
        ):
            self.ended.add(self._rank)
            self._table.append(
                _Failure(
                    self._rank,
                    _signed(code[1]),
                    int(code[2]),
                    self._at,
                    self._host,
                    line,
                )
            )
            self._at, self._host, self._rank = 0.0, "", NOT_TOLD

    def _tell(
        self, fate: Fate | None, line: Line, rank: int = NOT_TOLD, at: float = 0.0
    ) -> None:
        """Of a process that ended after training had, an end is no cause."""
        finished = self._finished
        if (
            fate is not None
            and finished is not None
            and finished.file == line.file
            and not self._found.is_over
        ):
            text = f"{fate.text}, after training had come to its end [{finished.cite}]"
            fate = Fate(fates.FAILED, text, fate.where, fate.details, fate.exit_code)
        if fate is not None:
            self._found.keep(
                Fact(rank, fate, line.cite, at, CLOCK if at else "", own=False),
                line.local_rank,
            )

    def _take_ray(self, line: Line) -> None:
        """Ray tells of a worker's death in several lines."""
        text = line.text
        if "died" in text and _RAY_DIED.search(text):
            self._end_ray(NOT_TOLD)
            self._ray, self._ray_lines = line, _RAY_LINES
        if self._ray is None:
            return
        reason, pid = _RAY_REASON.search(text), _RAY_PID.search(text)
        if reason and reason[1] in _BY_DESIGN:
            self._ray = None
            return
        if pid:
            self._end_ray(int(pid[1] or pid[2]))
        elif self._ray_lines <= 0:
            self._end_ray(NOT_TOLD)
        self._ray_lines -= 1

    def _end_ray(self, pid: int) -> None:
        line, self._ray = self._ray, None
        if line is not None:
            process = f" (pid {pid})" if pid >= 0 else ""
            fate = Fate(
                fates.KILLED,
                f"Ray: a worker{process} died: killed, out of memory, or crashed",
            )
            self._tell(fate, line, self._rank_of(pid))

    def finish(self) -> None:
        self._end_ray(NOT_TOLD)
        for fate, line in self._terminated:
            if line.file not in self._cancelled:
                self._tell(fate, line)
        known = {one.pid for one in self._table}
        first = min(
            (one.at for one in self._table if one.at and one.code != -15), default=0.0
        )
        for one in self._table:
            member = Member(pid=one.pid)
            self._found.keep(
                Fact(one.rank, member, one.line.cite, host=one.host, own=False)
            )
            self._tell(self._of_table(one, first), one.line, one.rank, one.at)
        for code, local_rank, pid, line in self._in_lines:
            if pid not in known:
                who = f"torchrun, of local rank {local_rank} (pid {pid})"
                self._tell(_fate_of(code, who), line, self._rank_of(pid))

    def leave_out_woken(self) -> None:
        """Slurm wakes a stopped rank to end it: that rank then meets closed connections, of ranks
        that stall_exit has ended, and was no less silent before.
        """
        facts = self._found.facts
        exits = {
            fact.rank for fact in facts.values() if fact.fate_text == fates.STALL_EXIT
        }
        silent = {
            fact.rank for fact in facts.values() if fact.fate_kind == fates.SILENT
        }
        if exits:
            self._found.facts = {
                key: fact
                for key, fact in facts.items()
                if fact.fate_kind != fates.CUT or fact.rank not in silent - exits
            }

    def _of_table(self, one: _Failure, first: float) -> Fate | None:
        later = one.at > first + _PATIENCE_S
        of_others = {pid for file, pid in self._sent if file == one.line.file}
        if one.code == -9 and (one.pid in self._forced | of_others or later):
            return Fate(
                fates.TERMINATED, "SIGKILL by its launcher, as others had failed"
            )
        if one.code == -15 and of_others and one.pid not in of_others:
            return Fate(fates.TERMINATED, fates.FROM_OUTSIDE)
        return _fate_of(one.code, "torchrun")


def _fate_of(code: int, who: str) -> Fate | None:
    """By the exit code. A crash (SIGSEGV) may also be how a rank ends that others have left."""
    if code == 0:
        return None
    name = _SIGNALS.get(-code, "")
    text = f"{name or f'exit code {code}'}, says {who}"
    if -code in _BY_OTHERS:
        return Fate(fates.TERMINATED, text)
    if -code in _BY_NOBODY_ELSE:
        return Fate(fates.KILLED, text)
    return Fate(fates.ABORTED if code in (-6, STALL_EXIT) else fates.FAILED, text)


def _of_exit(code: int, exit_code: str | None, who: str) -> Fate | None:
    """A program, or a shell, that has ended by a code like 137 itself: srun names real signals."""
    fate = _fate_of(code, who)
    if fate is None or code >= 0 or exit_code is None:
        return fate
    return Fate(fate.kind, f"exit code {exit_code} ({_SIGNALS[-code]}), says {who}")


def _signed(code: str) -> int:
    """Minus the number of a signal, as in torchrun's tables. A shell script adds 128 to the number
    instead.
    """
    return 128 - int(code) if int(code) - 128 in _SIGNALS else int(code)


def _seconds(text: str) -> float:
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%d_%H:%M:%S")))
    except ValueError:
        return 0.0


def _keep(kept: set[_Kept], one: _Kept) -> None:
    if len(kept) < MOST_KEPT:
        kept.add(one)


_Reader: TypeAlias = Callable[[LauncherLines, re.Match[str], Line], None]
# Lines of which something is kept, whatever else they tell; each has these words.
_NOTED: tuple[tuple[str, re.Pattern[str], _Reader], ...] = (
    ("exitcode: ", FAILED_LINE, LauncherLines._note_failed),
    ("forcefully", _FORCED, lambda own, by, _: _keep(own._forced, int(by[1]))),
    ("closing", _SENT, lambda own, by, line: _keep(own._sent, (line.file, int(by[1])))),
    ("death signal", _DEATH, LauncherLines._note_death),
    ("CANCELLED", _CANCELLED, LauncherLines._note_cancelled),
    ("TERM_", _CANCELLED, LauncherLines._note_cancelled),
    ("PBS: ", _CANCELLED, LauncherLines._note_cancelled),
    ("Node failure", _NODE_FAILURE, LauncherLines._note_node),
    (
        "lost communication",
        _LOST_NODE,
        lambda own, _, line: setattr(own, "_lost_node", line),
    ),
    ("Remote daemon", _REMOTE_DAEMON, LauncherLines._note_daemon),
    ("Process name", _MPI_PROCESS, LauncherLines._note_mpi_process),
    ("Exit code: ", _MPI_CODE, LauncherLines._note_mpi_code),
)
_BUS_ERROR = (
    "a data loader's worker: bus error, as for want of shared memory (/dev/shm)"
)
_ENDS: tuple[tuple[re.Pattern[str], _Reader], ...] = (
    (
        _OUT_OF_MEMORY,
        lambda own, _, line: own._tell(
            Fate(fates.KILLED, f"{fates.FOR_MEMORY}: {shown(line.text)}"), line
        ),
    ),
    (
        _SHARED_MEMORY,
        lambda own, _, line: own._tell(Fate(fates.KILLED, _BUS_ERROR), line, line.rank),
    ),
    (_WORKER_KILLED, LauncherLines._worker_killed),
    (
        DEEPSPEED,
        lambda own, by, line: own._tell(
            _fate_of(_signed(by[1]), "DeepSpeed's launcher"), line
        ),
    ),
    (_SRUN, LauncherLines._of_srun),
    (
        _SHELL,
        lambda own, by, line: own._tell(
            Fate(fates.KILLED, f"SIGKILL of process {by[1]}, says the shell"), line
        ),
    ),
    (MPIRUN, LauncherLines._of_mpirun),
    (_LIGHTNING, LauncherLines._of_lightning),
    (_SPAWNED, LauncherLines._of_spawn),
)
