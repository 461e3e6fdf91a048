"""Ends of processes, as launchers, schedulers and the kernel tell them.

Those are torchrun, DeepSpeed, Ray, Slurm, mpirun. Their lines' patterns are in rows.py.
"""

from __future__ import annotations

import calendar
import re
import time
from dataclasses import dataclass, field, replace

from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.rank_end import STALL_EXIT
from nemo_patches.tools.diagnose.rank_facts import (
    NOT_TOLD,
    Condition,
    Fact,
    ProcessRank,
)
from nemo_patches.tools.diagnose.sources.hearsay_lines import Steps
from nemo_patches.tools.diagnose.sources.lines import MOST_KEPT, Line, ranks_in, shown
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts
from nemo_patches.tools.diagnose.sources.rows import Row

# In place of a host: times in their tables are to the second, so hosts' clocks are taken to agree
CLOCK = "launchers"
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
# Of what it gives as its reason: how the job ended.
_REASONS = (
    ("TIME LIMIT", conditions.TIME_LIMIT),
    ("RUNLIMIT", conditions.TIME_LIMIT),
    ("walltime", conditions.TIME_LIMIT),
    ("PREEMPT", conditions.PREEMPTED),
    ("JOB REQUEUE", conditions.REQUEUED),
)
_KILLED_BY_LAUNCHER = Condition(
    conditions.TERMINATED, "SIGKILL by its launcher, as others had failed"
)
_FOR_MEMORY_BY_RAY = re.compile(
    r"\b(?P<count>\d{1,4}) Workers .{0,60}killed due to memory pressure.{0,200}"
    r"\bIP: (?P<at>[\d.]{7,15})"
)
_AT_WORK = "while executing a task"  # by Ray's agent, of workers that a job's end takes down, too
_RAY_LINES = 16  # in which the process id and the reason of a death follow
_LINES_OF_A_SUMMARY = 3  # of unittest: how many tests, and how they went
# Of a table's times: torchrun looks at its processes one after the other.
_PATIENCE_S = 5.0


@dataclass
class _Meeting:
    """The rendezvous of torchrun's agents, one a node. least: how many must come; names: of the
    job's nodes; came: by name, srun's task or NOT_TOLD; containers: by task, what was last told of
    its one; over: a line that says that one waited in vain.
    """

    least: int = 0
    names: list[str] = field(default_factory=list)
    came: dict[str, int] = field(default_factory=dict)
    containers: dict[int, Line] = field(default_factory=dict)
    over: Line | None = None

    def text(self) -> str:
        """Empty where all have come, or how many must is not told."""
        came = sorted(self.came)
        if not 0 < len(came) < self.least:
            return ""
        text = f"{conditions.AT_START}: {len(came)} of {self.least} nodes had come to torchrun's "
        text += f"rendezvous ({shown(', '.join(came))})"
        short = {name.partition(".")[0] for name in came}
        nodes = [one for one in self.names if one not in short]
        if len(self.names) == self.least and len(nodes) == self.least - len(came):
            text += f", and {shown(', '.join(nodes))} had not"
        tasks = sorted(set(range(self.least)) - {*self.came.values()})
        if len(tasks) == self.least - len(came):
            text += f"; srun's {'task' if len(tasks) == 1 else 'tasks'} "
            text += f"{', '.join(map(str, tasks))} did not come"
            for line in filter(None, map(self.containers.get, tasks[:1])):
                text += f', and told last "{shown(line.text)}" [{line.cite}]'
        return text


def _names_in(hosts: str) -> list[str]:
    """ "n1-[031-032,047]" as Slurm writes it; at most MOST_KEPT."""
    before, _, numbers = hosts.rpartition("[")
    before = before.rpartition(",")[2]
    names: list[str] = []
    for first, last in re.findall(r"(\d{1,7})(?:-(\d{1,7}))?", numbers):
        count = min(int(last or first) - int(first) + 1, MOST_KEPT)
        names += [f"{before}{int(first) + one:0{len(first)}}" for one in range(count)]
    return names[:MOST_KEPT]


