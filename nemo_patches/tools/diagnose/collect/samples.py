"""Samples of processes from outside: what /proc shows, and their Python stacks by py-spy.

py-spy stops a process for some 0.1 s. A write() that waits for its reader then returns early:
Python's files continue it, a bare os.write() does not. Of a process's variables only integers named
in _COUNTERS are read: how far its loops are.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nemo_patches.tools.diagnose.collect.frame_source import calls, loop_of
from nemo_patches.tools.diagnose.collect.host_ranks import HostRank, is_python
from nemo_patches.tools.diagnose.collect.proc_files import (
    CLOCK_TICKS_PER_S,
    children,
    link,
    number_in,
    read,
    stat_fields,
    uptime_s,
)

NO_PY_SPY = (
    "py-spy is not installed: `pip install py-spy` (nemo-patches' extra `tools`)"
)
GONE, ZOMBIE = "gone", "Z"
_COUNTERS = {
    "i",
    "j",
    "k",
    "it",
    "iteration",
    "step",
    "batch",
    "batch_idx",
    "batch_nb",
    "global_step",
    "epoch",
    "current_epoch",
    "n_batch",
    "dataloader_idx",
}
_PY_SPY_S = 20.0
_NOT_ALLOWED = re.compile(
    r"permission denied|operation not permitted|ptrace", re.IGNORECASE
)
_AT_ONCE = 8  # processes
_MOST_FRAMES, _MOST_THREADS, _MOST_LOADER_WORKERS = 300, 200, 32
MOST_CHILDREN = 8  # of a process, that are looked at
# Files of the innermost frames of a thread that waits for a child process.
_OF_CHILDREN = re.compile(r"(^|/)(subprocess\.py|multiprocessing/|concurrent/futures/)")
_STANDARD = {0: "standard input", 1: "standard output", 2: "standard error"}
_DRIVERS = ("libcuda.so", "libamdhip64.so")


class _SystemCalls(NamedTuple):
    """Numbers of system calls. of_file: those whose first argument is an open file: read, recvfrom,
    flock and the like.
    of_child: wait4 (whose first argument is the child) and waitid.
    """

    of_file: frozenset[str]
    open: str
    openat: str
    futex: str
    of_child: tuple[str, ...] = ()


_SYSTEM_CALLS = {
    "x86_64": _SystemCalls(
        frozenset(("0", "1", "17", "18", "19", "20", "44", "45", "73", "74", "75")),
        "2",
        "257",
        "202",
        ("61", "247"),
    ),
    "aarch64": _SystemCalls(
        frozenset(("32", "63", "64", "65", "66", "67", "68", "82", "83", "206", "207")),
        "",
        "56",
        "98",
        ("260", "95"),
    ),
}.get(platform.machine(), _SystemCalls(frozenset(), "", "", ""))


class Frame(NamedTuple):
    """One frame; a stack has the innermost first."""

    name: str
    file: str
    line: int = 0


@dataclass(frozen=True)
class Thread:
    """counters: of its loops, by "i of train (train.py)". loops: by the same names, where that loop
    begins (frame_source.py).
    calls: names of what the innermost line of Python calls, and "with".
    """

    name: str = ""
    tid: int = 0
    has_gil: bool = False
    frames: tuple[Frame, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    loops: Mapping[str, int] = field(default_factory=dict)
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One look at a process; fields are about its main thread unless they say otherwise.

    state: from /proc, or GONE. uptime_s, ended_s: the host's uptime when the look began and ended.
    slept_s: how long the thread had not run; None if it ran, or if not known. undisturbed_s: how
    long no look had woken it. waits_untimed: in a futex without a time limit. file: that its system
    call is at. tracer: the pid of a debugger. has_gpu: the process has loaded a GPU driver, or this
    is not known. error: why there are no threads. workers: the processes that it has started, if it
    is in its data loader, or waits for a child. name: of the program. written: bytes. waits_for:
    the child that it waits for; -1: any; 0: none.
    """

    pid: int = 0
    state: str = ""
    uptime_s: float = 0.0
    ended_s: float = 0.0
    slept_s: float | None = None
    undisturbed_s: float | None = None
    cpu_s: float = 0.0
    switches: int = 0
    wait_channel: str = ""
    waits_untimed: bool = False
    file: str = ""
    tracer: int = 0
    has_gpu: bool = True
    threads: tuple[Thread, ...] = ()
    error: str = ""
    workers: tuple[Sample, ...] = ()
    name: str = ""
    written: int = 0
    waits_for: int = 0

    @property
    def main(self) -> Thread | None:
        """The main thread: its id is the process's. In a container's namespace ids are others."""
        by_id = [thread for thread in self.threads if thread.tid == self.pid]
        by_name = [thread for thread in self.threads if thread.name == "MainThread"]
        only = self.threads if len(self.threads) == 1 else ()
        return next(iter((*by_id, *by_name, *only)), None)

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The main thread's."""
        return self.main.frames if self.main is not None else ()


