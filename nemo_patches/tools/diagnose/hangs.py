"""The verdicts on how the traces end: who is stuck, where, and who has gone.

A rank is blamed only if its own trace is whole, and never for a round that it has come to. If every rank has come out
of the encoder, the hang is not the encoder's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from nemo_patches.stall.rank_text import LEFT, SILENT, named
from nemo_patches.sync.safe_text import safe
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.case import Case, StallReports, stall_reports, usual_call, whom
from nemo_patches.tools.diagnose.endings import Ending
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding

_NEXT_STEPS = {
    ids.BEFORE_ENCODER: "Look at what this rank does (`py-spy dump --pid {pid}` on {host}), and its data loader's "
    "workers; if it is out of batches, make their number equal on all ranks (drop_last, DistributedSampler).",
    ids.KILLED: "Look for an out-of-memory kill on {host} (`dmesg`, the scheduler's log) and at the end of this rank's "
    "stderr; the job cannot go on without it.",
    ids.ENDED: "Look at the end of this rank's stderr for an error outside the encoder; if there is none, it had fewer "
    "batches: make their number equal on all ranks (drop_last, DistributedSampler).",
    ids.SILENT: "Look at {host}: is process {pid} stopped (`ps` says T), gone, or the host unreachable? `py-spy dump` "
    "shows a thread that holds Python's lock.",
    ids.SOME_INSIDE: "Look at what these ranks do (`py-spy dump --native --pid {pid}` on {host}); on a GPU, run again "
    "with NEMO_PATCHES_TRACE_CHECKS=cuda, which pins an asynchronous error to its place.",
    ids.ALL_INSIDE: "Look at two of the ranks (`py-spy dump --native --pid {pid}` on {host}): a collective inside the "
    "encoder (SyncBatchNorm, FSDP), or a kernel that does not end; on a GPU, run again with "
    "NEMO_PATCHES_TRACE_CHECKS=cuda.",
    ids.OUTSIDE: "Look at every rank (`py-spy dump --pid {pid}` on {host}): the gradients' all-reduce, a metric, or "
    "the data; where only one is not in a collective, that one is the reason. The check `barrier` names it.",
}
_PHASES = {
    ids.LENGTH_SYNC: "in the length sync",
    ids.GROWTH: "in the growth of the positional encoding",
    ids.PRE_ENCODE: "in pre_encode, the subsampling",
    ids.LAYERS: "in its layers",
}
_PHASE_ORDER = list(_PHASES)
_OWN_TIMEOUT = "LengthSyncTimeout"  # on_timeout="raise": the rank that this one waited for is the reason


def hangs(case: Case, explained: set[int]) -> list[Finding]:
    """Who is stuck or has gone. explained: the ranks that are behind for a reason that another finding has."""
    sure = case.sure
    if not sure or not any(ending.call for ending in case.endings.values()):
        return []
    reports = stall_reports(case)
    top = max(ending.position for ending in sure.values())
    at_top = [ending for ending in sure.values() if ending.position == top]
    behind = [ending for ending in sure.values() if ending.position < top]
    if case.job.moving:
        behind = [ending for ending in behind if _waited_for(ending, at_top)]
    reported = [ending for ending in behind if ending.rank in reports.kinds]
    if reported and reports.complete:  # any other rank that seems to be behind only has a trace that ends too early
        behind = reported
    behind = [ending for ending in behind if ending.rank not in explained]
    if behind:
        return _behind(case, behind, at_top, reports)
    if explained or case.job.moving:
        return []
    return _level(case, at_top, reports)


def _waited_for(ending: Ending, others: Iterable[Ending]) -> bool:
    return any((other.in_vain or other.sync_ended) and other.round > ending.round for other in others)


def _behind(case: Case, behind: list[Ending], at_top: list[Ending], reports: StallReports) -> list[Finding]:
    groups: dict[str, list[Ending]] = defaultdict(list)
    sync_ended = any(other.sync_ended for other in case.endings.values())
    all_over = all(other.ended for other in at_top)
    for ending in behind:
        groups[_why(ending, reports, sync_ended, all_over)].append(ending)
    groups.pop(ids.EXCEPTION, None)  # faults.py reports exceptions
    findings = []
    for kind, endings in groups.items():
        finding = _finding(case, kind, endings, at_top, reports)
        not_entered = 0 if endings[0].inside else 1  # the finding is about the call that these ranks have not entered
        findings.append(replace(finding, call=finding.call + not_entered))
    return findings


def _why(ending: Ending, reports: StallReports, sync_ended: bool, all_over: bool) -> str:
    if ending.raised:
        return ids.EXCEPTION
    if ending.ended:
        return ids.ENDED
    if (sync_ended and not ending.sync_ended) or reports.kinds.get(ending.rank) == LEFT or all_over:
        return ids.KILLED
    if reports.kinds.get(ending.rank) == SILENT:
        return ids.SILENT
    return ids.SOME_INSIDE if ending.inside else ids.BEFORE_ENCODER


def _text(case: Case, kind: str, endings: list[Ending], at_top: list[Ending], reports: StallReports) -> str:
    ranks = [ending.rank for ending in endings]
    first, usual = endings[0], usual_call(at_top)
    others = named(sorted(ending.rank for ending in at_top))
    went = _went(at_top)
    if kind == ids.KILLED:
        where = f"{_PHASES[first.phase]} of" if first.inside else "after"
        last = f"{where} {case.call(first)}" if first.call else "before its first encoder call"
        return (
            f"{whom(ranks, 'was', 'were')} killed or crashed {last}: its trace stops there without an end, while "
            f"{others} {went} {case.call(usual)}."
        )
    if kind == ids.ENDED and first.error:
        last = f"after {case.call(first)}" if first.call else "without an encoder call"
        return f"{whom(ranks, 'was', 'were')} ended {last} by an exception: {first.error[:300]}."
    if kind == ids.ENDED:
        last = f"after {case.call(first)}" if first.call else "without an encoder call"
        return (
            f"{whom(ranks, 'has', 'have')} ended in good order {last}, while {others} {went} {case.call(usual)}: an "
            "error outside the encoder, or fewer batches."
        )
    if kind == ids.SILENT:
        last = f"after {case.call(first)}" if first.call else "before its first encoder call"
        return (
            f"{whom(ranks, 'has', 'have')} no heartbeat since {last}: stopped, killed, the host unreachable, or "
            f"Python's lock held; {others} {went} {case.call(usual)}."
        )
    if kind == ids.SOME_INSIDE:
        return (
            f"{whom(ranks, 'is', 'are')} inside {case.call(first)}, {_PHASES[first.phase]}, and {others} came out of it"
            ": stuck there, or killed."
        )
    dumps = ((rank, case.job.traces[rank].dumped) for rank in ranks)
    told = [*reports.where.items(), *((rank, safe(dump.where)) for rank, dump in dumps if dump is not None)]
    place = next((place for rank, place in told if rank in ranks and place), "")
    doing = f"it is in {place}" if place else "it is stuck before the encoder, in its data or whatever else is there"
    number = f" (call {usual.call} there, {first.call + 1} here)" if usual.call != first.call + 1 else ""
    return f"{whom(ranks, 'has', 'have')} not entered {case.call(usual)}, which {others} {went}{number}: {doing}."


def _went(at_top: list[Ending]) -> str:
    inside = [ending for ending in at_top if ending.inside]
    if not inside:
        return "went through"
    is_ = "is" if len(at_top) == 1 else "are"
    return f"{is_} in" if len(inside) == len(at_top) else f"{is_} in or through"


def _next_step(kind: str, ranks: tuple[int, ...], case: Case) -> str:
    header = case.job.traces[ranks[0]].header
    return _NEXT_STEPS[kind].format(pid=header.pid, host=safe(header.host))


def _evidence(case: Case, endings: list[Ending], at_top: list[Ending], reports: StallReports) -> Iterable[str]:
    for ending in endings[:4]:
        yield case.last_record(ending.rank)
        if ending.rank in reports.kinds:
            place = reports.where.get(ending.rank, "")
            yield f"stall report on rank {ending.rank}: {reports.kinds[ending.rank]}" + (f": {place}" if place else "")
    vain = sorted(ending.rank for ending in at_top if ending.in_vain)
    if vain:
        yield f"waited in vain for its round: {named(vain)}"
    gone = sorted(ending.rank for ending in at_top if ending.sync_ended)
    if gone:
        yield f"the length sync has ended, because a rank has gone, on {named(gone)}"
    yield case.last_record(usual_call(at_top).rank)


def _level(case: Case, at_top: list[Ending], reports: StallReports) -> list[Finding]:
    """All ranks of which it is known stand at the same call."""
    left = [ending for ending in at_top if ending.ended]
    if erred := [ending for ending in left if ending.error and not ending.error.startswith(_OWN_TIMEOUT)]:
        others = [ending for ending in at_top if ending not in erred]
        return [_finding(case, ids.ENDED, erred, others or erred, reports)]
    stay = [ending for ending in at_top if not ending.ended]
    if not stay:
        return []
    if left:
        return _some_have_ended(case, left, stay)
    if any(ending.sync_ended for ending in at_top) and not all(ending.sync_ended for ending in at_top):
        gone = [ending for ending in at_top if not ending.sync_ended and not ending.raised]
        if gone:
            return [_finding(case, ids.KILLED, gone, [ending for ending in at_top if ending.sync_ended], reports)]
    whole = len(at_top) == case.job.world_size
    if not whole or any(ending.raised for ending in at_top):
        return []  # a rank that is not known may be the reason
    inside = [ending for ending in at_top if ending.inside]
    outside = [ending for ending in at_top if not ending.inside]
    if inside and outside:
        return [_finding(case, ids.SOME_INSIDE, inside, outside, reports)]
    call = case.call(at_top[0])
    everyone = f"All {len(at_top)} ranks"
    if all(ending.in_vain for ending in at_top):
        return []  # the last to come to a round does not wait in vain: some trace is not what its rank wrote
    if inside:
        phase = min((ending.phase for ending in inside), key=_PHASE_ORDER.index)
        first = [ending for ending in inside if ending.phase == phase]
        ranks = tuple(ending.rank for ending in first)
        which = _PHASES[phase] if len(first) == len(inside) else f"{named(ranks)} {_PHASES[phase]}"
        return [
            Finding(
                id=ids.ALL_INSIDE,
                severity=CRITICAL,
                ranks=ranks,
                text=f"{everyone} are inside {call}, {which}, and none has come out.",
                next_step=_next_step(ids.ALL_INSIDE, ranks, case),
                encoder=case.name,
                call=first[0].call,
                phase=phase,
                evidence=tuple(case.last_record(rank) for rank in ranks[:4]),
            )
        ]
    return [
        Finding(
            id=ids.OUTSIDE,
            severity=CRITICAL,
            ranks=tuple(ending.rank for ending in at_top),
            text=f"{everyone} have come out of {call}, and none has entered another: if they hang, it is outside the "
            "encoder.",
            next_step=_next_step(ids.OUTSIDE, (at_top[0].rank,), case),
            encoder=case.name,
            call=at_top[0].call,
            evidence=tuple(case.last_record(ending.rank) for ending in at_top[:4]),
        )
    ]


def _some_have_ended(case: Case, left: list[Ending], stay: list[Ending]) -> list[Finding]:
    """At the same call some ranks have ended in good order, and some have no end: the fewer ones stand out."""
    reports = StallReports({}, {}, False)
    if all(ending.raised for ending in left):
        return []
    if len(stay) <= len(left) and len(left) + len(stay) == case.job.world_size:
        return [_finding(case, ids.KILLED, stay, left, reports)]
    return [_finding(case, ids.ENDED, left, stay, reports)]


def _finding(case: Case, kind: str, endings: list[Ending], others: list[Ending], reports: StallReports) -> Finding:
    ranks = tuple(ending.rank for ending in endings)
    return Finding(
        id=kind,
        severity=CRITICAL,
        ranks=ranks,
        text=_text(case, kind, endings, others, reports),
        next_step=_next_step(kind, ranks, case),
        encoder=case.name,
        call=endings[0].call,
        phase=endings[0].phase,
        evidence=tuple(_evidence(case, endings, others, reports)),
    )


def sync_ended(case: Case) -> list[Finding]:
    """Every rank's length sync has ended: no rank is to blame, the network may be."""
    ended = [ending for ending in case.endings.values() if ending.sync_ended]
    if not ended or len(ended) < len(case.endings) or len(ended) < case.job.world_size:
        return []
    return [
        Finding(
            id=ids.SYNC_ENDED,
            severity=WARNING,
            ranks=tuple(ending.rank for ending in ended),
            text=f"The length sync of {case.name} has ended on all ranks, and all went on with their own lengths.",
            next_step="Look for the reason in any rank's stderr (`the length sync has ended`): a rank has gone, or the "
            "network was lost, or GLOO_SOCKET_IFNAME names no interface.",
            encoder=case.name,
            call=ended[0].call,
        )
    ]
