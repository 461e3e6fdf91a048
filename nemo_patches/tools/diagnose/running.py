"""A job that runs on this host, with or without nemo_patches:
its ranks' stacks and files, judged together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_patches.text import safe
from nemo_patches.tools import counted
from nemo_patches.tools.diagnose import conditions, reading
from nemo_patches.tools.diagnose.collect import gpus
from nemo_patches.tools.diagnose.collect.belongings import Belonging
from nemo_patches.tools.diagnose.collect.host_jobs import (
    LONGER_S,
    STUCK_AFTER_S,
    HostJob,
    look,
)
from nemo_patches.tools.diagnose.collect.host_ranks import HostRank
from nemo_patches.tools.diagnose.findings import Diagnosis
from nemo_patches.tools.diagnose.judge import is_too_early, judge
from nemo_patches.tools.diagnose.rank_facts import (
    Evidence,
    Motion,
    Place,
    UnreadableError,
)
from nemo_patches.tools.diagnose.sources import stack_files

_MOST_SHOWN = 6


def diagnose(
    ranks: Sequence[HostRank],
    stuck_after_s: float = STUCK_AFTER_S,
    also: Sequence[tuple[str, Evidence]] = (),
) -> Diagnosis:
    """The report on what evidence_of() gathers."""
    source, evidence = evidence_of(ranks, stuck_after_s, also)
    return judge(evidence, source, stuck_after_s)


def evidence_of(
    ranks: Sequence[HostRank],
    stuck_after_s: float = STUCK_AFTER_S,
    also: Sequence[tuple[str, Evidence]] = (),
) -> tuple[str, Evidence]:
    """Look until the ranks move, or have waited for longer than this; then read the job's files.

    also: what is known from elsewhere, by source. Returns the job's name and host, too.
    """
    found = f"{counted(len(ranks), 'rank')} found"
    _say(found, "looking")

    def is_enough(seen: HostJob) -> bool:
        evidence = _seen(seen)
        known = [
            fact.value.still_s
            for fact in evidence.facts
            if isinstance(fact.value, Motion) and fact.value.still_s is not None
        ]
        if known:
            age = f"the wait is {min(known):.0f} s old"
            _say(found, f"{age}; looking until {stuck_after_s:.0f} s")
        return not is_too_early(evidence, stuck_after_s)

    job = look(ranks, is_enough, at_most_s=stuck_after_s + LONGER_S)
    _say()
    problems: list[str] = []
    seen = _seen(job)
    beside = [
        (name, _of_this_launch(name, part, seen))
        for name, part in _beside(job.belongings, problems)
    ]
    evidence = reading.joined([("stacks", seen), *also, *beside], problems)
    evidence.summary += _how(job)
    return f"job {job.name or 'without a name'} on {job.host}", evidence


def _say(found: str = "", text: str = "") -> None:
    """On a terminal, one line while a job is looked at; without text it goes."""
    if sys.stderr is not None and sys.stderr.isatty():
        line = f"{found}; {text} (Ctrl-C: judge now)" if text else ""
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def is_told(job: HostJob, stuck_after_s: float = STUCK_AFTER_S) -> bool:
    """Whether no further look is needed: the ranks move, or have waited for longer than this."""
    return not is_too_early(_seen(job), stuck_after_s)


def _of_this_launch(name: str, part: Evidence, seen: Evidence) -> Evidence:
    """Drop a source that reports the end of a rank that runs: a log may begin with earlier
    launches.

    A rank that hangs while its interpreter ends, after an exception, is no longer in its script.
    """
    in_script = {
        fact.rank
        for fact in seen.facts
        if isinstance(fact.value, Place) and _is_in_script(fact.value)
    }
    ended = [
        fact
        for fact in part.facts
        if fact.rank in in_script and fact.condition_kind in conditions.OVER
    ]
    if not ended:
        return part
    first = ended[0]
    text = (
        f"{name}: by {first.cite} rank {first.rank} {first.condition_kind}, and it runs: told"
        " is of an earlier launch, or of an exception that was caught; not taken into"
        " account"
    )
    return Evidence(earlier=[*part.earlier, safe(text)], problems=part.problems)


def _is_in_script(place: Place) -> bool:
    return bool(place.way) and place.way[0].startswith(
        ("<module>", "_bootstrap", "_run_module_as_main")
    )


def _seen(job: HostJob) -> Evidence:
    return Evidence(
        stack_files.of_samples(job),
        world_size=max(one.rank.world_size for one in job.ranks),
    )


def _beside(
    belongings: Sequence[Belonging], problems: list[str]
) -> list[tuple[str, Evidence]]:
    """The evidence of each file and folder; one that cannot be read is listed as a problem."""
    parts: list[tuple[str, Evidence]] = []
    for one in belongings:
        try:
            parts += reading.read(reading.find([Path(one.path)]))
        except (UnreadableError, OSError) as error:
            problems.append(safe(f"{one.kind} {one.path}: {error}"))
    return parts


def _how(job: HostJob) -> list[str]:
    by = ", ".join(sorted({one.rank.found_by for one in job.ranks}))
    ranks = counted(len(job.ranks), "rank")
    lines = [f"{ranks} on {job.host}, looked at twice; found by {by}."]
    lines += map(safe, gpus.of_ranks(one.rank for one in job.ranks))
    if job.belongings:
        also = "; ".join(
            f"{one.kind} {safe(one.path)}" for one in job.belongings[:_MOST_SHOWN]
        )
        lines.append(f"Also there: {also}.")
    return lines
