"""A job that runs on this host, whatever it runs: its ranks' stacks, and all that lies beside them, judged together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nemo_patches.channel.safe_text import safe
from nemo_patches.tools.diagnose import reading
from nemo_patches.tools.diagnose.collect.belongings import RAS, Belonging
from nemo_patches.tools.diagnose.collect.host_jobs import HostJob, look
from nemo_patches.tools.diagnose.collect.host_ranks import HostRank
from nemo_patches.tools.diagnose.facts import Evidence
from nemo_patches.tools.diagnose.findings import Report
from nemo_patches.tools.diagnose.folder import UnreadableError
from nemo_patches.tools.diagnose.judge import STUCK_AFTER_S, judge, rule
from nemo_patches.tools.diagnose.sources import stacks
from nemo_patches.tools.diagnose.watch import once

_MOST_SHOWN = 6


def diagnose(ranks: Sequence[HostRank], stuck_after_s: float = STUCK_AFTER_S) -> Report:
    """Look until the ranks go on, or wait for longer than this; then read what lies beside them."""
    job = look(ranks, lambda seen: not rule(_seen(seen), stuck_after_s).is_too_early, at_most_s=stuck_after_s + 5.0)
    beside, problems = _beside(job.belongings)
    evidence = reading.joined([("stacks", _seen(job)), *beside], problems)
    evidence.summary += _how(job)
    evidence.runs = True
    return judge(evidence, f"job {job.name or 'without a name'} on {job.host}", stuck_after_s)


def _seen(job: HostJob) -> Evidence:
    return Evidence(stacks.of_samples(job), world_size=max(one.rank.world_size for one in job.ranks))


def _beside(belongings: Sequence[Belonging]) -> tuple[list[tuple[str, Evidence]], list[str]]:
    """What each thing tells that lies there; a thing that cannot be read is a problem, and no more."""
    parts: list[tuple[str, Evidence]] = []
    problems: list[str] = []
    for one in belongings:
        if one.kind == RAS:
            continue
        try:
            found = reading.find([Path(one.path)])
            parts += reading.read(found)
            parts += [("traces", reading.of_traces(*once(folder))) for folder in found.traces]
        except (UnreadableError, OSError) as error:
            problems.append(safe(f"{one.kind} {one.path}: {error}"))
    return parts, problems


def _how(job: HostJob) -> list[str]:
    """How it was found, and what else lies there."""
    by = ", ".join(sorted({one.rank.found_by for one in job.ranks}))
    lines = [f"2 looks at {len(job.ranks)} ranks on {job.host}; ranks found by {by}."]
    if job.belongings:
        also = "; ".join(f"{one.kind} {safe(one.path)}" for one in job.belongings[:_MOST_SHOWN])
        lines.append(f"Also there: {also}.")
    return lines
