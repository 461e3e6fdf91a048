"""Files of /proc, each of which may be gone or closed at any moment."""

from __future__ import annotations

import os
import re

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LONGEST = 1 << 22  # bytes


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


def stat_fields(path: str) -> list[str]:
    """What follows the name in a stat file: the state, the parent, ...; none where there is no such process."""
    return read(path).rpartition(")")[2].split()


def process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def variables(pid: int) -> dict[str, str]:
    pairs = (text.partition("=") for text in read(f"/proc/{pid}/environ").split("\0"))
    return {name: value for name, _, value in pairs if name}


def uptime_s() -> float:
    return float(read("/proc/uptime").split()[0])


def number_in(text: str, label: str) -> float | None:
    """Of a line such as "se.exec_start   :   1234.5"."""
    found = re.search(rf"^{re.escape(label)}\s*:\s*([\d.]+)", text, re.MULTILINE)
    return float(found[1]) if found else None