def take(
    ranks: Sequence[HostRank], before: Mapping[int, Sample] | None = None
) -> dict[int, Sample]:
    """A sample of each rank, by its pid. before: the samples taken last."""
    offset = _clock_offset()

    def of_rank(rank: HostRank) -> Sample:
        last = (before or {}).get(rank.pid)
        return _of_rank(rank, offset, last)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(
            zip((rank.pid for rank in ranks), pool.map(of_rank, ranks), strict=True)
        )


def py_spy() -> str:
    """The path of py-spy; empty if it is not installed."""
    folders = (
        os.environ.get("PATH", os.defpath),
        os.path.dirname(sys.executable),
        os.path.expanduser("~/.local/bin"),
    )
    return shutil.which("py-spy", path=os.pathsep.join(folders)) or ""


def _of_rank(rank: HostRank, offset: float | None, last: Sample | None) -> Sample:
    taken = _process(rank.pid, offset)
    if last is not None and last.threads:  # py-spy stopped it, which woke its threads
        taken = replace(taken, undisturbed_s=taken.uptime_s - last.ended_s)
    if not any("utils/data/dataloader.py" in frame.file for frame in taken.frames):
        return _with_children(taken, offset)
    workers = (
        _with_children(_process(pid, offset), offset)
        for pid in rank.workers[:_MOST_LOADER_WORKERS]
    )
    return replace(taken, workers=tuple(workers))


def _with_children(taken: Sample, offset: float | None) -> Sample:
    """Add samples of the child processes that it waits for; for a shell, of the shell's
    children.
    """
    innermost = taken.frames[:6]
    if not taken.waits_for and not any(
        _OF_CHILDREN.search(frame.file) for frame in innermost
    ):
        return taken
    rest = [taken.waits_for] if taken.waits_for > 0 else children(taken.pid)
    found = list[Sample]()
    while rest and len(found) < MOST_CHILDREN:
        pid = rest.pop(0)
        if below := children(pid):
            rest = [*below, *rest]
        else:
            found.append(
                _process(pid, offset) if is_python(pid) else _kernels(pid, offset)
            )
    return replace(taken, workers=tuple(found))


def _process(pid: int, offset: float | None) -> Sample:
    """/proc first: py-spy wakes the threads. A stopped, traced or dead process is not stopped by
    py-spy.
    """
    taken = _kernels(pid, offset)
    if taken.state in (GONE, ZOMBIE):
        return taken
    threads, error = _threads(pid, is_held=taken.tracer > 0 or taken.state in "TtD")
    return replace(taken, threads=threads, error=error, ended_s=uptime_s())


def _clock_offset() -> float | None:
    """The uptime minus the scheduler's clock, which se.exec_start uses."""
    ran = _exec_start_s(os.getpid())
    return None if ran is None else uptime_s() - ran


def _exec_start_s(pid: int) -> float | None:
    """When it was last scheduled, by the scheduler's clock."""
    found = number_in(read(f"/proc/{pid}/task/{pid}/sched"), "se.exec_start")
    return None if found is None else found / 1000


def _kernels(pid: int, offset: float | None) -> Sample:
    main = stat_fields(f"/proc/{pid}/task/{pid}/stat")
    if len(main) < 20:
        return Sample(pid, GONE)
    ran, now = _exec_start_s(pid), uptime_s()
    is_known = ran is not None and offset is not None and main[0] != "R"
    system_call = read(f"/proc/{pid}/task/{pid}/syscall").split()
    status = read(f"/proc/{pid}/task/{pid}/status")
    return Sample(
        pid=pid,
        state=main[0],
        uptime_s=now,
        slept_s=max(0.0, now - (ran or 0.0) - (offset or 0.0)) if is_known else None,
        cpu_s=(int(main[11]) + int(main[12])) / CLOCK_TICKS_PER_S,
        switches=int(number_in(status, "voluntary_ctxt_switches") or 0),
        wait_channel=read(f"/proc/{pid}/task/{pid}/wchan"),
        waits_untimed=len(system_call) > 4
        and system_call[0] == _SYSTEM_CALLS.futex
        and system_call[4] == "0x0",
        file=_file_of_call(pid, system_call),
        tracer=int(number_in(status, "TracerPid") or 0),
        name=read(f"/proc/{pid}/comm").strip(),
        written=int(number_in(read(f"/proc/{pid}/task/{pid}/io"), "wchar") or 0),
        waits_for=_child_of_call(system_call),
        has_gpu=not (maps := read(f"/proc/{pid}/maps"))
        or any(driver in maps for driver in _DRIVERS),
    )