class LauncherLines:
    """One launch's lines. Each node's torchrun writes its own table, with the first failure
    last.
    """

    def __init__(self, found: LaunchFacts) -> None:
        self._found = found
        self._entry: dict[str, str] = {}  # of the table, as far as it has been read
        self._table: list[tuple[dict[str, str], Line]] = []
        # Ranks in the table: their later lines are of a later launch.
        self.ended: set[int] = set()
        self._failed: list[tuple[re.Match[str], Line]] = []
        # Files and pids of processes that torchrun ended, as others had failed.
        self._sent: set[tuple[str, str]] = set()
        # Files that tell that the scheduler has ended the job.
        self._cancelled: set[str] = set()
        self._ray: Line | None = None  # a death whose process id may follow
        self._ray_pid = ""
        self._ray_rank = NOT_TOLD
        self._ray_signal = ""  # of others
        self._per_node = 0  # ranks, by the configuration
        self._ray_died: list[tuple[int, str]] = []  # ranks, and the lines that tell it
        # The last file in which a watch of the job's own tells of a hang; steps since then
        self._hung_in = ""
        self._steps = Steps()
        self._mpi_rank: int | None = None  # whose exit code may follow
        # By SIGTERM, says srun; Slurm's reason may follow.
        self._terminated: list[tuple[str, Line]] = []
        self._is_requeued = False
        self._saw_srun = False  # srun has told of a task's end
        self._has_stalled = False  # by stall_exit
        # Tasks that srun tells to be out of memory: ranks, unless torchrun has started these.
        self._out_of_memory: dict[int, Line] = {}
        self._saw_torchrun = False
        # Tasks of which lines say that they are the ranks of the same number, and others.
        self._tasks_of_ranks: set[int] = set()
        self._has_other_tasks = False
        self._nodes = 0  # by DeepSpeed's launcher
        self._local_ranks: dict[int, int] = {}  # by pid, of its processes
        # The last that tells of an end in good order.
        self._finished: Line | None = None
        # By file, the number of the line that tells so of the whole job
        self._succeeded: dict[str, int] = {}
        self._tests_at = (
            -_LINES_OF_A_SUMMARY
        )  # number of unittest's line that says how many there were
        self._meeting = _Meeting()
        self._states: dict[str, str] = {}  # by id, of jobs and steps: sacct's last

    @property
    def is_finished(self) -> bool:
        """Whether training has come to its end."""
        return self._finished is not None

    @property
    def has_succeeded(self) -> bool:
        """Whether that is told of the whole job, and nothing is left that came after it."""
        return bool(self._succeeded) and not self._found.tells_anything

    @property
    def is_requeued(self) -> bool:
        """Whether Slurm has ended all of it, to start it again."""
        return self._is_requeued and self._saw_srun

    @property
    def is_to_start_again(self) -> bool:
        """Whether Slurm has begun to end it for that: ranks may still write."""
        return self._is_requeued

    def is_cancelled(self, file: str) -> bool:
        """Whether the scheduler has ended the job, by what the file has so far."""
        return file in self._cancelled

    def take_end(self, row: Row, found: re.Match[str], line: Line) -> None:
        if row.of_rank and line.has_prefix and "orker" in found[0]:
            return  # its traceback tells it
        told = found.groupdict("")
        words = {name: shown(text) for name, text in told.items()}
        text = row.text.format(**words, line=shown(line.text)).strip()
        rank = int(told.get("rank", line.rank if row.of_rank else NOT_TOLD))
        if told.get("pid"):
            rank = self._rank_of(told["pid"])
        if code := told.get("code") or told.get("signal"):
            signed = _signed(code) if "code" in told else -int(code)
            self._tell(_condition_of(signed, text), line, rank)
        elif row.kind in (conditions.TERMINATED, conditions.NODE):
            self._tell_at_once(row.kind, text, line)
        else:
            self._tell(Condition(row.kind, text), line, rank)

    def take_hang(self, found: re.Match[str], line: Line) -> None:
        self._hung_in = line.file
        self._steps.begin()

    def take_step(self, text: str) -> None:
        if self._hung_in and self._steps.go_on(text):
            self._hung_in = ""

    def take_finished(self, found: re.Match[str], line: Line) -> None:
        self._end_ray()  # it died before this
        self._finished = line

    def take_tests(self, found: re.Match[str], line: Line) -> None:
        self._tests_at = line.number

    def take_tests_passed(self, found: re.Match[str], line: Line) -> None:
        if 0 < line.number - self._tests_at <= _LINES_OF_A_SUMMARY:
            self.take_succeeded(found, line)

    def take_succeeded(self, found: re.Match[str], line: Line) -> None:
        self._end_ray()
        self._succeeded[line.file] = line.number

    def leave_out_overcome(self) -> None:
        """Leave out what is told before its launcher tells that the whole job has ended well, and
        threads that ended after training had.
        """
        done = self._finished

        def is_overcome(fact: Fact) -> bool:
            file, _, number = fact.cite.rpartition(":")
            if done and fact.condition_kind == conditions.THREAD and file == done.file:
                return int(number) > done.number
            is_end = bool(fact.condition_kind) or fact.entry is not None
            return is_end and int(number) < self._succeeded.get(file, 0)

        self._found.leave_out(is_overcome)

    def take_rendezvous(self, found: re.Match[str], line: Line) -> None:
        meeting = self._meeting
        task = int(found["task"] or line.local_rank)
        if found["node"] and len(meeting.came) < MOST_KEPT:
            meeting.came[found["node"]] = task
        elif found["least"]:
            meeting.least = int(found["least"])
        elif found["list"]:
            meeting.names = _names_in(found["list"])
        elif found["over"]:
            meeting.over = meeting.over or line

    def take_container(self, found: re.Match[str], line: Line) -> None:
        if len(self._meeting.containers) < MOST_KEPT:
            told = line._replace(text=found["what"])
            self._meeting.containers[int(found["task"])] = told

    def _finish_meeting(self) -> None:
        over = self._meeting.over
        if over and (text := self._meeting.text()):
            self._found.add(NOT_TOLD, Condition(conditions.WAITED, text), over)

    def take_accounting(self, found: re.Match[str], line: Line) -> None:
        if len(self._states) < MOST_KEPT:
            self._states[found["id"]] = found["state"]

    def take_tasks_out_of_memory(self, told: re.Match[str], line: Line) -> None:
        self._out_of_memory |= dict.fromkeys(ranks_in(told["tasks"]), line)

    def take_label(self, found: re.Match[str], line: Line) -> None:
        self.note_task(int(found["task"] or line.local_rank), int(found["rank"]))

    def note_task(self, task: int, rank: int) -> None:
        """Of a line of srun -l: whether its task is the rank that the line tells."""
        if 0 <= task == rank and len(self._tasks_of_ranks) < MOST_KEPT:
            self._tasks_of_ranks.add(task)
        elif task >= 0:
            self._has_other_tasks = True

    def take_nodes(self, found: re.Match[str], line: Line) -> None:
        self._nodes = max(self._nodes, int(found["nodes"]))

    def take_spawned(self, found: re.Match[str], line: Line) -> None:
        if len(self._local_ranks) < MOST_KEPT:
            self._local_ranks[int(found["pid"])] = int(found["local"])

    def take_by_torchrun(self, found: re.Match[str], line: Line) -> None:
        self._saw_torchrun = True

    def _tell_at_once(self, kind: str, text: str, line: Line) -> None:
        """So with a time."""
        self._found.add(NOT_TOLD, Condition(kind, text), line, own=False)

    def take_failed(self, found: re.Match[str], line: Line) -> None:
        if len(self._failed) < MOST_KEPT:
            self._failed.append((found, line))

    def take_sent(self, found: re.Match[str], line: Line) -> None:
        if len(self._sent) < MOST_KEPT:
            self._sent.add((line.file, found[1] or found[2]))

    def take_mpi(self, found: re.Match[str], line: Line) -> None:
        rank = self._rank_of(found["pid"])
        self._mpi_rank = int(found["rank"] or found["of"] or rank)

    def take_mpi_code(self, found: re.Match[str], line: Line) -> None:
        code = _signed(found["code"] or "0") or -int(found["signal"] or "0")
        if code in _MPICH_SIGNALS and line.text.startswith("="):
            code = -code
        if self._mpi_rank is not None:
            self._tell(_condition_of(code, "mpirun"), line, self._mpi_rank)

    def take_cancelled(self, found: re.Match[str], line: Line) -> None:
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

    def take_srun(self, found: re.Match[str], line: Line) -> None:
        self._saw_srun = True
        if line.file in self._cancelled:
            return
        task = f"task {found[2]} on {shown(found[1])}"
        if found[3] and self._has_stalled:
            # With --kill-on-bad-exit, after KillWait: a stopped task, or one that handles SIGTERM.
            text = f"SIGKILL, says Slurm, of {task}, after stall_exit"
            self._terminated.append((text, line))
        elif found[3]:
            text = f"Slurm's {task}: {found[3]}"
            ranks = ranks_in(found[2]) if self._tasks_are_ranks else [NOT_TOLD]
            for rank in ranks:
                self._tell(Condition(conditions.KILLED, text), line, rank)
        elif found[5] == "Terminated":
            self._terminated.append((f"SIGTERM, says Slurm, of {task}", line))
        else:
            code = -6 if found[5] else _signed(found[4])
            self._has_stalled |= code == STALL_EXIT
            told = _condition_of(code, f"Slurm, of {task}")
            if told is not None and found[4] and code < 0:
                # A program, or a shell, ended by such a code: srun names real signals
                how = f"exit code {found[4]} ({_SIGNALS[-code]})"
                told = Condition(told.kind, f"{how}, says Slurm, of {task}")
            self._tell(told, line)

    @property
    def _tasks_are_ranks(self) -> bool:
        """Whether srun has started the ranks themselves, as far as lines show."""
        if self._saw_torchrun or self._has_other_tasks:
            return False
        return len(self._tasks_of_ranks) > 1

    def take_table(self, found: re.Match[str], line: Line) -> None:
        told = self._entry
        told |= {name: text for name, text in found.groupdict().items() if text}
        if found["rank"]:
            self._found.several_hosts |= found["rank"] != found["local"]
        if found["code"] and "rank" in told and len(self._table) < MOST_KEPT:
            self.ended.add(int(told["rank"]))
            self._found.note_pid(int(told["pid"]), int(told["rank"]))
            self._table.append((told, line))
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
        done = self._end_before(line)
        if done is not None and not self._found.is_over:
            if condition.kind == conditions.TERMINATED:
                return
            text = f"{condition.text}, after training had come to its end [{done.cite}]"
            condition = Condition(conditions.FAILED, text)
        elif condition.kind == conditions.FAILED and self._hung_in == line.file:
            # By that watch, whichever rank it is in
            condition = replace(condition, kind=conditions.ABORTED)
        clock = clock if at else ""
        self._found.note(Fact(rank, condition, line.cite, at, clock, own=False), line)

    def _end_before(self, line: Line) -> Line | None:
        """The line that tells the end of training in good order, if that was before."""
        done = self._finished
        is_after = done and done.file == line.file and done.number <= line.number
        return done if is_after else None

    def take_ray_death(self, found: re.Match[str], line: Line) -> None:
        self._end_ray()
        self._ray = line

    def take_ray_by_design(self, found: re.Match[str], line: Line) -> None:
        if self._is_of_ray(line):
            self._ray = None

    def take_ray_pid(self, pid: re.Match[str], line: Line) -> None:
        if self._is_of_ray(line):
            self._ray_pid = self._ray_pid or pid[1] or pid[2]

    def take_per_node(self, found: re.Match[str], line: Line) -> None:
        self._per_node = int(found[1])

    def take_ray_name(self, found: re.Match[str], line: Line) -> None:
        """verl names a worker by its node and its number there: "Ab3WorkerDict_1:3"."""
        node, number = int(found[1]), int(found[2])
        if self._is_of_ray(line) and number < self._per_node:
            self._ray_rank = node * self._per_node + number

    def take_ray_signal(self, found: re.Match[str], line: Line) -> None:
        if self._is_of_ray(line):
            self._ray_signal = found[1]

    def _is_of_ray(self, line: Line) -> bool:
        """Whether the line is one of those in which Ray goes on."""
        return self._ray is not None and line.number - self._ray.number <= _RAY_LINES

    def _end_ray(self) -> None:
        line, pid, signal = self._ray, self._ray_pid, self._ray_signal
        by_name, self._ray_rank = self._ray_rank, NOT_TOLD
        self._ray, self._ray_pid, self._ray_signal = None, "", ""
        if line is None or (_AT_WORK in line.text and self._end_before(line)):
            return
        process = f" (pid {pid})" if pid else ""
        died = Condition(conditions.DIED, f"{conditions.UNTOLD}{process}")
        if signal:
            text = f"{signal}, says Ray, of a worker{process}"
            died = Condition(conditions.TERMINATED, text)
        at = float(line.number)  # it tells at once
        rank = self._rank_of(pid)
        rank = by_name if rank == NOT_TOLD else rank
        self._tell(died, line, rank, at, line.file)
        if not signal and len(self._ray_died) < MOST_KEPT:
            self._ray_died.append((rank, line.text))

    def _finish_ray(self) -> None:
        """Ray counts the workers that a node's agent killed for memory: those that died there."""
        for key, fact in [*self._found.facts.items()]:
            text = self._found.texts.get(fact.cite, "")
            counted = _FOR_MEMORY_BY_RAY.search(text) if fact.rank == NOT_TOLD else None
            if counted is None:
                continue
            at = rf"\b(?i:ip|address): {re.escape(counted['at'])}(?![.\d])"
            ranks = {rank for rank, text in self._ray_died if re.search(at, text)}
            if NOT_TOLD in ranks or len(ranks) != int(counted["count"]):
                continue
            del self._found.facts[key]
            for rank in ranks:
                self._found.facts.pop((rank, Condition, conditions.DIED, ""), None)
                self._found.keep(replace(fact, rank=rank))

    def finish(self) -> None:
        self._end_ray()
        self._finish_ray()
        self._finish_meeting()
        self._finish_out_of_memory()
        if self._nodes == 1:
            for pid, rank in self._local_ranks.items():
                self._found.note_pid(pid, rank)
        self._found.tell_ranks_of_killed()
        self._leave_out_killed_by_mpirun()
        for text, line in self._terminated:
            if line.file not in self._cancelled:
                self._tell(Condition(conditions.TERMINATED, text), line)
        self._finish_table()
        known = {told["pid"] for told, _ in self._table}
        for failed, line in self._failed:
            if failed["pid"] not in known:
                who = f"torchrun, of local rank {failed['local']} (pid {failed['pid']})"
                end = _condition_of(_signed(failed["code"]), who)
                self._tell(end, line, self._rank_of(failed["pid"]))
        # Started again since, and completed
        if set(self._states.values()) == {"COMPLETED"}:
            self._found.leave_out(_is_end_by_scheduler)

    def _leave_out_killed_by_mpirun(self) -> None:
        """It ends the others by SIGKILL, and tells of them alike."""
        told = [
            fact
            for fact in self._found.facts.values()
            if fact.condition_text.endswith(", says mpirun")
        ]
        killed = [fact for fact in told if fact.condition_text.startswith("SIGKILL")]
        if len(killed) < len(told):
            self._found.leave_out(killed.__contains__)
            for fact in killed:
                self._found.keep(replace(fact, value=_KILLED_BY_LAUNCHER))

    def _finish_table(self) -> None:
        times = {line: _seconds(told.get("time", "")) for told, line in self._table}
        first = min(
            (
                times[line]
                for told, line in self._table
                if times[line] and told["code"] != "-15"
            ),
            default=0.0,
        )
        for told, line in self._table:
            rank, code, pid = int(told["rank"]), _signed(told["code"]), told["pid"]
            host, at = shown(told.get("host", "")), times[line]
            member = ProcessRank(pid=int(pid))
            self._found.keep(Fact(rank, member, line.cite, host=host, own=False))
            of_others = {one for file, one in self._sent if file == line.file}
            end = _condition_of(code, "torchrun")
            if code == -9 and (pid in of_others or at > first + _PATIENCE_S):
                end = _KILLED_BY_LAUNCHER
            elif code == -15 and of_others and pid not in of_others:
                end = Condition(conditions.TERMINATED, conditions.FROM_OUTSIDE)
            self._tell(end, line, rank, at)

    def _finish_out_of_memory(self) -> None:
        """Where srun has started the ranks themselves, its tasks are the ranks."""
        last = max(self._out_of_memory, default=self._found.world_size)
        is_one = not self._saw_torchrun and last < self._found.world_size
        if not self._out_of_memory or not (is_one or self._tasks_are_ranks):
            return
        for rank, line in self._out_of_memory.items():
            text = f"{conditions.FOR_MEMORY}: {shown(line.text)}"
            self._tell(Condition(conditions.KILLED, text), line, rank)
        self._found.leave_out_kills_for_memory()

    def leave_out_woken(self) -> None:
        """Slurm wakes a stopped rank to end it: that rank then meets closed connections, of ranks
        that stall_exit has ended, and was no less silent before.
        """
        facts = [*self._found.facts.values()]
        exits = {
            one.rank for one in facts if one.condition_text == conditions.STALL_EXIT
        }
        silent = {one.rank for one in facts if one.condition_kind == conditions.SILENT}
        for rank in silent - exits if exits else ():
            self._found.facts.pop((rank, Condition, conditions.CUT, ""), None)


def _is_end_by_scheduler(fact: Fact) -> bool:
    kinds = (conditions.TERMINATED, conditions.NODE)
    return fact.rank == NOT_TOLD and fact.condition_kind in kinds


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
