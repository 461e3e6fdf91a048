"""Tells by which exception this process ends; the hook of others stays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any


class ExceptionHook:
    """sys.excepthook: calls `told`, then the hook that was there before."""

    def __init__(self, told: Callable[[BaseException], None]) -> None:
        self._told = told
        self._previous = sys.excepthook
        self._own = self._hook  # a method is a new object each time
        sys.excepthook = self._own

    def remove(self) -> None:
        """Put back what was there; inside somebody's hook ours stays, and only passes on."""
        self._told = lambda _: None
        if sys.excepthook is self._own:
            sys.excepthook = self._previous

    def _hook(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> Any:
        try:
            self._told(error)
        finally:
            self._previous(kind, error, trace)


def exit_in_flight() -> tuple[BaseException | None, int | None]:
    """For a process of multiprocessing's, which ends within the handling of what ended it: that,
    and the exit code.

    (None, None) elsewhere: an interpreter that ends does not tell how.
    """
    error = sys.exc_info()[1]
    if not isinstance(error, SystemExit):
        return error, 1 if error is not None else None
    code = error.code
    return (error.__context__ if code else None), code if isinstance(
        code, int
    ) else int(code is not None)
