"""What the demo shows while it runs: one live line on a terminal, elsewhere a plain line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status
from rich.text import Text

PLAIN_LINE_EVERY_S = 5.0


class ProgressLine:
    """The line that says what is going on."""

    def __init__(self, console: Console, status: Status | None) -> None:
        self._console = console
        self._status = status
        self._next_line = 0.0

    def update(self, text: str) -> None:
        if self._status:
            self._status.update(Text(text, no_wrap=True, overflow="ellipsis"))
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_LINE_EVERY_S
            self.say(text)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(f"... {text}", style="dim"), soft_wrap=True)


@contextlib.contextmanager
def progress(console: Console, text: str) -> Iterator[ProgressLine]:
    """Shown while the block runs, starting with the text."""
    with console.status("") if console.is_terminal else contextlib.nullcontext() as status:
        shown = ProgressLine(console, status)
        shown.update(text)
        yield shown
