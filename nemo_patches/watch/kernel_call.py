"""The system call that a thread is in, by Linux: for calls of C, which have no frame."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import NamedTuple

_TASKS = Path("/proc/self/task")
_NAMES: dict[int, str] = {
    "x86_64": {
        0: "read",
        2: "open",
        7: "poll",
        16: "ioctl",
        23: "select",
        24: "sched_yield",
        61: "wait4",
        202: "futex",
        232: "epoll_wait",
        247: "waitid",
        257: "openat",
        270: "pselect6",
        271: "ppoll",
        281: "epoll_pwait",
    },
    "aarch64": {
        22: "epoll_pwait",
        29: "ioctl",
        56: "openat",
        63: "read",
        72: "pselect6",
        73: "ppoll",
        95: "waitid",
        98: "futex",
        124: "sched_yield",
        260: "wait4",
    },
}.get(platform.machine(), {})
_FOR_FILES = {"poll", "select", "epoll_wait", "pselect6", "ppoll", "epoll_pwait"}
_FOR_DEVICES = {"", "futex", "ioctl", "poll", "ppoll", "sched_yield"}
_FOR_CHILDREN = {"wait4", "waitid"}
_ANY_CHILD = 0xFFFFFFFF  # -1 as an int
# What standard input is where somebody may write to it.
_ASKED_AT = ("/dev/", "pipe:", "socket:")


class KernelCall(NamedTuple):
    """name: empty where the thread runs, or where it cannot be told; "another" where it is of no
    interest here.
    """

    name: str = ""
    first: int = 0  # argument
    second: int = 0

    @property
    def opened(self) -> int:
        """The address of the path of the file that it opens; 0 where it opens none."""
        if self.name == "openat":
            return self.second
        return self.first if self.name == "open" else 0

    @property
    def waits_for_files(self) -> bool:
        """For any of several: sockets, pipes."""
        return self.name in _FOR_FILES

    @property
    def may_wait_for_a_device(self) -> bool:
        """Or for another thread: not for a file, a time or a process."""
        return self.name in _FOR_DEVICES

    @property
    def waits_for_child(self) -> bool:
        return self.name in _FOR_CHILDREN

    @property
    def waits_for_any_child(self) -> bool:
        if self.name == "waitid":
            return self.first == os.P_ALL
        return self.name == "wait4" and self.first & _ANY_CHILD == _ANY_CHILD

    @property
    def reads_standard_input(self) -> bool:
        """At a terminal, by a select() of this one file."""
        if (self.name, self.first) not in (("read", 0), ("select", 1), ("pselect6", 1)):
            return False
        with contextlib.suppress(OSError):
            return os.readlink("/proc/self/fd/0").startswith(_ASKED_AT)
        return False


def kernel_call(native_thread: int) -> KernelCall:
    """native_thread: the kernel's number of it."""
    return call_in(_TASKS / str(native_thread))


def call_in(thread: Path) -> KernelCall:
    """thread: the kernel's folder of one, or of a process for its main thread."""
    with contextlib.suppress(OSError, ValueError):
        number, *arguments = (thread / "syscall").read_text().split()
        if arguments and not number.startswith("-"):
            first, second = (int(argument, 16) for argument in arguments[:2])
            return KernelCall(_NAMES.get(int(number), "another"), first, second)
    return KernelCall()  # "running"; the thread has ended; no file left to read with


def waits_for_any_child() -> bool:
    """Whether a thread of this process is in os.wait(): it would get whatever child of this process
    ends.
    """
    threads: list[str] = []
    with contextlib.suppress(OSError):
        threads = os.listdir(_TASKS)
    return any(kernel_call(int(thread)).waits_for_any_child for thread in threads)
