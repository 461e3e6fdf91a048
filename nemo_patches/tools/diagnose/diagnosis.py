"""The report on a job's traces: the root cause first, then what follows from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.case import Case, cases
from nemo_patches.tools.diagnose.differences import different_sync, untraced_ranks
from nemo_patches.tools.diagnose.endings import Ending
from nemo_patches.tools.diagnose.facts import Evidence
from nemo_patches.tools.diagnose.findings import (
    CRITICAL,
    NOTE,
    WARNING,
    Diagnosis,
    Finding,
    RankSummary,
)
from nemo_patches.tools.diagnose.folder import TracedJob, bounded
from nemo_patches.tools.diagnose.judge import rule
from nemo_patches.tools.diagnose.lateness import incidents, straggler, waiting
from nemo_patches.tools.diagnose.rank_trace import (
    ENDED,
    TIMEOUT,
    UNSYNCED,
    UNWAITED,
    RankTrace,
)
from nemo_patches.tools.diagnose.sources import traces
from nemo_patches.tools.diagnose.uneven_calls import (
    UnevenRow,
    uneven_calls,
    uneven_rows,
)

_FALLBACKS = (TIMEOUT, UNWAITED, ENDED)
_MOST_SUMMARIES = 8
_LEAST_WAITING = 0.01  # share of the time; for whom less waiting is, is chance
_SYMPTOMS = frozenset({ids.LATE})
# Decided by judge.py, over the facts of all sources.
JUDGED = frozenset(
    {
        *(
            ids.EXCEPTION,
            ids.START_UP,
            ids.KILLED,
            ids.ENDED,
            ids.MISSING_RANK,
            ids.SILENT,
            ids.SOME_INSIDE,
        ),
        *(
            ids.ALL_INSIDE,
            ids.OUTSIDE,
            ids.STOPPED_AT_ONCE,
            ids.ALL_IN,
            ids.NOT_SEEN,
            ids.WAITED_IN_VAIN,
        ),
        ids.SKIPPED,
    }
)
_HANGS = JUDGED | {ids.DIFFERENT_SYNC}
# Where ranks are at different steps, which of them reached a round or the next call shows nothing.
_OUT_OF_STEP = frozenset({ids.UNEVEN_CALLS, ids.DIFFERENT_SYNC})
_OVER_AT_THE_END = _HANGS | {ids.UNEVEN_CALLS}


def diagnose(job: TracedJob, evidence: Evidence | None = None) -> Diagnosis:
    """evidence: receives the facts that the report rests on."""
    evidence = Evidence() if evidence is None else evidence
    encoders = cases(job)
    findings = different_sync(job, encoders)
    behind: dict[str, set[int]] = {}
    for case in encoders:
        of_encoder, behind[case.name] = _of_encoder(case)
        findings += of_encoder
    if any(behind.values()) or any(
        one.severity == CRITICAL and one.id in _OUT_OF_STEP for one in findings
    ):
        evidence.explained = behind
    evidence.traces_alone = True
    traces.read(job, encoders, evidence)
    findings += [
        replace(one, because="") for one in rule(evidence).findings
    ]  # see _ordered()
    findings += untraced_ranks(job, encoders, {fact.rank for fact in evidence.facts})
    findings += straggler(encoders[0]) if encoders else []
    findings += _not_enough(job, encoders, findings)
    if encoders and all(
        case.ended_well for case in encoders
    ):  # what held ranks up is worth knowing, and is over
        findings = [
            replace(one, severity=WARNING) if one.id in _OVER_AT_THE_END else one
            for one in findings
        ]
    ordered = _ordered(
        [
            replace(finding, text=finding.text[0].upper() + finding.text[1:])
            for finding in findings
        ]
    )
    return Diagnosis(
        folder=safe(str(job.folder)),
        world_size=job.world_size,
        moving=job.moving,
        runs=bool(job.ago),
        verdict=_verdict(job, encoders, ordered),
        next_step=ordered[0].next_step if ordered else "",
        findings=ordered,
        ranks=tuple(_summaries(job, encoders)),
        problems=tuple(job.problems),
        earlier=tuple(bounded(job.earlier, "starts")),
        summary=tuple(_summary(case) for case in encoders[:_MOST_SUMMARIES]),
    )


def _of_encoder(case: Case) -> tuple[list[Finding], set[int]]:
    """The findings from its calls, and the ranks that are behind for a reason that one of them
    gives.
    """
    rows = uneven_rows(case)
    explained = _explained(case, rows)
    findings = list[Finding]()
    for training in (True, False):
        if of_kind := [row for row in rows if row.training == training]:
            findings.append(
                uneven_calls(case, of_kind, explains=training in explained.values())
            )
    return [*findings, *_sync_ended(case), *incidents(case)], set(explained)


def _sync_ended(case: Case) -> list[Finding]:
    """The length sync has ended on every rank: no rank is accused, it may be the network."""
    ended = [ending for ending in case.endings.values() if ending.sync_ended]
    if not ended or len(ended) < len(case.endings) or len(ended) < case.job.world_size:
        return []
    ranks = tuple(ending.rank for ending in ended)
    text = (
        f"The length sync of {case.name} has ended on all ranks, and all went on with"
        " their own lengths."
    )
    next_step = (
        "Look for the reason in any rank's stderr (`the length sync has ended`): a rank"
        " has gone, or the "
    )
    next_step += "network was lost, or GLOO_SOCKET_IFNAME names no interface."
    return [
        Finding(
            ids.SYNC_ENDED, WARNING, ranks, text, next_step, case.name, ended[0].call
        )
    ]


def _summary(case: Case) -> str:
    """What the length sync did in this run, and what that cost."""
    calls = [track.calls for track in case.tracks.values() if track.calls.n]
    given_up = sum(
        int(np.isin(np.array(of_rank.outcome), _FALLBACKS).sum()) for of_rank in calls
    )
    waited = [np.array(of_rank.waited, dtype=np.float64) for of_rank in calls]
    longest = max((float(of_rank.max()) for of_rank in waited), default=0.0)
    first = (
        (rank, track.calls.entered[0])
        for rank, track in case.tracks.items()
        if track.calls.n
    )
    span = sum(case.job.traces[rank].last - entered for rank, entered in first)
    cost = (
        f"; the length sync cost this run {sum(map(np.sum, waited)) / span:.1%}"
        if span > 0
        else ""
    )
    most = max((len(of_rank.n) for of_rank in calls), default=0)
    return (
        f"{case.name}: {most} calls, {given_up} fallbacks on all ranks, longest wait"
        f" {longest:.2f} s{cost}."
    )


def _explained(case: Case, uneven: list[UnevenRow]) -> dict[int, bool]:
    """The ranks that are behind only because they made fewer calls, each with whether these are
    training calls.
    """
    top = max((ending.position for ending in case.sure.values()), default=(0, 0))
    explained = {}
    for rank, ending in case.sure.items():
        if ending.position == top:
            continue
        training = ending.position[0] != top[0]
        if any(row.training == training and rank in row.fewer for row in uneven):
            explained[rank] = training
    return explained


def _not_enough(
    job: TracedJob, encoders: list[Case], findings: list[Finding]
) -> list[Finding]:
    """What is not known, and why, unless another finding explains how the traces end."""
    unsure: dict[int, str] = {
        rank: "its file cannot be read"
        for rank in sorted(job.suspects)
        if rank < job.world_size
    }
    for case in encoders:
        for rank, ending in case.endings.items():
            if ending.unsure:
                unsure.setdefault(rank, ending.unsure)
    if not unsure and encoders and any(case.tracks for case in encoders):
        explains_the_end = {*_HANGS, ids.UNEVEN_CALLS, ids.SYNC_ENDED}
        explained = any(finding.id in explains_the_end for finding in findings)
        if explained or _all_ended(encoders) or job.moving or job.absent:
            return []
        reason = "they do not tell how this job ended, or what its ranks waited for"
        if all(ending.in_vain for case in encoders for ending in case.endings.values()):
            reason = (
                "the traces contradict each other: every rank gave up a round that"
                " every rank came to"
            )
        return [_not_enough_records((), reason, ())]
    if not encoders:
        return (
            []
            if job.moving
            else [_not_enough_records((), "no rank has recorded an encoder call", ())]
        )
    if not unsure or any(finding.id in _HANGS for finding in findings):
        return []
    ranks = tuple(sorted(unsure))
    reasons = tuple(f"rank {rank}: {why}" for rank, why in list(unsure.items())[:8])
    return [
        _not_enough_records(
            ranks, f"of {named(ranks)} it is not known what it did last", reasons
        )
    ]


def _not_enough_records(
    ranks: tuple[int, ...], reason: str, evidence: tuple[str, ...]
) -> Finding:
    next_step = "Copy the files again from every host."
    return Finding(
        ids.NOT_ENOUGH,
        NOTE,
        ranks,
        f"Not enough records: {reason}.",
        next_step,
        evidence=evidence,
    )


def _ordered(findings: list[Finding]) -> tuple[Finding, ...]:
    """The root cause first, its symptoms last; what follows from the root cause says so."""
    ordered = sorted(
        findings,
        key=lambda f: (f.severity != CRITICAL, ids.ORDER.index(f.id), f.ranks[:1]),
    )
    root = next((f for f in ordered if f.severity == CRITICAL), None)
    if root is None:
        return tuple(ordered)
    explained = {ids.WAITED_IN_VAIN}
    if root.id in (ids.EXCEPTION, ids.KILLED, ids.DIFFERENT_SYNC):
        explained |= _HANGS - {root.id}
    rest = [
        replace(f, because=root.id) if f.id in explained else f
        for f in ordered
        if f is not root
    ]
    return (root, *sorted(rest, key=lambda f: f.id in _SYMPTOMS))


def _verdict(
    job: TracedJob, encoders: list[Case], findings: tuple[Finding, ...]
) -> str:
    if findings:
        return findings[0].text
    calls = ", ".join(
        f"{max(e.call for e in case.endings.values())} calls of {case.name}"
        for case in encoders
    )
    state = (
        "running"
        if job.moving
        else "ended in good order"
        if _all_ended(encoders)
        else "in step"
    )
    ranks = f"{len(job.traces)} of {job.world_size} ranks"
    return " ".join(
        [
            f"Nothing found: {ranks}, {calls or 'no encoder call yet'}, {state}.",
            *map(_summary, encoders[:1]),
        ]
    )


def _all_ended(encoders: list[Case]) -> bool:
    endings = [ending for case in encoders for ending in case.endings.values()]
    return all(ending.ended and not ending.process.error for ending in endings)


def _summaries(job: TracedJob, encoders: list[Case]) -> list[RankSummary]:
    main = encoders[0] if encoders else None
    times = waiting(main.rounds) if main else None
    if times is not None and times.share < _LEAST_WAITING:
        times = None
    summaries = []
    for rank, trace in sorted(job.traces.items()):
        ending = main.endings[rank] if main else None
        summaries.append(
            RankSummary(
                rank=rank,
                host=safe(trace.header.host),
                pid=trace.header.pid,
                calls=sum(track.last for track in trace.tracks.values()),
                state=state_of(ending),
                behind=main.behind(rank) if main else None,
                ago=job.ago.get(rank, main.behind(rank) if main else None),
                waited=_waited(trace),
                caused=times.caused.get(rank) if times else None,
                lag=times.lag.get(rank) if times else None,
            )
        )
    return summaries


def _waited(trace: RankTrace) -> float | None:
    """Seconds in length syncs, also in those that were given up; None if no call has one."""
    calls = [
        track.calls
        for track in trace.tracks.values()
        if any(code != UNSYNCED for code in track.calls.outcome)
    ]
    return (
        float(
            sum(
                np.array(of_encoder.waited, dtype=np.float64).sum()
                for of_encoder in calls
            )
        )
        if calls
        else None
    )


def state_of(ending: Ending | None) -> str:
    if ending is None or not ending.call:
        return "no call yet"
    if ending.unsure:
        return "not known"
    if ending.raised:
        return f"exception in call {ending.call}"
    if ending.ended:
        how = (
            f" by {ending.process.error.partition(':')[0]}"
            if ending.process.error
            else ""
        )
        return f"ended{how} after call {ending.call}"
    return (
        f"in call {ending.call}: {ending.phase}"
        if ending.inside
        else f"out of call {ending.call}"
    )
