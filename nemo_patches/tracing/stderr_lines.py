"""A trace for people: one line before and one after each encoder call, on stderr."""

from __future__ import annotations

import sys
import time

from nemo_patches.text import safe
from nemo_patches.tracing.records import Encoder, Enter, Header, Leave, Lengths, Raised, Record


class StderrLines:
    """Takes the place of PartFiles where trace is "-"."""

    file = None

    def __init__(self, header: Header) -> None:
        self.header = header
        self._names: dict[int, str] = {}
        self._lengths = ""  # of the call that is open, once they are known
        self._lines: list[str] = []

    def begin(self) -> None:
        pass

    def add(self, record: Record) -> None:
        """Take the next record; most kinds have no line."""
        if isinstance(record, Encoder):
            self._names[record.e] = record.name
        elif isinstance(record, Lengths):
            self._lengths = f", lengths {record.shortest} to {record.longest}"
        elif isinstance(record, Enter):
            self._lengths = ""
            kind = "training" if record.training else "evaluation"
            signal = f"{record.shape} {record.dtype} on {record.device}" if record.dtype else "no tensor"
            self._say(record, f"begins: {kind}, signal {signal}, lengths' shape {record.lengths_shape}")
        elif isinstance(record, Leave):
            self._say(record, f"is done: output {record.shape}{self._lengths}, {record.took:.3f} s")
        elif isinstance(record, Raised):
            self._say(record, f"has raised {record.type}: {record.message[:200]}")

    def _say(self, record: Enter | Leave | Raised, text: str) -> None:
        header, now = self.header, time.strftime("%H:%M:%S")
        who = f"rank {header.rank}/{header.world_size} {header.host}"
        name = self._names.get(record.e, "encoder")
        self._lines.append(safe(f"{now} nemo_patches [{who}] {name}: call {record.n} {text}"))

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            try:
                print("\n".join(lines), file=sys.stderr, flush=True)
            except ValueError as error:  # it is closed
                raise OSError(0, str(error), "stderr") from None

    def close(self) -> None:
        pass

    def leave_sigterm(self) -> None:
        pass
