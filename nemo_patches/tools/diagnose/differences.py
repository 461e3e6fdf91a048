"""Differences between ranks: settings, versions and inputs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping

import numpy as np

from nemo_patches.patching.settings import OptionSettings
from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.case import Case, outcomes_of
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding
from nemo_patches.tools.diagnose.folder import TracedJob
from nemo_patches.tools.diagnose.rank_trace import CAME, ENDED, LOCAL, UNSYNCED, Input, Track

_NEXT_ALIKE = (
    "Give every rank the same environment, config and data pipeline; ranks that differ may wait for each other, or "
    "reduce what does not belong together."
)
_MOST_DIFFERENCES = 8
_MAY_DIFFER = frozenset({"trace"})  # a folder may have another name on another host
_TOO_FEW_CALLS = 2  # to say which kind of input is usual
_USUAL_SHARE = 0.75  # of the calls; else several kinds are usual
_ENOUGH_BATCHES = 20  # to compare their sizes


def untraced_ranks(job: TracedJob, cases: list[Case], told: set[int]) -> list[Finding]:
    absent = job.untold(told)
    if not absent:
        return []
    who, part = named(absent), "takes part" if len(absent) == 1 else "take part"
    waiting = sorted({ending.rank for case in cases for ending in case.endings.values() if ending.in_vain})
    waited = f"; {named(waiting)} waited in vain at the end, perhaps for it" if waiting else ""
    next_step = "Set NEMO_PATCHES_TRACE on every rank and host, to a folder that all share, or copy the missing files."
    if CAME in outcomes_of(cases):
        text = f"{who} {part} in the length sync, and left no trace here{waited}."
    else:
        text = f"There is no sign of {who} of {job.world_size}: not started, not patched, not traced, or not yet at a "
        text += "first encoder call."
        next_step = "Look at its stderr for nemo_patches' line `patched ...`, and run `nemo-patches status` in its "
        next_step += "environment; every rank must have the patch, and NEMO_PATCHES_TRACE."
    evidence = (f"{len(job.traces)} of {job.world_size} ranks have a trace",)
    return [Finding(ids.UNTRACED, WARNING, absent, text, next_step, evidence=evidence)]


def different_sync(job: TracedJob, cases: list[Case]) -> list[Finding]:
    """Ranks that do not sync their length, while others do and wait for them in vain at every call."""
    findings = []
    for case in cases:
        outcomes = {rank: set(track.calls.outcome) - {UNSYNCED} for rank, track in case.tracks.items()}
        off = [rank for rank, of_rank in outcomes.items() if of_rank == {LOCAL}]
        on = [rank for rank, of_rank in outcomes.items() if of_rank - {LOCAL, ENDED}]
        if not on or not off:
            continue
        odd = off if len(off) <= len(on) else on
        text = f"{case.name} does not sync its length on {named(off)} (sync_max_audio_length is false, or sync=local), "
        text += f"and does on {named(on)}, which wait in vain."
        next_step = "Give every rank the same config and the same settings."
        shown = sorted(odd)[:2] + sorted({*off, *on} - set(odd))[:2]
        evidence = tuple(f"rank {rank}: {_own_sync(job, rank, rank in off)}" for rank in shown)
        found = Finding(ids.DIFFERENT_SYNC, CRITICAL, tuple(odd), text, next_step, case.name, evidence=evidence)
        findings.append(found)
    return findings


def _own_sync(job: TracedJob, rank: int, is_off: bool) -> str:
    mode = safe(job.traces[rank].header.settings.get("sync", "?"))
    return "sync_max_audio_length is false" if is_off and mode != "local" else f"sync={mode}"


# A header leaves out settings with these values.
_DEFAULTS = {setting.name: setting.text(value) for setting, value in OptionSettings().items()}


def different_ranks(job: TracedJob, cases: list[Case], without_sync: bool = False) -> list[Finding]:
    """Versions, settings and inputs that are not the same on all ranks.

    without_sync: leave out what different_sync() has reported.
    """
    headers = {rank: trace.header for rank, trace in job.traces.items()}
    differences = [
        *_differences("version of", {rank: header.versions for rank, header in headers.items()}),
        *_differences("setting", {rank: _compared(header.settings, without_sync) for rank, header in headers.items()}),
        *_differences("checks", {rank: {"": ",".join(header.checks)} for rank, header in headers.items()}),
    ]
    for case in cases:
        differences += _differences(f"{case.name}:", {rank: _usual_input(track) for rank, track in case.tracks.items()})
    return differences[:_MOST_DIFFERENCES]


def _compared(settings: Mapping[str, str], without_sync: bool) -> dict[str, str]:
    left_out = _MAY_DIFFER | {"sync"} if without_sync else _MAY_DIFFER
    return {name: value for name, value in {**_DEFAULTS, **settings}.items() if name not in left_out}


def _usual_input(track: Track) -> dict[str, str]:
    """The kind of input that most calls of this rank had."""
    calls = sum(track.inputs.values())
    usual: Input | None = max(track.inputs, key=lambda kind: track.inputs[kind], default=None)
    if usual is None or calls <= _TOO_FEW_CALLS or track.inputs[usual] < _USUAL_SHARE * calls:
        return {}
    return {"input": str(usual)}


def different_batches(cases: list[Case]) -> list[Finding]:
    """Ranks whose batches have other sizes than most ranks' in nearly all training calls.

    Sizes that vary from batch to batch on every rank, as bucketing makes them, overlap, and are no finding.
    """
    findings = []
    for case in cases:
        sizes = {
            rank: _usual_sizes(track.batches)
            for rank, track in sorted(case.tracks.items())
            if sum(track.batches.values()) >= _ENOUGH_BATCHES and rank in case.sure
        }
        alike = {rank: [other for other in sizes if _overlap(sizes[rank], sizes[other])] for rank in sizes}
        usual = max(alike.values(), key=len, default=[])
        odd = [rank for rank in sizes if rank not in usual and 2 * len(alike[rank]) <= len(sizes)]
        if odd:
            theirs = {rank: str(low) if low == high else f"{low} to {high}" for rank, (low, high) in sizes.items()}
            text = f"The batch size of {case.name} is not the same on all ranks, in nearly all training calls: "
            text += f"{theirs[odd[0]]} on {named(odd)}, {theirs[usual[0]]} on {named(usual)}."
            next_step = "Give every rank the same data pipeline and batch size: a rank with larger batches is waited "
            next_step += "for on every step, and its samples weigh less in the gradient."
            evidence = tuple(f"rank {rank}: {theirs[rank]}" for rank in odd[:4] + usual[:2])
            findings.append(Finding(ids.DIFFERENT, WARNING, tuple(odd), text, next_step, case.name, evidence=evidence))
    return findings


def _usual_sizes(counts: Mapping[int, int]) -> tuple[int, int]:
    """The range of the middle nine tenths of the batches: the last one of an epoch may be smaller."""
    sizes = sorted(counts)
    upto = np.cumsum([counts[size] for size in sizes])  # batches of up to that size
    low, high = np.searchsorted(upto, (0.05 * upto[-1], 0.95 * upto[-1]))
    return sizes[low], sizes[high]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _differences(what: str, values: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    """For each name whose value differs, about the ranks that have another value than most."""
    for name in sorted({name for of_rank in values.values() for name in of_rank}):
        by_value: dict[Hashable, list[int]] = defaultdict(list)
        for rank, of_rank in values.items():
            if name in of_rank:
                by_value[of_rank[name]].append(rank)
        if len(by_value) < 2:
            continue
        usual, _ = Counter({value: len(sharing) for value, sharing in by_value.items()}).most_common(1)[0]
        odd = tuple(sorted(rank for value, sharing in by_value.items() if value != usual for rank in sharing))
        title = f"{what} {safe(name)}".strip()
        other = next(value for value, sharing in by_value.items() if odd[0] in sharing)
        text = (
            f"{title} is not the same on all ranks: {safe(str(other))} on {named(by_value[other])}, "
            f"{safe(str(usual))} on {named(sorted(by_value[usual]))}."
        )
        evidence = tuple(
            f"{safe(str(value))}: {named(sorted(sharing))}" for value, sharing in list(by_value.items())[:6]
        )
        yield Finding(ids.DIFFERENT, WARNING, odd, text[0].upper() + text[1:], _NEXT_ALIKE, evidence=evidence)
