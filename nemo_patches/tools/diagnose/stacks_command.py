"""`nemo-patches stacks`: collect the stacks of this host's ranks, and judge nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from nemo_patches.text import named, safe
from nemo_patches.tools import counted
from nemo_patches.tools.diagnose.accounts import accounts_of
from nemo_patches.tools.diagnose.collect import gpus
from nemo_patches.tools.diagnose.collect.host_jobs import (
    FORMAT,
    WHAT,
    HostFile,
    HostJob,
    jobs_here,
    look,
    pids_in,
)
from nemo_patches.tools.diagnose.rank_facts import Evidence
from nemo_patches.tools.diagnose.running import is_told
from nemo_patches.tools.diagnose.sources.stack_files import of_samples
from nemo_patches.tools.diagnose.verdicts import evidence_of


def run(json: bool, pids: str, folder: Path | None) -> int:
    """Print it, and return the exit code: 2 where no stack could be read. Raises
    NothingToLookAtError.
    """
    jobs = [
        look(ranks, is_told) for ranks in jobs_here(str(folder or ""), pids_in(pids))
    ]
    last = [one.samples[-1] for job in jobs for one in job.ranks]
    is_read = any(sample.threads for sample in last)
    if json:
        print(HostFile(WHAT, FORMAT, tuple(jobs)).as_json())
    for job in () if json else jobs:
        print("\n".join(_lines(job)))
    if not is_read:
        why = f"no stack could be read: {last[0].error}"
        print(f"nemo-patches stacks: {why}", file=sys.stderr)
    return 0 if is_read else 2


def _lines(job: HostJob) -> Iterator[str]:
    by = job.ranks[0].rank.found_by
    name = f" {safe(job.name, 100)}" if job.name else ""
    ranks = counted(len(job.ranks), "rank")
    yield f"job{name} on {safe(job.host, 100)}: {ranks}, found by {by}"
    accounts = accounts_of(Evidence(of_samples(job))).values()
    for line in evidence_of(one for one in accounts if one.member_fact):
        yield f"  {safe(line)}"
    if absent := [one.rank for one in accounts if not one.member_fact]:
        # Its launcher's variables say only how many ranks a host has, not which.
        yield f"  {named(absent)}: no process on this host: ended, or on another host"
    for line in gpus.of_ranks(one.rank for one in job.ranks):
        yield f"  {safe(line)}"
    for belonging in job.belongings:
        yield f"  also there: {belonging.kind} {safe(belonging.path, 300)}"
