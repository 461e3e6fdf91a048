"""Look at the jobs that run on this host, often enough to tell a wait from a step."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from nemo_patches.tools.diagnose.collect import host_ranks
from nemo_patches.tools.diagnose.collect.belongings import Belonging, belongings
from nemo_patches.tools.diagnose.collect.host_ranks import HostRank
from nemo_patches.tools.diagnose.collect.proc_files import has_own_pids
from nemo_patches.tools.diagnose.collect.samples import Sample, take

FORMAT, WHAT = 1, "stacks"
STUCK_AFTER_S = 30.0  # a wait that is younger may end by itself
_BETWEEN_LOOKS_S = 2.0
LONGER_S = 5.0  # than that: no more looks
# Without -N srun starts it on one node only, and without -n once for each task.
_BY_SRUN = (
    "srun --overlap --jobid J -N NODES -n NODES --ntasks-per-node=1 sh -c"
    " 'nemo-patches stacks --json > $(hostname).json'"
)


class NothingToLookAtError(Exception):
    """No rank was found. The text says why, and what to do."""


@dataclass(frozen=True)
class SampledRank:
    """samples: the first and the last that were taken."""

    rank: HostRank
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class HostJob:
    """One job on one host. at: seconds since 1970, when the last samples were taken. in_container:
    the pids are a container's.
    """

    host: str
    at: float
    ranks: tuple[SampledRank, ...]
    belongings: tuple[Belonging, ...] = ()
    in_container: bool = False

    @property
    def name(self) -> str:
        return self.ranks[0].rank.job if self.ranks else ""


@dataclass(frozen=True)
class HostFile:
    """What `nemo-patches stacks --json` prints."""

    what: str
    format: int
    jobs: tuple[HostJob, ...]

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def pids_in(text: str) -> list[int]:
    """The value of --pids. Raises NothingToLookAtError."""
    if not re.fullmatch(r"([0-9]{1,9}(,[0-9]{1,9})*)?", text):
        raise NothingToLookAtError(
            f"--pids={text[:100]}: allowed are process ids with commas between:"
            " 4711,4712"
        )
    return list(dict.fromkeys(int(pid) for pid in text.split(",") if pid))


def _or_root() -> str:
    return ", or root" if os.geteuid() else ""


def jobs_here(job: str = "", pids: Sequence[int] = ()) -> list[list[HostRank]]:
    """The ranks of each job that runs on this host; within a job of Slurm's only that one's. job: a
    folder that they work in, or the job's name. Raises NothingToLookAtError.
    """
    own = "" if job or pids else os.environ.get("SLURM_JOB_ID", "")
    hidden = ""
    if host_ranks.hides_others():
        hidden = (
            "; other users' processes are hidden here (/proc is mounted with hidepid):"
            f" be the job's user{_or_root()}"
        )
    among = host_ranks.processes()
    if gone := [pid for pid in pids if pid not in among]:
        raise NothingToLookAtError(
            f"--pids: no process {', '.join(map(str, gone))} runs on this host{hidden}"
        )
    jobs: dict[str, list[HostRank]] = {}
    for rank in host_ranks.ranks(among, pids, job or own):
        jobs.setdefault(rank.job, []).append(rank)
    if jobs:
        return list(jobs.values())
    if job:
        raise NothingToLookAtError(
            f"--job={job}: no rank of a job works there, or has that job's name; leave"
            f" --job out to see all jobs{hidden}"
        )
    if own:
        raise NothingToLookAtError(
            f"no rank of Slurm's job {own}, in which this is, runs on this host; for"
            " all jobs: `env -u SLURM_JOB_ID nemo-patches ...`"
        )
    if closed := host_ranks.closed_to_us():
        some = ", ".join(map(str, closed[:8]))
        raise NothingToLookAtError(
            f"Python processes of other users run here (pid {some}): be that"
            f" user{_or_root()}"
        )
    if hidden:
        raise NothingToLookAtError(f"no rank is seen on this host{hidden}")
    with_torch = ", ".join(map(str, host_ranks.with_torch(among)))
    if not with_torch and shutil.which("srun"):
        raise NothingToLookAtError(
            f"no rank runs on this host; on all hosts of Slurm's job J: `{_BY_SRUN}`,"
            " then `nemo-patches diagnose .`; of a job array J is the element's own"
            " number, which `squeue -o '%A %i'` shows"
        )
    what = f"--pids {with_torch}" if with_torch else "--pids P,P"
    raise NothingToLookAtError(
        "no process here has a launcher's variables (RANK, LOCAL_RANK, SLURM_PROCID,"
        " OMPI_COMM_WORLD_RANK): give its ranks' processes in the order of the ranks,"
        f" with {what}"
    )


def look(
    ranks: Sequence[HostRank],
    is_enough: Callable[[HostJob], bool],
    between_s: float = _BETWEEN_LOOKS_S,
    at_most_s: float = STUCK_AFTER_S + LONGER_S,
) -> HostJob:
    """Look at the ranks of a job twice, and again until `is_enough`, for at_most_s, or until
    Ctrl-C.
    """
    began = time.monotonic()
    here = belongings(ranks)  # of a rank that ends meanwhile nothing would be found
    first = take(ranks)
    last = first
    is_over = False
    while not is_over:
        try:
            time.sleep(between_s)
            last = take(ranks, last)
            is_over = (
                is_enough(_job(ranks, first, last))
                or time.monotonic() - began > at_most_s
            )
        except KeyboardInterrupt:
            is_over = True
    job = _job(ranks, first, last)
    later = belongings(one.rank for one in job.ranks)
    return replace(job, belongings=tuple(dict.fromkeys((*here, *later))))


def _job(
    ranks: Sequence[HostRank], first: Mapping[int, Sample], last: Mapping[int, Sample]
) -> HostJob:
    sampled = tuple(
        SampledRank(rank, (first[rank.pid], last[rank.pid])) for rank in ranks
    )
    host, now = socket.gethostname(), time.time()
    return HostJob(host, now, sampled, in_container=has_own_pids())


def has_settled(job: HostJob) -> bool:
    """Whether each rank has run other code meanwhile, or not run for long: stacks.pyz cannot judge
    any waits.
    """
    return all(_has_settled(*rank.samples) for rank in job.ranks)


def _has_settled(first: Sample, last: Sample) -> bool:
    if first.main is None or last.main is None:
        return True
    if first.main.counters != last.main.counters or first.frames != last.frames:
        return True
    return last.uptime_s - first.uptime_s + (first.slept_s or 0.0) >= STUCK_AFTER_S


def main() -> None:
    """The entry point of stacks.pyz, for hosts without nemo_patches: print this host's JSON."""
    parser = argparse.ArgumentParser(
        prog="stacks.pyz",
        description=(
            "Print where the ranks on this host are, as JSON for `nemo-patches"
            f" diagnose`. Takes up to {STUCK_AFTER_S + LONGER_S:.0f} s."
        ),
    )
    parser.add_argument(
        "--job",
        default="",
        metavar="JOB",
        help="only ranks of this job, or that work in this folder",
    )
    parser.add_argument(
        "--pids",
        default="",
        metavar="PID,PID",
        help="only these, in the order of the ranks",
    )
    given = parser.parse_args()
    limit_s = STUCK_AFTER_S + LONGER_S
    print(
        f"stacks.pyz: looks at this host's ranks, for up to {limit_s:.0f} s",
        file=sys.stderr,
    )
    try:
        jobs = tuple(
            look(ranks, has_settled)
            for ranks in jobs_here(given.job, pids_in(given.pids))
        )
    except NothingToLookAtError as error:
        print(f"stacks.pyz: {error}", file=sys.stderr)
        sys.exit(2)
    print(HostFile(WHAT, FORMAT, jobs).as_json())
