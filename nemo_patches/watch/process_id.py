"""Which process has written something, so that a reader sees whether it still runs."""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_PIDS_OF_A_HOST = "4026531836"  # the first pid namespace, on every Linux


def own_process() -> dict[str, Any]:
    """By which a reader sees whether this process still runs: a pid means another one on another
    machine or later. attempt: torchrun's count, which differs between nodes.
    """
    return {
        "pid": os.getpid(),
        "started": started(os.getpid()),
        "machine": machine(),
        "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
    }


def machine() -> str:
    """This boot of this machine, and the pid namespace; empty where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def is_of_container(machine: str) -> bool:
    """Whether a pid of this machine is a container's, and on its host another process has it."""
    namespace = machine.rpartition(" ")[2]
    return namespace.isdecimal() and namespace != _PIDS_OF_A_HOST


def started(pid: int) -> int:
    """In clock ticks since the machine's boot; 0: there is no such process, or it has ended."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def stat_fields(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on: proc(5) calls that field 3. Raises
    OSError if there is none, or the kernel does not say.
    """
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()
