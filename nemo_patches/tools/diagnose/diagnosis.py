"""From a job's traces to a report: all verdicts, the root cause first, what follows from it behind."""

from __future__ import annotations

from dataclasses import replace

from nemo_patches.stall.rank_text import named, safe
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.case import Case, cases
from nemo_patches.tools.diagnose.counting import Uneven, uneven_calls
from nemo_patches.tools.diagnose.differing import different_ranks, different_sync
from nemo_patches.tools.diagnose.endings import Ending
from nemo_patches.tools.diagnose.events import check_findings, exceptions, runaway_memory
from nemo_patches.tools.diagnose.findings import CRITICAL, NOTE, Finding, RankSummary, Report
from nemo_patches.tools.diagnose.lateness import incidents, straggler, waiting
from nemo_patches.tools.diagnose.presence import absent_ranks
from nemo_patches.tools.diagnose.reading import Job
from nemo_patches.tools.diagnose.stuck import stuck, sync_ended

_SYMPTOMS = frozenset({ids.LATE, ids.TIMEOUTS})
_HANGS = frozenset(
    {
        ids.EXCEPTION,
        ids.DIFFERENT_SYNC,
        ids.KILLED,
        ids.ENDED,
        ids.MISSING_RANK,
        ids.BEFORE_ENCODER,
        ids.SILENT,
        ids.SOME_INSIDE,
        ids.ALL_INSIDE,
        ids.OUTSIDE,
    }
)


def diagnose(job: Job) -> Report:
    """The report on what has been read of a job."""
    encoders = cases(job)
    found = [*absent_ranks(job, encoders), *different_sync(job, encoders)]
    found += check_findings(job, encoders)
    ends: list[Finding] = []
    for case in encoders:
        found += exceptions(case)
        uneven = uneven_calls(case)
        explained = _explained(case, [one for _, one in uneven])
        kinds = set(explained.values())
        found += [replace(one, severity=CRITICAL) if why.training in kinds else one for one, why in uneven]
        ends += stuck(case, set(explained))
        found += [*sync_ended(case), *incidents(case)]
    found += _foremost(ends)
    found += straggler(encoders[0]) if encoders else []
    apart = any(one.id == ids.DIFFERENT_SYNC for one in found)
    found += [*runaway_memory(job), *different_ranks(job, encoders, apart)]
    found += _not_enough(job, encoders, found)
    ordered = _ordered([replace(one, text=one.text[0].upper() + one.text[1:]) for one in found])
    return Report(
        folder=safe(str(job.folder)),
        world_size=job.world_size,
        moving=job.moving,
        verdict=_verdict(job, encoders, ordered),
        next_step=ordered[0].next_step if ordered else "",
        findings=ordered,
        ranks=tuple(_summaries(job, encoders)),
        problems=tuple(job.problems),
        earlier=tuple(job.earlier),
    )


def _foremost(ends: list[Finding]) -> list[Finding]:
    """Where ranks are unequal in one encoder, that they are equal in another one is no finding."""
    unequal = [one for one in ends if one.id not in (ids.OUTSIDE, ids.ALL_INSIDE)]
    inside = [one for one in ends if one.id == ids.ALL_INSIDE]
    return unequal or inside or ends[:1]


def _explained(case: Case, uneven: list[Uneven]) -> dict[int, bool]:
    """The ranks that are behind only because they make fewer calls, and whether these are training calls."""
    top = max((one.position for one in case.sure.values()), default=(0, 0))
    explained = {}
    for rank, ending in case.sure.items():
        if ending.position == top:
            continue
        training = ending.position[0] != top[0]
        if any(one.training == training and rank in one.fewer for one in uneven):
            explained[rank] = training
    return explained


