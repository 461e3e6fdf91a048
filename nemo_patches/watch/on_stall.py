"""Runs on_stall, the user's command, as no child of this process:
the user's own os.wait() never gets it.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import threading
import time

from ..channel import signals
from ..channel.daemon import Daemon
from ..text import first_line
from .log_line import report

_LIMIT_S = 60.0
_SHELL = "/bin/sh"
# The shell ends at once, within milliseconds. What it has left behind runs the command, gives it
# the shell's standard input, and writes its exit code to the file whose number is $0.
_SCRIPT = 'exec 3<&0; { "$@" <&3 3<&-; echo $? >"/proc/self/fd/$0"; } &'


def start(command: str, text: str) -> threading.Thread | None:
    """Run it in a thread, with this text on its standard input. What fails is logged; None: no
    thread can start.
    """
    thread = Daemon("on_stall", _run, command, text)
    if why := thread.begin():
        report(logging.WARNING, f"on_stall={command!r} has failed: {why}")
        return None
    return thread


def _run(command: str, text: str) -> None:
    import shlex  # the setting's reader has done so: at a stall nothing new may be importable

    try:
        how = _ended(shlex.split(command), text.encode())
    except Exception as error:
        report(logging.WARNING, f"on_stall={command!r} has failed: {first_line(error)}")
        return
    if how:
        report(logging.WARNING, f"on_stall={command!r} {how}")


def _ended(command: list[str], data: bytes) -> str:
    """How the command has ended, if not well. Raises OSError where it cannot start."""
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(f"{command[0]!r} is no program that can be run here")
    ends_at = time.monotonic() + _LIMIT_S
    exit_code, told_by = os.pipe()
    try:
        try:
            # The command has its signals. Beside the Popen nothing here writes.
            signals.unblock()
            shell = subprocess.Popen(
                [_SHELL, "-c", _SCRIPT, str(told_by), program, *command[1:]],
                stdin=subprocess.PIPE,
                start_new_session=True,
                pass_fds=(told_by,),
            )
        finally:
            signals.block()  # a command that does not read its input ends no process
            os.close(told_by)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It has ended, also if the user's os.wait() got that.
            shell.communicate(data, _LIMIT_S)
        told = _told(exit_code, ends_at)
        if told is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)  # and what it has started
            return f"has been ended after {_LIMIT_S:.0f} s"
    finally:
        os.close(exit_code)
    if told == "0":
        return ""
    return f"has ended with exit code {told}" if told else "was killed"


def _told(exit_code: int, ends_at: float) -> str | None:
    """What the file says; None where it says nothing in time."""
    poll = select.poll()
    poll.register(exit_code, select.POLLIN)
    if not poll.poll(max(1000 * (ends_at - time.monotonic()), 0.0)):
        return None
    return os.read(exit_code, 16).decode().strip()
