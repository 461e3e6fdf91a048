"""How this process ends: exceptions that nobody catches, and SIGTERM; what others have put there for them stays."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any


class ExceptionHooks:
    """sys.excepthook and, if asked for, threading.excepthook: call `told`, then the hook that was there before."""

    def __init__(self, told: Callable[[BaseException, str], None], threads: bool) -> None:
        """told: gets the exception and its thread's name; no name where the process ends by it."""
        self._told = told
        self._previous, self._previous_of_threads = sys.excepthook, threading.excepthook
        self._own, self._own_of_threads = self._of_process, self._of_thread  # a method is a new object each time
        sys.excepthook = self._own
        if threads:
            threading.excepthook = self._own_of_threads

    def remove(self) -> None:
        """Put back what was there, unless somebody's hook is around ours: then ours stays, and only passes on."""
        self._told = lambda *_: None
        if sys.excepthook is self._own:
            sys.excepthook = self._previous
        if threading.excepthook is self._own_of_threads:
            threading.excepthook = self._previous_of_threads

    def _of_process(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        try:
            self._told(error, "")
        finally:
            self._previous(kind, error, trace)

    def _of_thread(self, failed: threading.ExceptHookArgs) -> Any:
        try:
            if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
                self._told(failed.exc_value, failed.thread.name if failed.thread is not None else "a thread")
        finally:
            self._previous_of_threads(failed)


class SigtermNote:
    """Has SIGTERM write the stack of the thread that it comes to into a file, then go on to whom it went before.

    A Python handler would take somebody's place, and wait for the training thread to come back from C code.
    faulthandler's runs at once, and then calls the handler that was there, or ends the process as if there were none.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._handler = signal.getsignal(signal.SIGTERM)
        faulthandler.register(signal.SIGTERM, file=self._descriptor, all_threads=False, chain=True)

    def move_to(self, descriptor: int) -> None:
        """Another file from now on."""
        os.dup2(descriptor, self._descriptor, inheritable=False)

    def remove(self) -> None:
        """Also in a forked child. Where there is another handler by now, unregister() would take that away."""
        if signal.getsignal(signal.SIGTERM) == self._handler:
            faulthandler.unregister(signal.SIGTERM)
            os.close(self._descriptor)


def can_note_sigterm() -> bool:
    """Whether SIGTERM has a Python handler or none: what is below Python, or ignores it, is left alone."""
    return callable(signal.getsignal(signal.SIGTERM)) or is_free(signal.SIGTERM)


def is_free(number: int) -> bool:
    """Whether nobody handles or ignores this signal, in Python or below."""
    if signal.getsignal(number) != signal.SIG_DFL:
        return False
    try:
        status = Path("/proc/self/status").read_text(errors="replace")  # a process's name may be cut within a letter
        masks = re.findall(r"^Sig(?:Cgt|Ign):\s*(\w+)$", status, re.MULTILINE)
    except OSError:
        return True
    return not any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def exit_in_flight() -> tuple[BaseException | None, int | None]:
    """For a process of multiprocessing's, which ends within the handling of what ended it: that, and the exit code.

    (None, None) elsewhere: an interpreter that ends does not tell how.
    """
    error = sys.exc_info()[1]
    if not isinstance(error, SystemExit):
        return error, 1 if error is not None else None
    code = error.code
    return (error.__context__ if code else None), code if isinstance(code, int) else int(code is not None)
