"""Lines of launchers, schedulers and the kernel on processes that ended:
torchrun, DeepSpeed, Ray, Slurm, mpirun.

Most are one line each: a pattern, and what it tells. A group of a pattern that is named "rank" or
"pid" tells whose end it is, "code" its exit code, "signal" the number of a signal.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Callable
from typing import NamedTuple

from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.facts import NOT_TOLD, Condition, Fact, Member
from nemo_patches.tools.diagnose.rank_end import STALL_EXIT
from nemo_patches.tools.diagnose.sources.c10d_lines import ranks_in
from nemo_patches.tools.diagnose.sources.log_facts import (
    MOST_KEPT,
    LaunchFacts,
    Line,
    shown,
)

# In place of a host: times in their tables are to the second, so hosts' clocks are taken to agree
CLOCK = "launchers"
# A line of torchrun's table
_OF_TABLE = re.compile(
    r"\b(?:time      : (?P<time>\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)|"
    r"host      : (?P<host>\S{1,255})|"
    r"rank      : (?P<rank>\d{1,7}) \(local_rank: (?P<local>\d{1,7})\)|"
    r"exitcode  : (?P<code>-?\d{1,9}) \(pid: (?P<pid>\d{1,9})\))"
)
FAILED_LINE = re.compile(
    r"failed ?\(exitcode: ?(?P<code>-?\d{1,9})\) ?local_rank: ?(?P<local>\d{1,7})"
    r" ?\(pid: ?(?P<pid>\d{1,9})\)"
)  # a terminal may have wrapped it at a blank
# Processes that torchrun ends, as others had failed
_SENT = re.compile(
    r"[Ss]ending process (\d{1,9}) closing signal |"
    r"[Pp]rocess (\d{1,9}) via \S{1,20}, forcefully exiting"
)
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
_MPICH_SIGNALS = _SIGNALS.keys() - {1, 2}  # as exit codes of its own
_BY_NOBODY_ELSE = frozenset({9, 7})  # no rank that waits for others ends so
DEEPSPEED = re.compile(r"exits ?with ?return ?code ?= ?(?P<code>-?\d{1,9})")
_OUT_OF_MEMORY = re.compile(
    r"srun: error: \S{1,80}: tasks? (?P<tasks>[\d,\-]{1,200}): Out Of Memory"
)
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
# Of what it gives as its reason: how the job ended.
_REASONS = (
    ("TIME LIMIT", conditions.TIME_LIMIT),
    ("RUNLIMIT", conditions.TIME_LIMIT),
    ("walltime", conditions.TIME_LIMIT),
    ("PREEMPT", conditions.PREEMPTED),
    ("JOB REQUEUE", conditions.REQUEUED),
)
_OF_MPIRUN = (
    r"process rank (?P<rank>\d{1,7}) with PID \d{1,9} on node (?P<node>\S{1,80}) "
)
_SIGNALLED = r"exited on ?signal (?P<signal>\d{1,3})"
MPIRUN = re.compile(rf"{_OF_MPIRUN}(?:{_SIGNALLED}|exiting ?improperly)")
# mpirun's on the first process that failed, in two lines: Open MPI's, and MPICH's
_MPI_PROCESS = re.compile(
    r"Process name: \[(?:\[\d{1,9},\d{1,9}\]|[\w.@\-]{1,200}),(?P<rank>\d{1,7})\]|"
    r"^= {1,8}(?:RANK (?P<of>\d{1,7}) )?PID (?P<pid>\d{1,9}) RUNNING AT (?P<node>\S{1,80})"
)
_MPI_CODE = re.compile(
    r"^(?:\s{1,8}Exit code|= {1,8}EXIT CODE): {1,8}(?P<code>\d{1,3})$|"
    r"^(?:= {1,8}KILLED BY SIGNAL: |.{0,80} EXIT STRING: .{1,80}\(signal )(?P<signal>\d{1,3})"
)
# What programs write when training has come to its end, in good order.
_FINISHED = re.compile(
    r"[Rr]eturning from train|[Tt]raining (?:has |is"
    r" )?(?:finished|completed?|done)|[Ff]inished training|"
    r"`Trainer\.fit` stopped: `max_"
)
_RAY_DIED = re.compile(
    r"(?:ActorDiedError|RayActorError): The actor died |A worker died or was killed"
)
_RAY_PID = re.compile(r"^\s{0,16}pid: (\d{1,9})$|Worker PID: (\d{1,9})")
_RAY_BY_DESIGN = re.compile(
    r"Worker exit type: (?:INTENDED_(?:USER|SYSTEM)_EXIT|USER_ERROR)"
)
_RAY_LINES = 12  # in which the process id and the reason of a death follow
# Of a table's times: torchrun looks at its processes one after the other.
_PATIENCE_S = 5.0


class _End(NamedTuple):
    """A line on the end of a process, or of the job. is_ranks: of a line's rank, the rank's own."""

    pattern: re.Pattern[str]
    kind: str
    text: str
    is_ranks: bool = False


# The first pattern that matches counts.
_ENDS = (
    _End(
        re.compile(
            r"oom[_-]kill event|srun: error: \S{1,80}: tasks? [\d,\-\[\]]{1,200}: Out Of Memory|"
            r"(?:Out of|cgroup out of) memory: Killed process|exceeded (?:job )?memory limit|"
            r"killed due to memory pressure|"
            r"worker was killed due to the node running low on memory|"
            r"^TERM_MEMLIMIT|low on resource: memory|OOMKilled"
        ),
        conditions.KILLED,
        conditions.FOR_MEMORY + ": {line}",
    ),
    _End(
        re.compile(r"Unexpected bus error encountered in worker\. This might be"),
        conditions.KILLED,
        "a data loader's worker: bus error, as for want of shared memory (/dev/shm)",
        is_ranks=True,
    ),
    _End(
        re.compile(
            r"(?P<how>DataLoader worker \(pid[^)]{1,80}\) is killed by signal:"
            r" (?!Terminated).{0,200})"
        ),
        conditions.RAISED,
        "RuntimeError: {how}",
        is_ranks=True,
    ),
    _End(
        re.compile(
            r"^Fatal Python error: (?P<how>Segmentation fault|Bus error|"
            r"Illegal instruction|Floating-point exception)"
        ),
        conditions.KILLED,
        "{how}",
        is_ranks=True,
    ),
    _End(DEEPSPEED, "", "DeepSpeed's launcher"),
    _End(
        re.compile(r": line \d{1,9}: {1,8}(?P<process>\d{1,9}) Killed {2,40}\S"),
        conditions.KILLED,
        "SIGKILL of process {process}, says the shell",
    ),
    _End(re.compile(_OF_MPIRUN + _SIGNALLED), "", "mpirun, of node {node}"),
    _End(
        MPIRUN, conditions.FAILED, "it exited improperly, says mpirun, of node {node}"
    ),
    _End(
        re.compile(
            r"(?:MPI_ABORT was invoked on rank (?=\d{1,7} in communicator MPI_COMM_WORLD)|"
            r"called MPI_Abort\(MPI_COMM_WORLD, -?\d{1,9}\) - process )(?P<rank>\d{1,7})"
        ),
        conditions.FAILED,
        "it called MPI_Abort, says mpirun",
    ),
    _End(
        re.compile(
            r"(?:Exit Code: {2,8}|exitCode\"?: |-\d{1,4} exited with code |"
            r"Process (?:finished|completed) with exit code (?=1[34]\d))(?P<code>\d{1,3})\b"
        ),
        "",
        "what has started its container",
    ),
    _End(
        re.compile(r"died with <Signals\.\w{1,10}: (?P<signal>\d{1,3})>"),
        "",
        "accelerate's launcher",
    ),
    _End(
        re.compile(r"Remote daemon: .{1,200} on node (?P<node>\S{1,200})"),
        conditions.NODE,
        "mpirun lost the connection to node {node}",
    ),
    _End(
        re.compile(r"srun: error: Node failure on (?P<node>\S{1,200})"),
        conditions.NODE,
        "Slurm: node failure on {node}",
    ),
    _End(
        re.compile(
            r"(?:srun|slurmstepd): error: (?P<why>"
            r"(?:(?:Task|Application) launch |execve\(\): ).{1,200})"
        ),
        conditions.FAILED,
        "Slurm could not start it: {why}",
    ),
    _End(
        re.compile(
            r"\[rank: (?P<local>\d{1,7})\] Child process with PID (?P<pid>\d{1,9})"
            r" terminated with code (?P<code>-?\d{1,3})\."
        ),
        "",
        "Lightning, of local rank {local} (pid {pid})",
    ),
    _End(
        re.compile(
            r"ProcessExitedException: (?P<how>process \d{1,7} terminated with signal"
            r" SIG(?:KILL|BUS|SEGV))"
        ),
        conditions.KILLED,
        "torch.multiprocessing: {how}",
    ),
    _End(
        re.compile(
            r"ProcessExitedException: (?P<how>process \d{1,7} terminated with exit code"
            r" \d{1,3})"
        ),
        conditions.FAILED,
        "torch.multiprocessing: {how}",
    ),
    _End(
        re.compile(r"Received (?:Signals\.)?(?:15|SIGTERM) death signal, shutting"),
        conditions.TERMINATED,
        "torchrun got SIGTERM",
    ),
    _End(
        re.compile(r"Received (?:Signals\.)?\w{1,10} death signal, shutting"),
        conditions.TERMINATED,
        "torchrun got a signal to end",
    ),
)


class _Failure(NamedTuple):
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
        self._entry: dict[str, str] = {}  # of the table, as far as it has been read
        self._table: list[_Failure] = []
        # Ranks in the table: their later lines are of a later launch.
        self.ended: set[int] = set()
        self._failed: list[tuple[re.Match[str], Line]] = []
        # Files and pids of processes that torchrun ended, as others had failed.
        self._sent: set[tuple[str, str]] = set()
        # Files that tell that the scheduler has ended the job.
        self._cancelled: set[str] = set()
        self._ray: Line | None = None  # a death whose process id may follow
        self._ray_lines = 0
        self._mpi_rank: int | None = None  # whose exit code may follow
        # By SIGTERM, says srun; Slurm's reason may follow.
        self._terminated: list[tuple[Condition, Line]] = []
        self._is_requeued = False
        self._saw_srun = False  # srun has told of a task's end
        # Tasks that srun tells to be out of memory: ranks, unless torchrun has started these.
        self._out_of_memory: dict[int, Line] = {}
        self._saw_torchrun = False
        # The last that tells of an end in good order.
        self._finished: Line | None = None

    @property
    def is_requeued(self) -> bool:
        """Whether Slurm has ended all of it, to start it again."""
        return self._is_requeued and self._saw_srun

    def take(self, line: Line) -> bool:
        """Whether a row knows the line."""
        if " : " in line.text and (found := _OF_TABLE.search(line.text)):
            self._take_table(found, line)
        if "rain" in line.text and _FINISHED.search(line.text):
            self._finished = line
        if told := _OUT_OF_MEMORY.search(line.text):
            self._out_of_memory |= dict.fromkeys(ranks_in(told["tasks"]), line)
        self._saw_torchrun |= "elastic" in line.text or "torchrun" in line.text
        is_known = self._take_end(line)
        self._take_ray(line)
        return is_known

    def _take_end(self, line: Line) -> bool:
        for pattern, take in _READERS:
            if found := pattern.search(line.text):
                take(self, found, line)
                return True
        for end in _ENDS:
            if found := end.pattern.search(line.text):
                # Where the rank has a prefix its traceback tells it
                if not (end.is_ranks and line.has_prefix):
                    self._take_condition(end, found.groupdict(""), line)
                return True
        return False

    def _take_condition(self, end: _End, told: dict[str, str], line: Line) -> None:
        words = {name: shown(text) for name, text in told.items()}
        text = end.text.format(**words, line=shown(line.text))
        condition: Condition | None = Condition(end.kind, text)
        if code := told.get("code"):
            condition = _condition_of(_signed(code), text)
        elif signal := told.get("signal"):
            condition = _condition_of(-int(signal), text)
        elif end.kind in (conditions.TERMINATED, conditions.NODE):
            self._tell_at_once(end.kind, text, line)
            return
        rank = int(told.get("rank", line.rank if end.is_ranks else NOT_TOLD))
        self._tell(
            condition, line, self._rank_of(told["pid"]) if "pid" in told else rank
        )

    def _tell_at_once(self, kind: str, text: str, line: Line) -> None:
        """So with a time."""
        self._found.add(NOT_TOLD, Condition(kind, text), line, own=False)

    def _take_failed(self, found: re.Match[str], line: Line) -> None:
        if len(self._failed) < MOST_KEPT:
            self._failed.append((found, line))

    def _take_sent(self, found: re.Match[str], line: Line) -> None:
        if len(self._sent) < MOST_KEPT:
            self._sent.add((line.file, found[1] or found[2]))

    def _take_mpi(self, found: re.Match[str], line: Line) -> None:
        rank = self._rank_of(found["pid"])
        self._mpi_rank = int(found["rank"] or found["of"] or rank)

    def _take_mpi_code(self, found: re.Match[str], line: Line) -> None:
        code = _signed(found["code"] or "0") or -int(found["signal"] or "0")
        if code in _MPICH_SIGNALS and line.text.startswith("="):
            code = -code
        if self._mpi_rank is not None:
            self._tell(_condition_of(code, "mpirun"), line, self._mpi_rank)

    def _take_cancelled(self, found: re.Match[str], line: Line) -> None:
        self._cancelled.add(line.file)
        scheduler = found.lastgroup or ""
        why = found[scheduler].removeprefix("PBS: ")
        reason = next((reason for words, reason in _REASONS if words in why), "")
        self._is_requeued |= reason == conditions.REQUEUED
        text = f"{scheduler}: {shown(why)}"
        if "NODE FAIL" in why:
            self._tell_at_once(conditions.NODE, text, line)
        else:
            text = f"{reason}; {text}" if reason else text
            self._tell_at_once(conditions.TERMINATED, text, line)

    def _take_srun(self, found: re.Match[str], line: Line) -> None:
        self._saw_srun = True
        if line.file in self._cancelled:
            return
        task = f"task {found[2]} on {shown(found[1])}"
        if found[3]:
            text = f"Slurm's {task}: {found[3]}"
            self._tell(Condition(conditions.KILLED, text), line)
        elif found[5] == "Terminated":
            text = f"SIGTERM, says Slurm, of {task}"
            self._terminated.append((Condition(conditions.TERMINATED, text), line))
        else:
            code = -6 if found[5] else _signed(found[4])
            told = _condition_of(code, f"Slurm, of {task}")
            if told is not None and found[4] and code < 0:
                # A program, or a shell, ended by such a code: srun names real signals
                how = f"exit code {found[4]} ({_SIGNALS[-code]})"
                told = Condition(told.kind, f"{how}, says Slurm, of {task}")
            self._tell(told, line)

    def _take_table(self, found: re.Match[str], line: Line) -> None:
        told = self._entry
        told |= {name: text for name, text in found.groupdict().items() if text}
        if found["rank"]:
            self._found.several_hosts |= found["rank"] != found["local"]
        if not found["code"] or "rank" not in told or len(self._table) >= MOST_KEPT:
            return
        rank, code, pid = int(told["rank"]), _signed(told["code"]), int(told["pid"])
        at, host = _seconds(told.get("time", "")), shown(told.get("host", ""))
        self.ended.add(rank)
        self._table.append(_Failure(rank, code, pid, at, host, line))
        self._entry = {}

    def _rank_of(self, pid: str) -> int:
        return self._found.rank_of_pid.get(int(pid or "0"), NOT_TOLD)

    def _tell(
        self,
        condition: Condition | None,
        line: Line,
        rank: int = NOT_TOLD,
        at: float = 0.0,
        clock: str = CLOCK,
    ) -> None:
        """Of a process that ended after training had, an end is no cause."""
        if condition is None:
            return
        finished = self._finished
        is_after = finished is not None and finished.file == line.file
        if finished is not None and is_after and not self._found.is_over:
            text = f"{condition.text}, after training had come to its end [{finished.cite}]"
            condition = Condition(conditions.FAILED, text)
        fact = Fact(rank, condition, line.cite, at, clock if at else "", own=False)
        self._found.keep(fact, line.local_rank)

    def _take_ray(self, line: Line) -> None:
        """Ray tells of a worker's death in several lines."""
        if _RAY_DIED.search(line.text):
            self._end_ray("")
            self._ray, self._ray_lines = line, _RAY_LINES
        if self._ray is None:
            return
        if _RAY_BY_DESIGN.search(line.text):
            self._ray = None
        elif pid := _RAY_PID.search(line.text):
            self._end_ray(pid[1] or pid[2])
        elif self._ray_lines <= 0:
            self._end_ray("")
        self._ray_lines -= 1

    def _end_ray(self, pid: str) -> None:
        line, self._ray = self._ray, None
        if line is not None:
            process = f" (pid {pid})" if pid else ""
            text = f"Ray: a worker{process} died: killed, out of memory, or crashed"
            died = Condition(conditions.DIED, text)
            at = float(line.number)  # it tells at once
            self._tell(died, line, self._rank_of(pid), at, line.file)

    def finish(self) -> None:
        self._end_ray("")
        self._finish_out_of_memory()
        for condition, line in self._terminated:
            if line.file not in self._cancelled:
                self._tell(condition, line)
        first = min(
            (one.at for one in self._table if one.at and one.code != -15), default=0.0
        )
        for one in self._table:
            member, cite = Member(pid=one.pid), one.line.cite
            self._found.keep(Fact(one.rank, member, cite, host=one.host, own=False))
            self._tell(self._of_table(one, first), one.line, one.rank, one.at)
        known = {one.pid for one in self._table}
        for failed, line in self._failed:
            if int(failed["pid"]) not in known:
                who = f"torchrun, of local rank {failed['local']} (pid {failed['pid']})"
                told = _condition_of(_signed(failed["code"]), who)
                self._tell(told, line, self._rank_of(failed["pid"]))

    def _finish_out_of_memory(self) -> None:
        """Where srun has started the ranks themselves, its tasks are the ranks."""
        size = self._found.world_size
        if self._saw_torchrun or not size > 1 or not self._out_of_memory:
            return
        if max(self._out_of_memory) >= size:
            return
        for rank, line in self._out_of_memory.items():
            text = f"{conditions.FOR_MEMORY}: {shown(line.text)}"
            self._tell(Condition(conditions.KILLED, text), line, rank)
        self._found.leave_out_not_told(conditions.FOR_MEMORY)

    def leave_out_woken(self) -> None:
        """Slurm wakes a stopped rank to end it: that rank then meets closed connections, of ranks
        that stall_exit has ended, and was no less silent before.
        """
        facts = self._found.facts
        exits = {
            fact.rank
            for fact in facts.values()
            if fact.condition_text == conditions.STALL_EXIT
        }
        silent = {
            fact.rank
            for fact in facts.values()
            if fact.condition_kind == conditions.SILENT
        }
        for rank in silent - exits if exits else ():
            facts.pop((rank, Condition, conditions.CUT, ""), None)

    def _of_table(self, one: _Failure, first: float) -> Condition | None:
        later = one.at > first + _PATIENCE_S
        of_others = {pid for file, pid in self._sent if file == one.line.file}
        was_sent = str(one.pid) in of_others
        if one.code == -9 and (was_sent or later):
            return Condition(
                conditions.TERMINATED, "SIGKILL by its launcher, as others had failed"
            )
        if one.code == -15 and of_others and not was_sent:
            return Condition(conditions.TERMINATED, conditions.FROM_OUTSIDE)
        return _condition_of(one.code, "torchrun")


# The first pattern that matches counts.
_READERS: tuple[
    tuple[re.Pattern[str], Callable[[LauncherLines, re.Match[str], Line], None]], ...
] = (
    (FAILED_LINE, LauncherLines._take_failed),
    (_SENT, LauncherLines._take_sent),
    (_SRUN, LauncherLines._take_srun),
    (_MPI_PROCESS, LauncherLines._take_mpi),
    (_MPI_CODE, LauncherLines._take_mpi_code),
    (_CANCELLED, LauncherLines._take_cancelled),
)


def _condition_of(code: int, who: str) -> Condition | None:
    """By the exit code. A crash (SIGSEGV) may also be how a rank ends that others have left."""
    if code == 0:
        return None
    name = _SIGNALS.get(-code, "")
    text = f"{name or f'exit code {code}'}, says {who}"
    if code == STALL_EXIT:
        return Condition(conditions.ABORTED, f"{conditions.STALL_EXIT}, {text}")
    if -code in _BY_OTHERS:
        return Condition(conditions.TERMINATED, text)
    if -code in _BY_NOBODY_ELSE:
        return Condition(conditions.KILLED, text)
    return Condition(conditions.ABORTED if code == -6 else conditions.FAILED, text)


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
