"""Faults that a job survived: exceptions of encoder calls that were caught."""

from __future__ import annotations

from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.alignment import Clocks
from nemo_patches.tools.diagnose.case import Case
from nemo_patches.tools.diagnose.findings import WARNING, Finding
from nemo_patches.tools.diagnose.rank_end import error_of
from nemo_patches.tracing.records import Raised

_NEXT_CAUGHT = (
    "Look for what caught it: that rank left a step out, and its memory may be in disorder (an out-of-memory error "
    "that was swallowed)."
)


def caught_exceptions(case: Case) -> list[Finding]:
    """The first exception of an encoder call after which training went on."""
    raises: list[tuple[float, Raised, int]] = []
    for rank, track in case.tracks.items():
        trace, ending = case.job.traces[rank], case.endings[rank]
        if not trace.mixed and not ending.unsure:  # else the record may be another rank's
            raises += [
                (case.clocks.common_or_own(rank, raised.t), raised, rank)
                for raised in trace.raised
                if raised.e == track.name
                and not (ending.raised and ending.call == raised.n)
                and not error_of(raised).is_of_a_collective
            ]
    if not raises:
        return []
    raised, rank = _first(raises, case.clocks)
    error = error_of(raised)
    ranks = sorted({rank for _, _, rank in raises})
    evidence = (*_tail(raised.traceback), f"exceptions in all: {len(raises)}, on {named(ranks)}")
    text = f"rank {rank} raised {safe(error.type)} in call {raised.n} of {case.name}, and training went on after it: "
    text += _one_line(error.message)
    return [Finding(ids.CAUGHT, WARNING, (rank,), text, _NEXT_CAUGHT, case.name, raised.n, evidence=evidence)]


def _one_line(message: str) -> str:
    return safe(message.strip().splitlines()[0] if message.strip() else "")[:200]


def _tail(traceback: str) -> list[str]:
    return [safe(line) for line in traceback.strip().splitlines()[-4:]]


def _first(faults: list[tuple[float, Raised, int]], scale: Clocks) -> tuple[Raised, int]:
    """The first of (time, record, rank) by time; by call and rank where the ranks' clocks cannot be compared."""
    comparable = all(rank in scale.offsets for _, _, rank in faults)
    _, record, rank = min(faults, key=lambda fault: (fault[0], fault[1].n) if comparable else (fault[1].n, fault[2]))
    return record, rank
