"""The incidents that nemo_patches logged in a run: encoder calls to which some rank came too late."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_patches.text import named
from nemo_patches.tools.demo import logs
from nemo_patches.tools.demo.jobs import RunOutcome

_WAITED = re.compile(
    r"\w+: (\w+ call \d+): not every rank's length came within ([\d.]+) s; .*Missing: (ranks? [\d, -]+) of"
)
_RECOVERED = re.compile(r"\w+: recovered: .* came ([\d.]+) s late")
_FRAMES = 2  # of a place, innermost first


@dataclass
class _Incident:
    call: str
    missing: str
    place: str  # of the first missing rank, as the log has it
    waited_s: dict[int, float] = field(default_factory=dict)  # by the rank that waited
    late_s: float = 0.0

    def __str__(self) -> str:
        waited = f"{named(sorted(self.waited_s))} waited at most {max(self.waited_s.values()):.1f} s"
        own = "its own length" if len(self.waited_s) == 1 else "their own lengths"
        came = f"; {self.missing} came {self.late_s:.1f} s late" if self.late_s else ""
        return f"{self.call}: {waited} for {self.missing}, then went on with {own}{came}"


def logged(run: RunOutcome) -> Iterator[tuple[str, str]]:
    """For each incident: a sentence about it, and where the missing rank was."""
    incidents: dict[str, _Incident] = {}
    for rank in run.ranks:
        last: _Incident | None = None
        for line in logs.warnings(rank.job.log):
            if waited := _WAITED.search(line):
                call, seconds, missing = waited.groups()
                place = line.partition(" | ")[2].partition(" | ")[0]
                last = incidents.setdefault(call, _Incident(call, missing, _shortened(place)))
                last.waited_s[rank.job.rank] = float(seconds)
            elif last and (recovered := _RECOVERED.search(line)):
                last.late_s = max(last.late_s, float(recovered[1]))
    return ((str(incident), incident.place) for incident in incidents.values())


def _shortened(place: str) -> str:
    frames = re.split(r" < |, in: ", place.partition("; ")[0])
    return " < ".join(frames[:_FRAMES]) + " < ..." * (len(frames) > _FRAMES)
