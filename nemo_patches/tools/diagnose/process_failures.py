"""Processes that failed, as a log tells: torchrun's table of failures, exceptions, and kills for want of memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nemo_patches.channel.safe_text import safe
from nemo_patches.stall.rank_text import named
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding
from nemo_patches.tools.diagnose.process_end import is_of_a_collective

FAILED = "log-first-failure"
RAISED = "log-exception"
OUT_OF_MEMORY = "log-out-of-memory"

_MOST_KEPT = 4096
_TIME = re.compile(r"\btime      : (\d[\w:.-]{1,40})")
_RANK = re.compile(r"\brank      : (\d{1,7}) \(local_rank")
_EXIT_CODE = re.compile(r"\bexitcode  : (-?\d{1,9}) \(pid: (\d{1,9})\)")
LAUNCHER_LINE = re.compile(
    r"failed ?\(exitcode: ?(-?\d{1,9})\) ?local_rank: ?(\d{1,7}) ?\(pid: ?(\d{1,9})\)"
)  # a terminal may have wrapped it at a blank
_ENDED_BY = {-9: "SIGKILL", -6: "SIGABRT", -7: "SIGBUS", -11: "SIGSEGV", -15: "SIGTERM", -2: "SIGINT", -1: "SIGHUP"}
_STALL_EXIT = 83
_MAY_HAVE_WAITED = (-6, _STALL_EXIT)  # so NCCL's watchdog, and stall_exit, end a rank that waits for another one
_TOLD_TO_END = (-15, -2, -1)
# torch puts its prefix before each line of a traceback that ends a process, and one blank before the last of them.
_EXCEPTION = re.compile(
    r"\[rank(\d{1,7})\]: ((?:[A-Za-z_]\w{0,80}\.){0,8}\w{0,80}(?:Error|Exception))(?:: (.{0,300})|$)"
)
_WATCHDOG_ERROR = re.compile(
    r"Rank (\d{1,7})\].{0,40} thread terminated with exception: (CUDA error: .{1,200}?)(?:CUDA kernel|$)"
)
# Of Slurm, the kernel and Ray; each has words of its own, and none tells the rank.
_OUT_OF_MEMORY = re.compile(
    r"oom_kill event|srun: error: \S{1,80}: tasks? [\d,\-\[\]]{1,200}: Out Of Memory|Out of memory: Killed process \d+|"
    r"Memory cgroup out of memory|worker was killed due to the node running low on memory|killed due to memory pressure"
)
# Other ranks, or SIGTERM, bring these about; torchrun and the scheduler send it to all that are left.
_OF_OTHERS = re.compile(r"Detected mismatch|killed by signal: Terminated|SIGTERMException|SignalException")


@dataclass(frozen=True)
class Failure:
    """A process that torchrun saw fail. rank: -1 if it tells only the rank on its host."""

    rank: int
    local_rank: int
    code: int
    pid: int
    time: str = ""  # to the second, by its host's clock
    first: bool = False  # of its table

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.rank >= 0 else f"a process (local rank {self.local_rank})"


@dataclass
class ProcessFailures:
    """Those of a log. Each node's torchrun writes a table of its own, in which the failure seen first comes last."""

    table: list[Failure] = field(default_factory=list)
    in_lines: list[Failure] = field(default_factory=list)
    raised: dict[int, tuple[str, str]] = field(default_factory=dict)  # by rank the first type and message
    out_of_memory: list[str] = field(default_factory=list)  # lines that tell of a kill for it
    _title: bool = False  # that of the first failure was read, and its entry was not
    _time: str = ""
    _rank: int = -1

    def take(self, line: str) -> None:
        """Read what a line tells of torchrun's table, or of a kill for want of memory."""
        self._title = self._title or "first observed failure" in line
        if time := _TIME.search(line):
            self._time = time[1]
        if rank := _RANK.search(line):
            self._rank = int(rank[1])
        if (code := _EXIT_CODE.search(line)) and self._rank >= 0 and len(self.table) < _MOST_KEPT:
            self.table.append(Failure(self._rank, -1, _ended(code[1]), int(code[2]), self._time, self._title))
            self._title, self._time, self._rank = False, "", -1
        if _OUT_OF_MEMORY.search(line) and len(self.out_of_memory) < 8:
            self.out_of_memory.append(safe(line.strip())[:300])
        if (failed := LAUNCHER_LINE.search(line)) and len(self.in_lines) < _MOST_KEPT:
            self.in_lines.append(Failure(-1, int(failed[2]), _ended(failed[1]), int(failed[3])))

    def take_exception(self, line: str, prefixed_rank: int) -> None:
        """Read an exception that ended a rank. Only for lines before the first one that tells of an end."""
        if (error := _EXCEPTION.search(line)) and not _OF_OTHERS.search(line):
            if not is_of_a_collective(error[2], line) and len(self.raised) < _MOST_KEPT:
                self.raised.setdefault(int(error[1]), (safe(error[2]), safe(error[3] or "")))
        elif (error := _WATCHDOG_ERROR.search(line)) and len(self.raised) < _MOST_KEPT:
            rank = prefixed_rank if prefixed_rank >= 0 else int(error[1])
            self.raised.setdefault(rank, ("CUDA error", safe(error[2].partition(": ")[2])))

    def killed_for_memory(self) -> Finding | None:
        """What the scheduler or the kernel tell of it."""
        if not self.out_of_memory:
            return None
        return Finding(
            id=OUT_OF_MEMORY,
            severity=CRITICAL,
            ranks=(),
            text=f"The log tells of a kill for want of memory: {self.out_of_memory[0]}",
            next_step="Give the job more host memory, or use less: data loader workers, caches, pinned memory. Which "
            "process was killed, the host's `dmesg` tells; ranks that time out after it waited for it.",
            evidence=tuple(self.out_of_memory),
        )

    def raised_first(self) -> Finding | None:
        """The first exception, and the ranks that have the same."""
        if not self.raised:
            return None
        kind, message = next(iter(self.raised.values()))
        ranks = tuple(sorted(rank for rank, (other, _) in self.raised.items() if other == kind))
        return Finding(
            id=RAISED,
            severity=CRITICAL,
            ranks=ranks[:64],
            text=f"{named(ranks).capitalize()} failed: {kind}{f': {message}' if message else ''}",
            next_step="Mend what the traceback above that line shows. Time-outs of other ranks after it may only be "
            "those that waited for this one.",
            evidence=tuple(f"rank {rank}: {kind}: {text}" for rank, (kind, text) in list(self.raised.items())[:8]),
        )

    def failed_first(self, waited: bool) -> Finding | None:
        """The failure that torchrun saw first. waited: the log tells of ranks that waited for others."""
        failures = self.table or self.in_lines
        if not failures:
            return None
        firsts = [failure for failure in failures if failure.first] or failures
        first = min(firsts, key=lambda failure: failure.time)
        same_time = {one.rank for one in failures if first.time and one.time == first.time and one.code != -15}
        at_once = sorted({first.rank} | same_time)
        by = f"by {_ENDED_BY[first.code]}" if first.code in _ENDED_BY else f"with exit code {first.code}"
        how = "by stall_exit (83)" if first.code == _STALL_EXIT else by
        text = f"torchrun saw {first} fail first, {how} (pid {first.pid})."
        may_have_waited = first.code in _MAY_HAVE_WAITED or (waited and first.code == 1)
        if len(at_once) > 1:
            text = f"torchrun saw {named(at_once)} fail in the same second, {first} {how}: which was first, it does "
            text += "not tell."
        elif len(firsts) > 1 and first.time:
            text = f"{text[:-1]}, of {len(firsts)} tables, by their hosts' clocks."
        if may_have_waited:
            text += " It may be one that waited: a rank ends so when a collective's time limit has passed."
        elif first.code in _TOLD_TO_END:
            text += " Somebody else ended it: a user, the scheduler, or another node's launcher."
        told = not may_have_waited and first.code not in _TOLD_TO_END and len(at_once) == 1 and first.rank >= 0
        return Finding(
            id=FAILED,
            severity=WARNING if waited else CRITICAL,
            ranks=(first.rank,) if told else (),
            text=text,
            next_step="Look for an out-of-memory kill on its host (`dmesg`, the scheduler's log)."
            if first.code == -9
            else "Look at the end of that rank's stderr.",
        )


def _ended(code: str) -> int:
    """Minus a signal's number, as torchrun has it. Of a rank that a shell script started, it has 128 and the number."""
    return 128 - int(code) if 128 - int(code) in _ENDED_BY else int(code)
