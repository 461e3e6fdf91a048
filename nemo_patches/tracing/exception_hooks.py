"""Reports the exception that ends this process, or one of its threads; other hooks stay."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
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


def exit_in_flight() -> tuple[BaseException | None, int | None]:
    """For a process of multiprocessing's, which ends within the handling of what ended it: that, and the exit code.

    (None, None) elsewhere: an interpreter that ends does not tell how.
    """
    error = sys.exc_info()[1]
    if not isinstance(error, SystemExit):
        return error, 1 if error is not None else None
    code = error.code
    return (error.__context__ if code else None), code if isinstance(code, int) else int(code is not None)
