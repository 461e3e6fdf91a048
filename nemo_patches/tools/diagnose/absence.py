"""The verdicts on ranks without a trace."""

from __future__ import annotations

from nemo_patches.stall.rank_text import named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.case import Case, stall_reports, whom
from nemo_patches.tools.diagnose.findings import CRITICAL, LENGTH_SYNC, WARNING, Finding
from nemo_patches.tools.diagnose.folder import Job
from nemo_patches.tools.diagnose.rank_trace import CAME, TIMEOUT

_NEXT_DUMP = (
    "`kill -USR2 PID` has a rank dump; a dump of another host is in that host's own folder, unless NEMO_PATCHES_DUMP "
    "is one that all share."
)


def absent_ranks(job: Job, cases: list[Case]) -> list[Finding]:
    """Say whether ranks without a trace are missing, or only not traced: a round that came had every rank in it.

    Of those that the others' stall reports name, hangs.py tells.
    """
    reported = {rank for case in cases for rank in stall_reports(case).kinds}
    absent = tuple(rank for rank in job.absent if rank not in job.suspects and rank not in reported)
    if not absent:
        return []
    endings = [ending for case in cases for ending in case.endings.values()]
    waiting_ranks = sorted({ending.rank for ending in endings if ending.in_vain})
    waited = f"; {named(waiting_ranks)} waited in vain at the end, perhaps for it" if waiting_ranks else ""
    how_many = (f"{len(job.traces)} of {job.world_size} ranks have a trace",)
    if any(trace.dumped for trace in job.traces.values()):
        return [_without_dump(job, cases, absent, how_many)]
    tracks = [track for case in cases for track in case.tracks.values()]
    if any(CAME in track.calls.outcome for track in tracks):
        return [
            Finding(
                id=ids.UNTRACED,
                severity=WARNING,
                ranks=absent,
                text=f"{whom(absent, 'takes', 'take')} part in the length sync, and left no trace here{waited}.",
                next_step="Set NEMO_PATCHES_TRACE on every rank and host, to a folder that all share, or copy the "
                "missing files here.",
                evidence=how_many,
            )
        ]
    in_vain = any(TIMEOUT in track.calls.outcome for track in tracks)
    return [
        Finding(
            id=ids.MISSING_RANK if in_vain else ids.UNTRACED,
            severity=CRITICAL if in_vain else WARNING,
            ranks=absent,
            text=f"There is no sign of {named(absent)} of {job.world_size}: not started, not patched, not traced, or "
            "not yet at a first encoder call.",
            next_step="Look at its stderr for nemo_patches' line `patched ...`, and run `nemo-patches status` in its "
            "environment; every rank must have the patch, and NEMO_PATCHES_TRACE.",
            evidence=(*how_many, "no round has come on any rank"),
        )
    ]


def _without_dump(job: Job, cases: list[Case], absent: tuple[int, ...], how_many: tuple[str, ...]) -> Finding:
    """Ranks without a dump: where all that have one waited, these are whom they waited for, unless on another host."""
    endings = [ending for case in cases for ending in case.endings.values()]
    waited = {
        ending.rank for ending in endings if ending.in_vain or ending.process.waited or ending.phase == LENGTH_SYNC
    }
    waited |= {rank for case in cases for rank in stall_reports(case).texts if stall_reports(case).waited}
    if not waited >= job.traces.keys() or len(absent) >= len(job.traces):
        text = f"; {named(sorted(waited))} waited at the end, perhaps for it" if waited else ""
        text = f"There is no dump of {named(absent)} here{text}."
        return Finding(ids.UNTRACED, WARNING, absent, text, _NEXT_DUMP, evidence=how_many)
    here = all(_host_of(job, rank) for rank in absent)
    elsewhere = "" if here else ", or its dump is in another host's folder"
    text = (
        f"There is no dump of {named(absent)}, and {whom(sorted(waited), 'waits', 'wait')} in vain: it was killed or "
        f"stopped before it could write one{elsewhere}."
    )
    severity = CRITICAL if here else WARNING
    return Finding(ids.MISSING_RANK, severity, absent, text, _NEXT_DUMP, evidence=how_many)


def _host_of(job: Job, rank: int) -> str:
    """The host of a rank without a file, by those of the ranks before and after it; empty if that does not tell."""
    before = [other for other in job.traces if other < rank]
    after = [other for other in job.traces if other > rank]
    hosts = {job.traces[other].header.host for other in (max(before), min(after))} if before and after else {""}
    return hosts.pop() if len(hosts) == 1 else ""