def _child_of_call(call: Sequence[str]) -> int:
    if len(call) < 3 or call[0] not in _SYSTEM_CALLS.of_child:
        return 0
    first, second = int(call[1], 16), int(call[2], 16)
    pid = (
        first
        if call[0] == _SYSTEM_CALLS.of_child[0]
        else second
        if first == os.P_PID
        else 0
    )
    return pid if 0 < pid < 1 << 31 else -1


def _file_of_call(pid: int, call: Sequence[str]) -> str:
    """The file, pipe or connection of its read() or write(), or the path of its open()."""
    if len(call) < 3:
        return ""
    number, first, second = call[:3]
    if number in _SYSTEM_CALLS.of_file:
        descriptor = int(first, 16)
        path = link(f"/proc/{pid}/fd/{descriptor}")
        if path.startswith("socket:"):
            return "a connection"
        return (
            f"its {_STANDARD[descriptor]} ({path})" if descriptor in _STANDARD else path
        )
    if number not in (_SYSTEM_CALLS.open, _SYSTEM_CALLS.openat):
        return ""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(int(first if number == _SYSTEM_CALLS.open else second, 16))
            return os.fsdecode(memory.read(4096).partition(b"\0")[0])
    except (OSError, OverflowError):
        return ""


def _threads(pid: int, is_held: bool) -> tuple[tuple[Thread, ...], str]:
    """Its threads' stacks, or the reason why there are none."""
    program = py_spy()
    if not program:
        return (), NO_PY_SPY
    command = [program, "dump", "--json", "--locals", "--pid", str(pid)]
    if is_held:  # it cannot be stopped once more, or not in time
        command.append("--nonblocking")
    try:
        for _ in range(2):  # it may meet the stack while that changes
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PY_SPY_S,
            )
            if not done.returncode or _NOT_ALLOWED.search(done.stderr):
                break
        if done.returncode:
            return (), _why_not(pid, done.stderr)
        found = json.loads(done.stdout)
        return tuple(thread_of(pid, thread) for thread in found[:_MOST_THREADS]), ""
    except subprocess.TimeoutExpired:
        return (), f"py-spy had no stack of it within {_PY_SPY_S:.0f} s"
    except OSError as error:
        return (), f"{program} cannot be run: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return (), "what py-spy said cannot be read"


def _why_not(pid: int, said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reason = lines[0] if lines else "py-spy failed"
    if not _NOT_ALLOWED.search(said):
        return reason[:200]
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "its process has gone"
    if not os.geteuid():
        return (
            "ptrace is not allowed here, not even to root: start the container with"
            " `--cap-add SYS_PTRACE`, or run this from its host"
        )
    if owner != os.geteuid():
        return f"it is user {owner}'s: run this as that user, or as root"
    if read("/proc/sys/kernel/yama/ptrace_scope").strip() not in ("", "0"):
        return (
            "this host allows ptrace to root only: run this as root, or `sysctl"
            " kernel.yama.ptrace_scope=0`"
        )
    return (
        "ptrace is not allowed here: run this as root, in a container with `--cap-add"
        " SYS_PTRACE`, or from its host"
    )


def thread_of(pid: int, told: Mapping[str, Any]) -> Thread:
    frames = told["frames"][:_MOST_FRAMES]
    counters, loops = dict[str, int](), dict[str, int]()
    for frame in reversed(frames):
        function, file = frame["name"], frame["filename"]
        # torch.multiprocessing.spawn()'s "i"
        is_rank = function in ("_wrap", "start_processes")
        for variable in () if is_rank else frame.get("locals") or ():
            name, value = variable["name"], variable.get("repr") or ""
            if name not in _COUNTERS or not re.fullmatch(r"\d{1,12}", value):
                continue
            title = (
                f"{name} of {function.rpartition('.')[2]} ({os.path.basename(file)})"
            )
            counters[title] = int(value)
            line = loop_of(pid, file, frame["line"], name)
            if line is not None:
                loops[title] = line
    return Thread(
        name=told.get("thread_name") or "",
        tid=told.get("os_thread_id") or 0,
        has_gil=bool(told.get("owns_gil")),
        frames=tuple(
            Frame(frame["name"], frame["filename"], frame["line"]) for frame in frames
        ),
        counters=counters,
        loops=loops,
        calls=calls(pid, frames[0]["filename"], frames[0]["line"]) if frames else (),
    )
