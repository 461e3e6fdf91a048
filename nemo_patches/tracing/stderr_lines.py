"""A trace for people: one line before and one after each encoder call, on stderr."""

from __future__ import annotations

import sys
import time

from nemo_patches.text import safe
from nemo_patches.tracing.records import Enter, Header, Leave, Raised, Timed


class StderrLines:
    """Takes the place of a TraceFile where trace is "-"."""

    file = None

    def __init__(self, header: Header) -> None:
        self.header = header
        self._entered: dict[str, float] = {}  # by encoder, when its open call began
        self._lines: list[str] = []

    def begin(self) -> None:
        pass

    def add(self, record: Timed) -> bool:
        """Take the next record; most kinds have no line."""
        if isinstance(record, Enter):
            self._entered[record.e] = record.t
            kind = "training" if record.training else "evaluation"
            signal = (
                f"{record.shape} {record.dtype} on {record.device}"
                if record.dtype
                else "no tensor"
            )
            self._say(record, f"begins: {kind}, signal {signal}")
        elif isinstance(record, Leave):
            took_s = record.t - self._entered.get(record.e, record.t)
            self._say(record, f"is done: output {record.shape}, {took_s:.3f} s")
        elif isinstance(record, Raised) and record.e:
            self._say(record, f"has raised {record.type}: {record.message[:200]}")
        return True

    def _say(self, record: Enter | Leave | Raised, text: str) -> None:
        header = self.header
        now = time.strftime("%H:%M:%S")
        who = f"rank {header.rank}/{header.world_size} {header.host}"
        self._lines.append(
            safe(f"{now} nemo_patches [{who}] {record.e}: call {record.n} {text}")
        )

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            print("\n".join(lines), file=sys.stderr, flush=True)
        except ValueError as error:  # it is closed
            raise OSError(0, str(error), "stderr") from None

    def close(self) -> None:
        pass
