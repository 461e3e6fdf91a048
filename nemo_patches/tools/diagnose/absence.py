"""The verdicts on ranks without a trace."""

from __future__ import annotations

from nemo_patches.stall.rank_text import UNANNOUNCED, named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.case import Case, stall_reports, whom
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding
from nemo_patches.tools.diagnose.folder import Job
from nemo_patches.tools.diagnose.rank_trace import CAME


def _without_a_dump(cases: list[Case], absent: tuple[int, ...]) -> list[Finding]:
    """A rank dumps only when it reports a stall, or is asked to: what the others' reports say of it is there."""
    for case in cases:
        reports = stall_reports(case)
        waited = sorted(ending.rank for ending in case.endings.values() if ending.in_vain)
        reported = tuple(rank for rank in absent if rank in reports.kinds)
        if not reported or not waited:
            continue
        rank = reported[0]
        place = f": {reports.where[rank]}" if rank in reports.where else ""
        call = case.call(case.endings[waited[0]])
        return [
            Finding(
                id=ids.MISSING_RANK,
                severity=CRITICAL,
                ranks=reported,
                text=f"{named(waited)} waited in vain for {named(reported)} in {call}, and reported of "
                f"rank {rank}: {reports.kinds[rank]}{place}.",
                next_step="If the process runs, `kill -USR2 PID` has it dump, too; a dump of another host is in that "
                "host's own folder, unless NEMO_PATCHES_DUMP is one that all share.",
                encoder=case.name,
                call=case.endings[waited[0]].call,
                evidence=tuple(case.last_record(rank) for rank in waited[:4]),
            )
        ]
    return [
        Finding(
            id=ids.UNTRACED,
            severity=WARNING,
            ranks=absent,
            text=f"There is no dump of {named(absent)} here.",
            next_step="`kill -USR2 PID` has a rank dump; a dump of another host is in that host's own folder, unless "
            "NEMO_PATCHES_DUMP is one that all share.",
        )
    ]


def absent_ranks(job: Job, cases: list[Case]) -> list[Finding]:
    """Say whether ranks without a trace are missing, or only not traced: a round that came had every rank in it."""
    absent = tuple(rank for rank in job.absent if rank not in job.suspects)
    if not absent:
        return []
    if dumps := [case for case in cases if any(case.job.traces[rank].dumped for rank in case.endings)]:
        return _without_a_dump(dumps, absent)
    took_part = any(CAME in track.calls.outcome for case in cases for track in case.tracks.values())
    if took_part:
        waiting_ranks = sorted({ending.rank for case in cases for ending in case.endings.values() if ending.in_vain})
        waited = f"; {named(waiting_ranks)} waited in vain at the end, perhaps for it" if waiting_ranks else ""
        return [
            Finding(
                id=ids.UNTRACED,
                severity=WARNING,
                ranks=absent,
                text=f"{whom(absent, 'takes', 'take')} part in the length sync, and left no trace here{waited}.",
                next_step="Set NEMO_PATCHES_TRACE on every rank and host, to a folder that all share, or copy the "
                "missing files here.",
                evidence=(f"{len(job.traces)} of {job.world_size} ranks have a trace",),
            )
        ]
    reported = any(
        UNANNOUNCED in report.kinds for trace in job.traces.values() for report in trace.missing if report.kinds
    )
    why = (
        "the others' stall reports say that it has not announced itself"
        if reported
        else "no round has come on any rank"
    )
    return [
        Finding(
            id=ids.MISSING_RANK,
            severity=CRITICAL,
            ranks=absent,
            text=f"There is no sign of {named(absent)} of {job.world_size}: not started, not patched, not traced, or "
            "not yet at a first encoder call.",
            next_step="Look at its stderr for nemo_patches' line `patched ...`, and run `nemo-patches status` in its "
            "environment; every rank must have the patch, and NEMO_PATCHES_TRACE.",
            evidence=(f"{len(job.traces)} of {job.world_size} ranks have a trace", why),
        )
    ]
