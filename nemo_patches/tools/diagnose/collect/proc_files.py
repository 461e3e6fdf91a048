"""Files of /proc, each of which may be gone or closed at any moment."""

from __future__ import annotations

import os
import re

# Windows, which has no /proc either.
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
CLOCK_SLACK_S = 2.0  # of started_at: the kernel tells of the boot in whole seconds
_LONGEST = 1 << 22  # bytes
_PIDS_OF_A_HOST = "pid:[4026531836]"  # the first pid namespace, on every Linux


def read(path: str) -> str:
    """Empty where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return os.fsdecode(file.read(_LONGEST))
    except OSError:
        return ""


def link(path: str) -> str:
    """Where it leads to; empty where that cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def seen_by(pid: int, path: str) -> str:
    """The file that this process has at that path: a container, and a job of Slurm's, may have a
    /tmp of its own.
    """
    theirs = f"/proc/{pid}/root{path}"
    try:
        return path if os.path.samefile(path, theirs) else theirs
    except OSError:
        return theirs if os.path.exists(theirs) else path


def stat_fields(path: str) -> list[str]:
    """The fields after the name in a stat file: state, parent, ...; empty if there is no such
    process.
    """
    return read(path).rpartition(")")[2].split()


def process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def has_own_pids() -> bool:
    """Whether this is a container: on its host other processes have the pids that are seen here."""
    return link("/proc/self/ns/pid") not in ("", _PIDS_OF_A_HOST)


def pid_here(pid: int, namespace: str) -> int:
    """How a container's process is called here, by the number of its pid namespace; 0: it is not
    seen.
    """
    for each in process_ids():
        if link(f"/proc/{each}/ns/pid") == f"pid:[{namespace}]":
            found = re.search(r"^NSpid:.*\b(\d+)$", read(f"/proc/{each}/status"), re.M)
            if found and int(found[1]) == pid:
                return each
    return 0


def children(pid: int) -> list[int]:
    """The processes that its threads have started; empty if the kernel does not list them."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [
        int(child)
        for thread in threads
        for child in read(f"/proc/{pid}/task/{thread}/children").split()
    ]


def variables(pid: int) -> dict[str, str]:
    pairs = (text.partition("=") for text in read(f"/proc/{pid}/environ").split("\0"))
    return {name: value for name, _, value in pairs if name}


def uptime_s() -> float:
    return float(read("/proc/uptime").split()[0])


def number_in(text: str, label: str) -> float | None:
    """Of a line such as "se.exec_start   :   1234.5"."""
    found = re.search(rf"^{re.escape(label)}\s*:\s*([\d.]+)", text, re.MULTILINE)
    return float(found[1]) if found else None


def started_at(pid: int) -> float:
    """When the process has started, in seconds since 1970; 0 if that is not known."""
    fields = stat_fields(f"/proc/{pid}/stat")
    booted = number_in(read("/proc/stat").replace("btime ", "btime: "), "btime")
    return (
        booted + int(fields[19]) / CLOCK_TICKS_PER_S
        if booted and len(fields) > 19
        else 0.0
    )
