"""Faults that a job survived: caught exceptions, findings of checks, and memory that runs away."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeVar

import numpy as np

from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.alignment import Clocks, clocks
from nemo_patches.tools.diagnose.case import Case, last_entered
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding
from nemo_patches.tools.diagnose.folder import TracedJob
from nemo_patches.tools.diagnose.rank_end import error_of
from nemo_patches.tracing import records

_NEXT_INPUT = (
    "Look at this rank's batch of that call: the audio files and the manifest entries in it, and the preprocessor. "
    "A NaN goes into every rank's gradients."
)
_NEXT_CAUGHT = (
    "Look for what caught it: that rank left a step out, and its memory may be in disorder (an out-of-memory error "
    "that was swallowed)."
)
_NEXT_THREAD = (
    "Look whether anything waits for that thread: a prefetcher, a pin_memory or logger thread; the process goes on "
    "without it."
)
_NEXT_MEMORY = (
    "Look at what only this rank keeps: a cache in its data loader, lists of tensors, logging done on one rank. It "
    "ends in an out-of-memory kill."
)
_MOST_FINDINGS = 8
_LEAST_SAMPLES = 8  # of memory
_RUNAWAY_BYTES = 1 << 29
_IDLE_PERCENT, _BUSY_PERCENT = 5, 95
_TIMES_OTHERS = 4.0  # a rank that runs away grows so much more than the others


_Fault = TypeVar("_Fault", records.Raised, records.CheckFinding)


def caught_exceptions(case: Case) -> list[Finding]:
    """The first exception of an encoder call after which training went on."""
    raises: list[tuple[float, records.Raised, int]] = []
    for rank, track in case.tracks.items():
        trace, ending = case.job.traces[rank], case.endings[rank]
        if not trace.mixed and not ending.unsure:  # else the record may be another rank's
            raises += [
                (case.clocks.common_or_own(rank, raised.t), raised, rank)
                for raised in trace.raised
                if raised.e == track.info.e
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


def failed_threads(job: TracedJob) -> list[Finding]:
    """For each rank the first exception that ended a thread other than the one that trains."""
    findings = []
    for rank, trace in sorted(job.traces.items()):
        failed = next((failed for failed in trace.failed if failed.thread), None)
        if failed is not None and not trace.mixed:
            thread, error = safe(failed.thread), safe(failed.type)
            text = f"rank {rank}'s thread {thread} ended by {error}: {_one_line(failed.message)}"
            evidence = tuple(_tail(failed.traceback))
            findings.append(Finding(ids.THREAD_FAILED, WARNING, (rank,), text, _NEXT_THREAD, evidence=evidence))
    return findings[:_MOST_FINDINGS]


def _one_line(message: str) -> str:
    return safe(message.strip().splitlines()[0] if message.strip() else "")[:200]


def _tail(traceback: str) -> list[str]:
    return [safe(line) for line in traceback.strip().splitlines()[-4:]]


def _first(faults: list[tuple[float, _Fault, int]], scale: Clocks) -> tuple[_Fault, int]:
    """The first of (time, record, rank) by time; by call and rank where the ranks' clocks cannot be compared."""
    comparable = all(rank in scale.knots for _, _, rank in faults)
    _, record, rank = min(faults, key=lambda fault: (fault[0], fault[1].n) if comparable else (fault[1].n, fault[2]))
    return record, rank


def check_findings(job: TracedJob, cases: list[Case]) -> list[Finding]:
    """For each check its first finding."""
    scale = cases[0].clocks if cases else clocks({})
    of_check: dict[str, list[tuple[float, records.CheckFinding, int]]] = defaultdict(list)
    for rank, trace in job.traces.items():
        for record in trace.findings if not trace.mixed else ():
            of_check[record.check].append((scale.common_or_own(rank, record.t), record, rank))
    findings = []
    for check, recorded in sorted(of_check.items())[:8]:
        first, rank = _first(recorded, scale)
        ranks = sorted({rank for _, _, rank in recorded})
        names = {track.info.e: track.info.name for track in job.traces[rank].tracks.values()}
        name = safe(names.get(first.e, "the encoder"))
        text = f"The check `{safe(check)}` first found something on rank {rank} in call {first.n} of {name}: "
        text += safe(first.text)[:300]
        evidence = (f"findings in all: {len(recorded)}, on {named(ranks)}",)
        kind, severity, next_step = ids.CHECK_FAILED, WARNING, "Look at this rank at that call."
        if check == "inputs":
            kind, severity, next_step = ids.BAD_INPUT, CRITICAL, _NEXT_INPUT
        findings.append(Finding(kind, severity, (rank,), text, next_step, name, first.n, evidence=evidence))
    return findings


def runaway_memory(job: TracedJob) -> list[Finding]:
    """Ranks whose memory grows steadily, and much more than the others'."""
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
                text = f"Rank {rank}'s {what} grows without end, {_gib(before)} to {_gib(after)}, and the other ranks' "
                text += "does not."
                evidence = (f"{len(job.traces[rank].memory)} samples; the other ranks' growth: {_gib(usual)}",)
                findings.append(Finding(ids.MEMORY, WARNING, (rank,), text, _NEXT_MEMORY, evidence=evidence))
    return findings


def gpu_utilisation(job: TracedJob) -> tuple[str, ...]:
    """Evidence, no finding: GPUs that were idle in the stall, beside busy ones."""
    idle, busy = [], []
    for rank, trace in sorted(job.traces.items()):
        if trace.gpu is not None and trace.gpu.utilisation is not None and trace.gpu.t > last_entered(job, rank):
            idle += [rank] * (trace.gpu.utilisation <= _IDLE_PERCENT)
            busy += [rank] * (trace.gpu.utilisation >= _BUSY_PERCENT)
    if not idle or not busy:
        return ()
    uses = f"at most {_IDLE_PERCENT}% on {named(idle)}, at least {_BUSY_PERCENT}% on {named(busy)}"
    return (f"GPU utilisation in the stall: {uses}; a GPU that waits in an NCCL collective shows 100%",)


def _gib(number: float) -> str:
    return f"{number / (1 << 30):.2f} GiB"
