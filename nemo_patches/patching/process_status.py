"""What `nemo_patches.status()` gives: the state of the patches and of the syncs in this process, and its text."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from nemo_patches.stall.missing_rank import Stall
from nemo_patches.sync.length_sync import EncoderCounters
from nemo_patches.sync.settings import Settings
from nemo_patches.text import named


@dataclass(frozen=True)
class Skipped:
    """A target that is not patched, and why."""

    target: str
    reason: str


@dataclass(frozen=True)
class Status:
    """What nemo_patches does in this process. Prints well.

    state: "on", "off here" or "cannot be". why: for a person, with how to switch it on.
    trace_file: the file that is being written, or why there is none; empty without a trace.
    unannounced: ranks that show no sign of nemo_patches: not patched, or not started.
    stalls: encoder calls that not every rank has come to, with the missing ranks; or a job without encoder calls.
    own_syncs: a sentence for each class that overrides a bounded length sync.
    """

    nemo: str
    torch: str
    patched: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    settings: Settings
    encoders: tuple[EncoderCounters, ...]
    unannounced: tuple[int, ...]
    stalls: tuple[Stall, ...]
    own_syncs: tuple[str, ...] = ()
    trace_file: str = ""
    state: str = "on"
    why: str = ""

    def __str__(self) -> str:
        lines = [
            f"{self.state}: {self.why}",
            f"nemo {self.nemo}, torch {self.torch}",
            f"settings: {self.settings}",
            *([f"trace: {self.trace_file}"] if self.trace_file else []),
            "patched: " + (", ".join(self.patched) or "nothing"),
            *(f"skipped: {skipped.target}: {skipped.reason}" for skipped in self.skipped),
            *self.own_syncs,
            *map(_encoder_line, self.encoders),
        ]
        if self.unannounced:
            lines.append(f"not patched, or not started: {named(self.unannounced)}")
        return "\n".join((*lines, *map(str, self.stalls)))


def _encoder_line(counters: EncoderCounters) -> str:
    return (
        f"{counters.encoder}: {counters.calls} calls, {counters.rounds} rounds, {counters.fallbacks} fallbacks, "
        f"{counters.timeouts} timeouts, waited {counters.waited / timedelta(seconds=1):.3f} s"
        + (f"; ended: {counters.ended}" if counters.ended else "")
    )
