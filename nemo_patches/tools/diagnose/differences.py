"""Ranks that do not sync their length while others do; and ranks without a trace."""

from __future__ import annotations

from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.case import Case, outcomes_of
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding
from nemo_patches.tools.diagnose.folder import TracedJob
from nemo_patches.tools.diagnose.rank_trace import CAME, ENDED, LOCAL, UNSYNCED


def untraced_ranks(job: TracedJob, cases: list[Case], told: set[int]) -> list[Finding]:
    absent = job.untold(told)
    if not absent:
        return []
    who, part = named(absent), "takes part" if len(absent) == 1 else "take part"
    waiting = sorted(
        {
            ending.rank
            for case in cases
            for ending in case.endings.values()
            if ending.in_vain
        }
    )
    waited = (
        f"; {named(waiting)} waited in vain at the end, perhaps for it"
        if waiting
        else ""
    )
    next_step = (
        "Set NEMO_PATCHES_TRACE on every rank and host, to a folder that all share, or"
        " copy the missing files."
    )
    if CAME in outcomes_of(cases):
        text = f"{who} {part} in the length sync, and left no trace here{waited}."
    else:
        text = (
            f"There is no sign of {who} of {job.world_size}: not started, not patched,"
            " not traced, or not yet at a "
        )
        text += "first encoder call."
        next_step = (
            "Look at its stderr for nemo_patches' line `patched ...`, and run"
            " `nemo-patches status` in its "
        )
        next_step += (
            "environment; every rank must have the patch, and NEMO_PATCHES_TRACE."
        )
    evidence = (f"{len(job.traces)} of {job.world_size} ranks have a trace",)
    return [Finding(ids.UNTRACED, WARNING, absent, text, next_step, evidence=evidence)]


def different_sync(job: TracedJob, cases: list[Case]) -> list[Finding]:
    """Ranks that do not sync their length, while others do and wait for them in vain at every
    call.
    """
    findings = []
    for case in cases:
        outcomes = {
            rank: set(track.calls.outcome) - {UNSYNCED}
            for rank, track in case.tracks.items()
        }
        off = [rank for rank, of_rank in outcomes.items() if of_rank == {LOCAL}]
        on = [rank for rank, of_rank in outcomes.items() if of_rank - {LOCAL, ENDED}]
        if not on or not off:
            continue
        odd = off if len(off) <= len(on) else on
        text = (
            f"{case.name} does not sync its length on {named(off)}"
            " (sync_max_audio_length is false, or sync=local), "
        )
        text += f"and does on {named(on)}, which wait in vain."
        next_step = "Give every rank the same config and the same settings."
        shown = sorted(odd)[:2] + sorted({*off, *on} - set(odd))[:2]
        evidence = tuple(
            f"rank {rank}: {_own_sync(job, rank, rank in off)}" for rank in shown
        )
        found = Finding(
            ids.DIFFERENT_SYNC,
            CRITICAL,
            tuple(odd),
            text,
            next_step,
            case.name,
            evidence=evidence,
        )
        findings.append(found)
    return findings


def _own_sync(job: TracedJob, rank: int, is_off: bool) -> str:
    mode = safe(job.traces[rank].header.settings.get("sync", "?"))
    return (
        "sync_max_audio_length is false"
        if is_off and mode != "local"
        else f"sync={mode}"
    )