def _not_enough(job: Job, encoders: list[Case], found: list[Finding]) -> list[Finding]:
    """What cannot be told, and why, where nothing else explains how the traces end."""
    unsure: dict[int, str] = {rank: "its file cannot be read" for rank in sorted(job.suspects) if rank < job.world_size}
    for case in encoders:
        for rank, ending in case.endings.items():
            if ending.unsure:
                unsure.setdefault(rank, ending.unsure)
    if not unsure and encoders and any(case.tracks for case in encoders):
        ends = [one for case in encoders for one in case.endings.values()]
        told = any(one.id in _HANGS or one.id == ids.UNEVEN_CALLS for one in found)
        over = all(one.ended for one in ends)
        if told or over or job.moving or job.absent or not ends:
            return []
        if any(one.id == ids.SYNC_ENDED for one in found):
            return []
        reason = "the traces contradict each other: every rank gave up a round that every rank came to"
        return [_not_enough_of((), reason, ())]
    if not encoders:
        return [] if job.moving else [_not_enough_of((), "no rank has recorded an encoder call", ())]
    if not unsure or any(one.id in _HANGS for one in found):
        return []
    some = tuple(sorted(unsure))
    reasons = tuple(f"rank {rank}: {why}" for rank, why in list(unsure.items())[:8])
    return [_not_enough_of(some, f"of {named(some)} it is not known what it did last", reasons)]


def _not_enough_of(ranks: tuple[int, ...], reason: str, evidence: tuple[str, ...]) -> Finding:
    return Finding(
        id=ids.NOT_ENOUGH,
        severity=NOTE,
        ranks=ranks,
        text=f"Not enough records: {reason}.",
        next_step="Copy the files again from every host; or raise the trace's bound, so that more is kept.",
        evidence=evidence,
    )


def _ordered(found: list[Finding]) -> tuple[Finding, ...]:
    """The root cause first; what it explains says so."""
    ordered = sorted(found, key=lambda one: (one.severity != CRITICAL, ids.ORDER.index(one.id), one.ranks[:1]))
    root = next((one for one in ordered if one.severity == CRITICAL and one.id != ids.BAD_INPUT), None)
    if root is None:
        return tuple(ordered)
    causes = [one for one in ordered if one.id not in _SYMPTOMS and one is not root]
    symptoms = [
        replace(one, because=root.id) if one.id == ids.TIMEOUTS else one for one in ordered if one.id in _SYMPTOMS
    ]
    rest = [
        replace(one, because=root.id)
        if one.id in _HANGS and one.id != root.id and root.id in (ids.EXCEPTION, ids.KILLED, ids.DIFFERENT_SYNC)
        else one
        for one in causes
    ]
    return (root, *rest, *symptoms)


def _verdict(job: Job, encoders: list[Case], found: tuple[Finding, ...]) -> str:
    if found:
        first = found[0].text
        memory = next((one for one in found if one.id == ids.MEMORY and one.ranks == found[0].ranks), None)
        if found[0].id == ids.KILLED and memory is not None:
            return f"{first} {memory.text}"
        return first
    calls = {case.name: [ending.call for ending in case.endings.values()] for case in encoders}
    told = ", ".join(f"{max(numbers)} calls of {name}" for name, numbers in calls.items())
    state = "running" if job.moving else "ended in good order" if _all_ended(encoders) else "in step"
    return f"Nothing found: {len(job.traces)} of {job.world_size} ranks, {told or 'no encoder call yet'}, {state}."


def _all_ended(encoders: list[Case]) -> bool:
    return all(ending.ended for case in encoders for ending in case.endings.values())


def _summaries(job: Job, encoders: list[Case]) -> list[RankSummary]:
    main = encoders[0] if encoders else None
    times = waiting(main.rounds) if main else None
    told = []
    for rank, trace in sorted(job.traces.items()):
        ending = main.endings[rank] if main else None
        told.append(
            RankSummary(
                rank=rank,
                host=safe(trace.header.host),
                pid=trace.header.pid,
                calls=sum(track.last for track in trace.tracks.values()),
                state=state_of(ending),
                behind=main.behind(rank) if main else None,
                waited=times.waited.get(rank) if times else None,
                caused=times.caused.get(rank) if times else None,
                lag=times.lag.get(rank) if times else None,
            )
        )
    return told


def state_of(ending: Ending | None) -> str:
    """Where a rank is at the end, in a few words."""
    if ending is None or not ending.call:
        return "no call yet"
    if ending.unsure:
        return "not known"
    if ending.ended:
        return f"ended after call {ending.call}"
    if ending.raised:
        return f"exception in call {ending.call}"
    return f"in call {ending.call}: {ending.phase}" if ending.inside else f"out of call {ending.call}"
