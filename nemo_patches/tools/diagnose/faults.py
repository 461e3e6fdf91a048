"""The verdicts on recorded faults: exceptions, the findings of checks, and memory that runs away."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeVar

import numpy as np

from nemo_patches.stall.rank_text import named
from nemo_patches.sync.safe_text import safe
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.alignment import Clocks
from nemo_patches.tools.diagnose.case import Case
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding
from nemo_patches.tools.diagnose.folder import Job
from nemo_patches.tracing import records

_OWN_TIMEOUT = "LengthSyncTimeout"  # on_timeout="raise": the rank that this one waited for is the reason
_NEXT_INPUT = (
    "Look at this rank's batch of that call: the audio files and the manifest entries in it, and the preprocessor. "
    "A NaN goes into every rank's gradients."
)
_LEAST_SAMPLES = 8  # of memory
_RUNAWAY_BYTES = 1 << 29
_TIMES_OTHERS = 4.0  # a rank that runs away grows so much more than the others


_Fault = TypeVar("_Fault", records.Raised, records.Finding)


def exceptions(case: Case) -> list[Finding]:
    """The first exception that ended a rank, and the first one after which training went on."""
    raises: list[tuple[float, records.Raised, int]] = []
    for rank, trace in case.job.traces.items():
        track = case.tracks.get(rank)
        for raised in trace.raised:
            if (
                track is not None
                and not trace.mixed
                and not case.endings[rank].unsure  # the record may be another rank's
                and raised.e == track.info.e
                and not raised.type.endswith(_OWN_TIMEOUT)
            ):
                at = case.clocks.common(rank, raised.t)
                raises.append((float(at) if at is not None else raised.t, raised, rank))
    by_last = {
        last: [(at, raised, rank) for at, raised, rank in raises if _is_last(case, raised, rank) == last]
        for last in (True, False)
    }
    return [_exception(case, of_kind, last) for last, of_kind in by_last.items() if of_kind]


def _is_last(case: Case, raised: records.Raised, rank: int) -> bool:
    ending = case.endings[rank]
    return ending.raised and ending.call == raised.n


def _exception(case: Case, raises: list[tuple[float, records.Raised, int]], last: bool) -> Finding:
    raised, rank = _first(raises, case.clocks)
    same = sorted({rank for _, other, rank in raises if (other.n, other.type) == (raised.n, raised.type)})
    ranks = tuple(same) if len(same) == case.job.world_size else (rank,)
    message = safe(raised.message.strip().splitlines()[0] if raised.message.strip() else "")[:200]
    after = "" if last else ", and training went on after it"
    tail = [safe(line) for line in raised.traceback.strip().splitlines()[-4:]]
    return Finding(
        id=ids.EXCEPTION if last else ids.CAUGHT,
        severity=CRITICAL if last else WARNING,
        ranks=ranks,
        text=f"{named(ranks)} raised {safe(raised.type)} in call {raised.n} of {case.name}{after}: {message}",
        next_step="Mend what the traceback shows; the other ranks only waited for this one."
        if last
        else "Look for what caught it: that rank left a step out, and its memory may be in disorder (an out-of-memory "
        "error that was swallowed).",
        encoder=case.name,
        call=raised.n,
        phase=case.endings[rank].phase,
        evidence=(*tail, f"exceptions in all: {len(raises)}, on {named(sorted({rank for _, _, rank in raises}))}"),
    )


def _first(faults: list[tuple[float, _Fault, int]], clocks: Clocks | None) -> tuple[_Fault, int]:
    """The first of (time, record, rank) by time; by call and rank where the ranks' clocks cannot be compared."""
    comparable = clocks is not None and all(clocks.common(rank, 0.0) is not None for _, _, rank in faults)
    _, record, rank = min(faults, key=lambda fault: (fault[0], fault[1].n) if comparable else (fault[1].n, fault[2]))
    return record, rank


def check_findings(job: Job, cases: list[Case]) -> list[Finding]:
    """For each check its first finding."""
    clocks = cases[0].clocks if cases else None
    of_check: dict[str, list[tuple[float, records.Finding, int]]] = defaultdict(list)
    for rank, trace in job.traces.items():
        for record in trace.findings if not trace.mixed else ():
            at = clocks.common(rank, record.t) if clocks else None
            of_check[record.check].append((float(at) if at is not None else record.t, record, rank))
    findings = []
    for check, recorded in sorted(of_check.items())[:8]:
        first, rank = _first(recorded, clocks)
        ranks = sorted({rank for _, _, rank in recorded})
        names = {track.info.e: track.info.name for track in job.traces[rank].tracks.values()}
        name = safe(names.get(first.e, "the encoder"))
        findings.append(
            Finding(
                id=ids.BAD_INPUT if check == "inputs" else ids.CHECK_FAILED,
                severity=CRITICAL if check == "inputs" else WARNING,
                ranks=(rank,),
                text=f"The check `{safe(check)}` first found something on rank {rank} in call {first.n} of {name}: "
                f"{safe(first.text)[:300]}",
                next_step=_NEXT_INPUT if check == "inputs" else "Look at this rank at that call.",
                encoder=name,
                call=first.n,
                evidence=(f"findings in all: {len(recorded)}, on {named(ranks)}",),
            )
        )
    return findings


def runaway_memory(job: Job) -> list[Finding]:
    """One rank's memory grows and grows, and the others' does not."""
    findings = []
    for column, what in ((1, "host memory (RSS)"), (2, "GPU memory allocated"), (3, "GPU memory reserved")):
        growth: dict[int, tuple[float, float, float]] = {}
        for rank, trace in job.traces.items():
            if len(trace.memory) >= _LEAST_SAMPLES:
                quarters = np.array_split(np.array([sample[column] for sample in trace.memory], dtype=np.float64), 4)
                levels = [float(np.median(quarter)) for quarter in quarters]
                steady = levels[1] < levels[2] < levels[3]
                growth[rank] = (levels[3] - levels[1] if steady else 0.0, levels[1], levels[3])
        for rank, (grown, before, after) in growth.items():
            others = [others_growth for other, (others_growth, _, _) in growth.items() if other != rank]
            usual = float(np.median(others)) if others else 0.0
            if others and grown > max(_RUNAWAY_BYTES, _TIMES_OTHERS * usual, 0.25 * before):
                findings.append(
                    Finding(
                        id=ids.MEMORY,
                        severity=WARNING,
                        ranks=(rank,),
                        text=f"Rank {rank}'s {what} grows without end, {_gib(before)} to {_gib(after)}, and the other "
                        "ranks' does not.",
                        next_step="Look at what only this rank keeps: a cache in its data loader, lists of tensors, "
                        "logging done on one rank. It ends in an out-of-memory kill.",
                        evidence=(f"{len(job.traces[rank].memory)} samples; the other ranks' growth: {_gib(usual)}",),
                    )
                )
    return findings


def _gib(number: float) -> str:
    return f"{number / (1 << 30):.2f} GiB"
