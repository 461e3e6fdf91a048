"""`nemo-patches stacks`: collect the stacks of this host's ranks, and judge nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from nemo_patches.text import safe
from nemo_patches.tools import counted
from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose.accounts import Account, accounts_of
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
from nemo_patches.tools.diagnose.collect.samples import NO_PY_SPY, py_spy
from nemo_patches.tools.diagnose.facts import Evidence
from nemo_patches.tools.diagnose.running import is_told
from nemo_patches.tools.diagnose.sources.stacks import of_samples

_MOST_RANKS = 64  # that are printed of a job; --json has all


def run(json: bool, pids: str, folder: Path | None) -> int:
    """Print it, and return the exit code: 2 where no stack could be read. Raises
    NothingToLookAtError.
    """
    jobs = [
        look(ranks, is_told) for ranks in jobs_here(str(folder or ""), pids_in(pids))
    ]
    is_read = any(one.samples[-1].threads for job in jobs for one in job.ranks)
    if json:
        print(HostFile(WHAT, FORMAT, tuple(jobs)).as_json())
        if not is_read:
            print(
                "nemo-patches stacks: no stack could be read:"
                f" {jobs[0].ranks[0].samples[-1].error}",
                file=sys.stderr,
            )
        return 0 if is_read else 2
    for job in jobs:
        print("\n".join(_lines(job)))
    if not py_spy():
        print(NO_PY_SPY)
    return 0 if is_read else 2


def _lines(job: HostJob) -> Iterator[str]:
    by = job.ranks[0].rank.found_by
    name = f" {safe(job.name, 100)}" if job.name else ""
    ranks = counted(len(job.ranks), "rank")
    yield f"job{name} on {safe(job.host, 100)}: {ranks}, found by {by}"
    facts = of_samples(job)
    accounts = accounts_of(Evidence(facts))
    for rank in list(dict.fromkeys(fact.rank for fact in facts))[:_MOST_RANKS]:
        yield from _of_rank(accounts[rank])
    if len(accounts) > _MOST_RANKS:
        yield f"  ... and {len(accounts) - _MOST_RANKS} more ranks; --json has them all"
    for line in gpus.of_ranks(one.rank for one in job.ranks):
        yield f"  {safe(line)}"
    for belonging in job.belongings:
        yield f"  also there: {belonging.kind} {safe(belonging.path, 300)}"


def _of_rank(account: Account) -> Iterator[str]:
    fate, place, pid = account.fate, account.place, account.member.pid
    told = (
        []
        if fate.kind in ("", fates.RUNS)
        else [": ".join(filter(None, (fate.kind, fate.text)))]
    )
    told += [f"waits in {place.seat}"] if place.collective else []
    told += [f"in {safe(place.where)}"] if place.where else []
    told += [f"{name} = {value}" for name, value in list(place.counters.items())[:4]]
    if account.moved:
        told.append(f"moved: {account.motion.by}")
    elif account.still_s is not None:
        told.append(f"has not moved for {account.still_s:.0f} s")
    yield (
        f"  rank {account.rank}{f' (pid {pid})' if pid else ''}:"
        f" {safe('; '.join(told))}"
    )
    for detail in place.details:
        yield f"    {safe(detail)}"
