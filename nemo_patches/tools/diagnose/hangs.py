"""The verdicts on how the traces end: who is stuck, where, and who has gone.

A rank is blamed only if its own trace is whole, and never for a round that it has come to. If every rank has come out
of the encoder, the hang is not the encoder's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from nemo_patches.channel.safe_text import safe
from nemo_patches.stall.rank_text import ELSEWHERE, GONE, LATE, LEFT, SILENT, UNANNOUNCED, named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.case import Case, StallReports, last_entered, stall_reports, usual_call, whom
from nemo_patches.tools.diagnose.endings import Ending, Position, killed_ranks
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding
from nemo_patches.tools.diagnose.lateness import behind_since
from nemo_patches.tools.diagnose.rank_trace import BACKWARD

_NEXT_STEPS = {
    ids.BEFORE_ENCODER: "Look at what this rank does (while it runs, `py-spy dump --pid {pid}` on {host}), and its "
    "data loader's workers; if it is out of batches, make their number equal on all ranks (drop_last, "
    "DistributedSampler).",
    ids.KILLED: "Look for an out-of-memory kill on {host} (`dmesg`, the scheduler's log) and at the end of this rank's "
    "stderr; the job cannot go on without it.",
    ids.ENDED: "Look at the end of this rank's stderr for an error outside the encoder; if there is none, it had fewer "
    "batches: make their number equal on all ranks (drop_last, DistributedSampler).",
    ids.MISSING_RANK: "Look at that rank: nemo_patches' line `patched ...` on its stderr, and its end. If it runs, "
    "`py-spy dump`, or `kill -USR2 PID`, which has it dump; a dump of another host is in that host's own folder, "
    "unless NEMO_PATCHES_DUMP is one that all share.",
    ids.SILENT: "Look at {host}: is process {pid} stopped (`ps` says T), gone, or the host unreachable? `py-spy dump` "
    "shows a thread that holds Python's lock.",
    ids.SOME_INSIDE: "Look at what these ranks do (while they run, `py-spy dump --native --pid {pid}` on {host}); on a "
    "GPU, run again with NEMO_PATCHES_TRACE_CHECKS=cuda, which pins an asynchronous error to its place.",
    ids.ALL_INSIDE: "Look at two of the ranks (while they run, `py-spy dump --native --pid {pid}` on {host}): a "
    "collective inside the encoder (SyncBatchNorm, FSDP), or a kernel that does not end; on a GPU, run again with "
    "NEMO_PATCHES_TRACE_CHECKS=cuda.",
    ids.OUTSIDE: "Look at every rank (while it runs, `py-spy dump --pid {pid}` on {host}): the gradients' all-reduce, "
    "a metric, or the data; where only one is not in a collective, that is the reason. The check `barrier` names it.",
}
_PHASES = {
    ids.LENGTH_SYNC: "in the length sync",
    ids.GROWTH: "in the growth of the positional encoding",
    ids.PRE_ENCODE: "in pre_encode, the subsampling",
    ids.LAYERS: "in its layers",
}
LONG_S = 10.0  # in a call: longer than healthy ranks wait for each other
_PHASE_ORDER = list(_PHASES)
_MISSING = {
    ELSEWHERE: "it is elsewhere",
    LATE: "it has not come",
    SILENT: "no heartbeat: stopped, killed, the host unreachable, or Python's lock held",
    LEFT: "it has left: ended, or killed",
    UNANNOUNCED: "no sign of it: not patched, not started, or not yet at a first encoder call",
}


def hangs(case: Case, explained: set[int]) -> list[Finding]:
    """Who is stuck or has gone. explained: the ranks that are behind for a reason that another finding has.

    The evidence in its order: stall reports, exceptions, how processes ended, rounds that came in vain. Without any,
    ranks that stand at different calls are what a healthy job looks like that was killed at this moment.
    """
    if not any(ending.call for ending in case.endings.values()):
        return []
    reports = stall_reports(case)
    if accused := [ending for ending in _accused(case, reports) if ending.rank not in explained]:
        others = _at_top([ending for ending in case.endings.values() if ending.rank not in reports.kinds])
        found = _grouped(case, accused, others or accused, reports)
        return [replace(one, severity=WARNING) if reports.past.issuperset(one.ranks) else one for one in found]
    if any(ending.at_fault for ending in case.sure.values()):
        return []  # faults.py reports exceptions, and who has one did not wait
    known = [ending for ending in case.endings.values() if not ending.unsure or ending.lost_last]
    sure = [ending for ending in known if ending.rank not in explained]
    if not case.sure.keys() - explained:
        return []
    for look in (_left_in_a_collective, _waited_for_in_vain, _gone, _not_told_to_end):
        if suspects := look(case, sure):
            others = _at_top([ending for ending in case.sure.values() if ending not in suspects])
            return _grouped(case, suspects, others or suspects, reports)
    if explained or case.job.moving:
        return []
    left = any(ending.sync_ended and ending.process.terminated for ending in case.endings.values())
    if left or _closed(case):
        return _ended_by_nobody_known(case)
    dumped = any(
        trace.dumped for trace in case.job.traces.values()
    )  # which a stall, or somebody who sees one, asks for
    if reports.texts or case.job.alive or dumped or _timed_out(case):
        return _level(case, reports)
    return _stopped_at_once(case)


def _top(endings: list[Ending]) -> Position:
    return max((ending.position for ending in endings), default=(0, 0))


def _at_top(endings: list[Ending]) -> list[Ending]:
    top = _top(endings)
    return [ending for ending in endings if ending.position == top]


def _accused(case: Case, reports: StallReports) -> list[Ending]:
    """The ranks that the others reported missing, but for those that have waited themselves, or were ended by others.

    Also those of which there is no trace, or one that is not whole: what the others say of them is there.
    """
    accused = []
    for rank, kind in sorted(reports.kinds.items()):
        ending = case.endings.get(rank) or Ending.without_trace(rank)
        ended_by_others = ending.process.waited or (ending.process.terminated and kind == LEFT)
        if not ended_by_others and not ending.process.in_collective:
            accused.append(ending)
    return accused


def _timed_out(case: Case) -> bool:
    return any(ending.process.timed_out for ending in case.endings.values())


def _left_in_a_collective(case: Case, sure: list[Ending]) -> list[Ending]:
    """The ranks that others waited for in a collective until an error ended them."""
    waited = [ending for ending in case.endings.values() if ending.process.waited]
    rest = [ending for ending in sure if not ending.process.waited and not ending.process.in_collective]
    if not waited or len(case.endings) < case.job.world_size:
        return []
    if _timed_out(case):
        seen = [ending for ending in rest if not ending.process.unknown]
        return seen if any(ending.position < _top(waited) for ending in seen) else rest
    return _gone_first(case, rest)


def _gone_first(case: Case, rest: list[Ending]) -> list[Ending]:
    """Who went before connections were closed, of the ranks that do not tell that they waited.

    Whom SIGTERM ended is not the reason, but who sent it.
    """
    top = _top(list(case.endings.values()))
    if left := [ending for ending in rest if ending.process.ordinary and _is_early(case, ending, top)]:
        return left
    if any(ending.process.unknown for ending in rest):
        return killed_ranks(case.job.traces, rest)
    return [ending for ending in rest if not ending.process.terminated]


def _is_early(case: Case, ending: Ending, top: Position) -> bool:
    """Whether an interpreter came to its end before the training did."""
    track, end = case.tracks.get(ending.rank), case.job.traces[ending.rank].end
    in_backward = track is not None and bool(track.calls.n) and track.calls.backward[-1] == BACKWARD
    return ending.position < top or in_backward or (end is not None and bool(end.exit_code))


def _waited_for_in_vain(case: Case, sure: list[Ending]) -> list[Ending]:
    """The ranks that have not come to a round of the length sync which others gave up."""
    waited = [ending for ending in case.sure.values() if ending.in_vain or ending.sync_ended]
    return [
        ending
        for ending in sure
        if any(ending.position < other.position and ending.came_to < other.round for other in waited)
        and not ending.process.waited
        and not (ending.process.terminated and any(other.sync_ended for other in waited))
    ]


def _gone(case: Case, sure: list[Ending]) -> list[Ending]:
    """The ranks that ended, or have no end, where the length sync of others has ended because a rank had gone."""
    if not any(ending.sync_ended for ending in case.sure.values()) or len(case.endings) < case.job.world_size:
        return []
    rest = [ending for ending in sure if not ending.sync_ended and not ending.raised and not ending.process.waited]
    return [ending for ending in _gone_first(case, rest) if not ending.in_good_order or ending.position < _top(sure)]


def _not_told_to_end(case: Case, sure: list[Ending]) -> list[Ending]:
    """The one rank without an end, where SIGTERM ended all others: so a launcher does when a rank has gone."""
    unknown = [
        ending for ending in sure if ending.process.unknown and case.job.traces[ending.rank].header.notes_sigterm
    ]
    terminated = [ending for ending in case.endings.values() if ending.process.terminated]
    all_else = len(unknown) + len(terminated) == case.job.world_size
    return _gone_first(case, unknown) if all_else and terminated else []


def _grouped(case: Case, suspects: list[Ending], others: list[Ending], reports: StallReports) -> list[Finding]:
    groups: dict[str, list[Ending]] = defaultdict(list)
    for ending in suspects:
        groups[_why(case, ending, others, reports)].append(ending)
    groups.pop(ids.EXCEPTION, None)  # faults.py reports exceptions
    findings = []
    for kind, endings in groups.items():
        finding = _finding(case, kind, endings, others, reports)
        # The finding is about the call that these ranks have not entered.
        enters = not endings[0].inside and endings[0].position < others[0].position
        call = usual_call(others).call if endings[0].unsure else finding.call + enters
        since = behind_since(case, endings[0].rank)
        if kind in (ids.ENDED, ids.BEFORE_ENCODER) and 0 < since < call:
            text = f"{finding.text} It has been behind since call {since}, which it skipped, or came to too late."
            finding, call = replace(finding, text=text), since
        findings.append(replace(finding, call=call))
    return findings


def _why(case: Case, ending: Ending, others: list[Ending], reports: StallReports) -> str:
    kind = reports.kinds.get(ending.rank)
    went_on = any(other.sync_ended for other in others) and not ending.sync_ended
    if kind is not None and (ending.unsure or (kind == UNANNOUNCED and not ending.call)):
        return ids.MISSING_RANK  # as the others say; more is not known of it
    if ending.at_fault:
        return ids.EXCEPTION
    if ending.process.ordinary:
        return ids.ENDED
    has_gone = kind == LEFT or reports.where.get(ending.rank) == GONE
    if kind == SILENT and not has_gone:
        return ids.SILENT
    gone = has_gone or (kind is None and (went_on or _closed(case) or _not_told(case, ending)))
    if gone and ending.rank not in case.job.alive:
        return ids.KILLED
    return ids.SOME_INSIDE if ending.inside and not ending.unsure else ids.BEFORE_ENCODER


def _closed(case: Case) -> bool:
    """Whether connections were closed, and no time limit had passed."""
    return any(ending.process.waited for ending in case.endings.values()) and not _timed_out(case)


def _not_told(case: Case, ending: Ending) -> bool:
    return ending.process.unknown and any(other.process.terminated for other in case.endings.values())


def _text(case: Case, kind: str, endings: list[Ending], others: list[Ending], reports: StallReports) -> str:
    ranks = [ending.rank for ending in endings]
    first, usual = endings[0], usual_call(others)
    theirs = named(sorted(ending.rank for ending in others))
    waits = "wait" if len(others) > 1 else "waits"
    they_went = f"{theirs} {_went(others)} {case.call(usual)}"
    at_the_end = f"after {case.call(first)}" if first.call else "before its first encoder call"
    place = _place(case, ranks, reports)
    if kind == ids.KILLED:
        where = f"{_PHASES[first.phase]} of {case.call(first)}" if first.inside else at_the_end
        how = (
            "its trace stops there without an end" if not first.unsure else "the others' stall reports say it has left"
        )
        if first.process.unknown and _not_told(case, first):
            how += f", and without the SIGTERM that ended {theirs}"
        return f"{whom(ranks, 'was', 'were')} killed or crashed {where}: {how}, while {they_went}."
    if kind == ids.ENDED:
        end = case.job.traces[first.rank].end
        with_code = f" with exit code {end.exit_code}" if end is not None and end.exit_code else ""
        return (
            f"{whom(ranks, 'has', 'have')} ended{with_code} {at_the_end if first.call else 'without an encoder call'}, "
            f"while {they_went}: fewer batches, or an error that something caught (Hydra does)."
        )
    if kind == ids.SILENT:
        killed = "" if first.rank in case.job.alive else " killed, the host unreachable,"
        return (
            f"{whom(ranks, 'has', 'have')} no heartbeat since {at_the_end}: stopped,{killed} or Python's lock held; "
            f"{they_went}."
        )
    if kind == ids.MISSING_RANK:
        said = f"{_MISSING.get(reports.kinds[first.rank], _MISSING[LATE])}{f': {place}' if place else ''}"
        own = f"; of itself {first.unsure}" if first.unsure else ""
        return f"{whom(ranks, 'is', 'are')} missing, say the stall reports: {said}; {they_went}{own}."
    if kind == ids.SOME_INSIDE:
        inside = f"{whom(ranks, 'is', 'are')} inside {case.call(first)}, {_PHASES[first.phase]}"
        if any(other.inside for other in others):
            return f"{inside}, and not in the collective that {theirs} {waits} in" + (f": {place}." if place else ".")
        return f"{inside}, and {theirs} came out of it: stuck there, or killed" + (f"; {place}." if place else ".")
    alive_or_not = "" if reports.kinds or case.job.alive else ", or was killed there"
    doing = f"it is in {place}" if place else f"it is stuck before the encoder, in its data or elsewhere{alive_or_not}"
    if first.position >= usual.position:
        return f"{whom(ranks, 'is', 'are')} not in the collective that {theirs} {waits} in, {at_the_end}: {doing}."
    number = f" (call {usual.call} there, {first.call + 1} here)" if usual.call != first.call + 1 else ""
    return (
        f"{whom(ranks, 'has', 'have')} not entered {case.call(usual)}, which {theirs} {_went(others)}{number}: {doing}."
    )


def _place(case: Case, ranks: list[int], reports: StallReports) -> str:
    """Where the first of these ranks that anything tells it of is or was."""
    for rank in ranks:
        trace = case.job.traces.get(rank)
        dumped = safe(trace.dumped.where) if trace is not None and trace.dumped is not None else ""
        ending = case.endings.get(rank)
        if place := reports.where.get(rank) or dumped or (ending.process.where if ending is not None else ""):
            return place
    return ""


def _went(at_top: list[Ending]) -> str:
    inside = [ending for ending in at_top if ending.inside]
    if not inside:
        return "went through"
    is_ = "is" if len(at_top) == 1 else "are"
    return f"{is_} in" if len(inside) == len(at_top) else f"{is_} in or through"


def _next_step(kind: str, ranks: tuple[int, ...], case: Case) -> str:
    trace = case.job.traces.get(ranks[0])
    pid, host = (trace.header.pid, safe(trace.header.host)) if trace is not None else ("PID", "its host")
    return _NEXT_STEPS[kind].format(pid=pid, host=host)


def _evidence(case: Case, endings: list[Ending], others: list[Ending], reports: StallReports) -> Iterable[str]:
    for ending in endings[:4]:
        rank = ending.rank
        if rank in case.endings:
            yield case.last_record(rank)
        if rank in reports.kinds:
            place = reports.where.get(rank, "")
            yield f"stall report on rank {rank}: {reports.kinds[rank]}" + (f": {place}" if place else "")
        if ending.process.where:
            yield f"SIGTERM found rank {rank} in {ending.process.where}"
    vain = sorted(ending.rank for ending in others if ending.in_vain)
    if vain:
        yield f"waited in vain for its round: {named(vain)}"
    gone = sorted(ending.rank for ending in others if ending.sync_ended)
    if gone:
        yield f"the length sync has ended, because a rank has gone, on {named(gone)}"
    for ending in [ending for ending in others if ending.process.waited][:2]:
        yield f"rank {ending.rank} was ended by {ending.process.error[:200]}"
    for rank, text in list(reports.texts.items())[:1]:
        yield f"rank {rank}'s stall report: {text[:600]}"
    if (usual := usual_call(others).rank) in case.endings:  # where all are reported missing it may have no trace
        yield case.last_record(usual)


def _level(case: Case, reports: StallReports) -> list[Finding]:
    """The job hangs, and no rank stands out by what the records of it say."""
    if len(case.sure) < case.job.world_size:
        return []  # a rank that is not known may be the reason
    at_top = _at_top(list(case.sure.values()))
    behind = [ending for ending in case.sure.values() if ending not in at_top and not ending.process.waited]
    inside = [ending for ending in at_top if ending.inside]
    outside = [ending for ending in at_top if not ending.inside]
    reported = all(ending.rank in reports.texts for ending in at_top)
    went_on = not reported and (reports.texts or any(_has_just_come(case, ending) for ending in at_top))
    if went_on and (behind or inside):
        return _stopped_at_once(case)  # so it looks in a healthy job, too: who is ahead went on a moment ago
    if behind and not reported:
        return _grouped(case, behind, at_top, reports)
    if inside and outside and not reported:
        return [_finding(case, ids.SOME_INSIDE, inside, outside, reports)]
    everyone, call = f"All {len(case.sure)} ranks", case.call(at_top[0])
    if all(ending.in_vain for ending in at_top):
        return []  # the last to come to a round does not wait in vain: some trace is not what its rank wrote
    if inside and not outside and not behind:
        phase = min((ending.phase for ending in inside), key=_PHASE_ORDER.index)
        ranks = tuple(ending.rank for ending in inside if ending.phase == phase)
        which = _PHASES[phase] if len(ranks) == len(inside) else f"{named(ranks)} {_PHASES[phase]}"
        text = f"{everyone} are inside {call}, {which}, and none has come out."
        return [_of_all(case, ids.ALL_INSIDE, ranks, text, phase, reports)]
    ranks = tuple(sorted(case.sure))
    if inside or behind:
        text = f"{everyone} wait, some in {call} and some before it, and no record says for whom."
        return [_of_all(case, ids.OUTSIDE, ranks, text, "", reports)]
    text = f"{everyone} have come out of {call}, and none has entered another: if they hang, it is outside the encoder."
    finding = _of_all(case, ids.OUTSIDE, ranks, text, "", reports)
    # A job that decodes or writes for long, and calls no encoder, looks the same, unless one was seen to wait.
    return [finding if reports.waited or _timed_out(case) else replace(finding, severity=WARNING)]


def _has_just_come(case: Case, ending: Ending) -> bool:
    """Whether a rank entered its last call shortly before its dump, or now: then it may not wait in vain."""
    trace = case.job.traces[ending.rank]
    if trace.dumped is not None:
        return trace.dumped.t - last_entered(case.job, ending.rank) < LONG_S
    return ending.rank in case.job.alive and case.job.ago.get(ending.rank, LONG_S) < LONG_S


def _stopped_at_once(case: Case) -> list[Finding]:
    """Ranks without an end, and no record that anyone waited for anyone in vain: this accuses nobody."""
    endings = list(case.endings.values())
    stopped = [ending for ending in endings if ending.process.unknown or ending.process.terminated]
    if not stopped or any(ending.in_vain or ending.sync_ended for ending in endings):
        return []
    if len(stopped) < len(endings) and all(ending.unsure for ending in stopped):
        return []  # files that are not whole, of a job whose other ranks tell how they ended
    by_signal = [ending.rank for ending in stopped if ending.process.terminated]
    how = f"SIGTERM ended {named(by_signal)}" if by_signal else "no trace says how"
    which = "All ranks" if len(stopped) == case.job.world_size else whom([end.rank for end in stopped], "has", "have")
    stop = "stop" if len(stopped) == case.job.world_size else "stopped"
    return [
        Finding(
            id=ids.STOPPED_AT_ONCE,
            severity=WARNING,
            ranks=(),
            text=f"{which} {stop} at or near {case.call(usual_call(_at_top(endings)))}, {how}: the job was ended as a "
            "whole, or it still runs. No record shows that a rank waited for another one in vain, so none is accused.",
            next_step="Look for who ended the job: its time limit, `scancel`, the node. If it still runs, diagnose "
            "again in a minute: by then a rank that is waited for is in the stall reports.",
            encoder=case.name,
            evidence=tuple(case.last_record(ending.rank) for ending in endings[:4]),
        )
    ]


def _ended_by_nobody_known(case: Case) -> list[Finding]:
    """Connections were closed, or SIGTERM or Ctrl-C ended ranks, and no record tells of a rank that went before."""
    endings = list(case.endings.values())
    if len(endings) < case.job.world_size:
        return []  # a rank of which there is no trace may have gone first
    terminated = sorted(ending.rank for ending in endings if ending.process.terminated)
    closed = sorted(ending.rank for ending in endings if ending.process.waited)
    why = [f"SIGTERM, or Ctrl-C, ended {named(terminated)}"] if terminated else []
    why += [f"the connections of {named(closed)} were closed"] if closed else []
    who = "somebody ended the job, or a part of it" if terminated else "the network was lost, or a rank left unseen"
    if no_end := sorted(ending.rank for ending in endings if ending.process.unknown):
        each = "one of them" if len(no_end) > 1 else "it"
        who += f", or {each} was killed or crashed first: {whom(no_end, 'has', 'have')} no end"
    return [
        Finding(
            id=ids.STOPPED_AT_ONCE,
            severity=WARNING,
            ranks=(),
            text=f"At or near {case.call(usual_call(_at_top(endings)))} {', and '.join(why)}: {who}. No rank is "
            "accused.",
            next_step="Look for who ended the job (a user, the scheduler's time limit, preemption, a launcher), and at "
            "the first error on any rank's stderr.",
            encoder=case.name,
            evidence=(
                *(f"rank {end.rank} was ended by {end.process.error[:200]}" for end in endings if end.process.waited),
                *(case.last_record(ending.rank) for ending in endings[:4]),
            )[:8],
        )
    ]


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


def _of_all(case: Case, kind: str, ranks: tuple[int, ...], text: str, phase: str, reports: StallReports) -> Finding:
    return Finding(
        id=kind,
        severity=CRITICAL,
        ranks=ranks,
        text=text,
        next_step=_next_step(kind, ranks, case),
        encoder=case.name,
        call=case.endings[ranks[0]].call,
        phase=phase,
        evidence=(
            *(case.last_record(rank) for rank in ranks[:4]),
            *(f"rank {rank}'s stall report: {text[:600]}" for rank, text in list(reports.texts.items())[:1]),
        ),
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
