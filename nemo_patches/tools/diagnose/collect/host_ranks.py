"""Which processes of this host are ranks, and of which job, by their launchers' variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_patches.tools.diagnose.collect.proc_files import (
    link,
    process_ids,
    read,
    stat_fields,
    variables,
)

LIGHTNING = "Lightning's launcher"
ORDER = "the order of --pids"
SLURM = "Slurm"
_PYTHON = re.compile(r"(python[0-9.]*|pypy[0-9.]*|pt_data_worker)( \(deleted\))?$")
# The launcher, and its variables: the rank, how many there are, how many of them on this host.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (SLURM, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE"),
)
_MOST_WORKERS = 64


@dataclass(frozen=True)
class HostRank:
    """A rank's topmost Python process. job: an id that differs between jobs on this host.
    found_by: the launcher whose variables it has. workers: Python processes below it, such as its
    data loader's.
    """

    rank: int
    pid: int
    world_size: int
    local_world_size: int
    job: str = ""
    found_by: str = ""
    workers: tuple[int, ...] = ()


@dataclass(frozen=True)
class HostProcess:
    pid: int
    parent: int
    is_python: bool
    variables: Mapping[str, str]


def processes() -> dict[int, HostProcess]:
    """The processes of this host that may be looked at."""
    found = {}
    for pid in process_ids():
        fields = stat_fields(f"/proc/{pid}/stat")
        if len(fields) > 1:
            of_python = is_python(pid)
            found[pid] = HostProcess(
                pid, int(fields[1]), of_python, variables(pid) if of_python else {}
            )
    return found


def is_python(pid: int) -> bool:
    # None of one that has ended, or that is another user's.
    program = link(f"/proc/{pid}/exe")
    return bool(_PYTHON.search(program or read(f"/proc/{pid}/comm").strip()))


def ranks(
    among: Mapping[int, HostProcess], pids: Sequence[int] = (), job: str = ""
) -> list[HostRank]:
    """pids: only these, which are ranks whatever their variables. job: only those with this working
    directory, or of the job with this name or Slurm id, of an array as 4711_3.
    """
    if pids:
        found = _given(among, pids)
    else:
        told = {
            pid: rank
            for pid, process in among.items()
            if (rank := _rank_of(process, among)) is not None
        }
        for other in _agents(told, among) | _own_step(told, among):
            del told[other]
        found = [
            rank
            for pid, rank in told.items()
            if not _is_below(among[pid], rank, told, among)
        ]
    if job:
        found = [rank for rank in found if _is_of(job, rank, among[rank.pid])]
    tops = {rank.pid for rank in found}
    found = [_with_workers(rank, among, tops) for rank in found]
    return sorted(found, key=lambda rank: (rank.job, rank.rank, rank.pid))


def closed_to_us() -> list[int]:
    """Python processes of other users, whose variables may not be read."""
    return [
        pid
        for pid in process_ids()
        if read(f"/proc/{pid}/comm").startswith("python")
        and not os.access(f"/proc/{pid}/environ", os.R_OK)
    ]


def hides_others() -> bool:
    """Whether /proc is mounted with hidepid, so that this user sees no other's processes."""
    mounts = re.findall(r" /proc .* - proc .*", read("/proc/self/mountinfo"))
    return "hidepid=" in "".join(mounts[-1:]) and not read("/proc/1/stat")


def with_torch(among: Mapping[int, HostProcess]) -> list[int]:
    """Python processes that have loaded torch's distributed part, whichever job they are of."""
    return [
        pid
        for pid, process in among.items()
        if process.is_python and _has_torch(process)
    ]


def _has_torch(process: HostProcess) -> bool:
    return "libtorch" in read(f"/proc/{process.pid}/maps")


def _given(among: Mapping[int, HostProcess], pids: Sequence[int]) -> list[HostRank]:
    told = [_rank_of(among[pid], among) if pid in among else None for pid in pids]
    known = [rank for rank in told if rank is not None]
    if len({rank.rank for rank in known}) == len(pids):
        # Ranks that were not given may run here, too.
        return [
            rank if rank.world_size == len(pids) else replace(rank, local_world_size=0)
            for rank in known
        ]
    return [
        HostRank(number, pid, len(pids), len(pids), found_by=ORDER)
        for number, pid in enumerate(pids)
    ]


def _rank_of(process: HostProcess, among: Mapping[int, HostProcess]) -> HostRank | None:
    if not process.is_python:
        return None
    given = process.variables
    for launcher, rank, world_size, local_world_size in _LAUNCHERS:
        if given.get(rank, "").isdecimal() and given.get(world_size, "").isdecimal():
            local = re.fullmatch(r"(\d+)(\(x\d+\))?", given.get(local_world_size, ""))
            sizes = int(given[world_size]), int(local[1]) if local else 0
            return HostRank(
                int(given[rank]), process.pid, *sizes, _job(given), launcher
            )
    return _lightnings(process, among)


def _is_told(process: HostProcess) -> bool:
    """Whether its variables have its rank, as under launchers other than Lightning's."""
    return any(
        process.variables.get(rank, "").isdecimal() for _, rank, _, _ in _LAUNCHERS
    )


def _lightnings(
    process: HostProcess, among: Mapping[int, HostProcess]
) -> HostRank | None:
    """Lightning's launcher: the first rank of a host, which has no variables, is the parent of the
    others.
    """
    is_first = "LOCAL_RANK" not in process.variables
    parent = process.pid if is_first else process.parent
    started = [
        other.variables
        for other in among.values()
        if other.parent == parent
        and other.is_python
        and "LOCAL_RANK" in other.variables
        and not _is_told(other)
    ]
    if not started:
        return None
    given = started[0] if is_first else process.variables
    size = len({variables["LOCAL_RANK"] for variables in started}) + 1
    node = given.get("NODE_RANK", "0")
    local_rank = "0" if is_first else given["LOCAL_RANK"]
    if not (node.isdecimal() and local_rank.isdecimal()):
        return None
    world_size = given.get("WORLD_SIZE", "")
    return HostRank(
        int(node) * size + int(local_rank),
        process.pid,
        max(size, int(world_size) if world_size.isdecimal() else 0),
        size,
        _job(given),
        LIGHTNING,
    )


def _job(given: Mapping[str, str]) -> str:
    if port := given.get("MASTER_PORT", ""):
        return f"{given.get('MASTER_ADDR', '')}:{port}"
    return given.get("SLURM_JOB_ID", "")


def _agents(told: Mapping[int, HostRank], among: Mapping[int, HostProcess]) -> set[int]:
    """Processes with a rank's variables that are launchers themselves: torchrun under srun, or in a
    pod with RANK.
    """
    agents = set()
    for pid, rank in told.items():
        given = among[pid].variables
        for above in _above(among[pid], among):
            theirs = among[above.pid].variables
            other = told.get(above.pid, rank)
            is_torchruns = (
                "TORCHELASTIC_RUN_ID" in given and "TORCHELASTIC_RUN_ID" not in theirs
            )
            is_anothers = (
                "RANK" in given and "RANK" not in theirs and other.found_by != LIGHTNING
            )
            if is_torchruns or (
                is_anothers
                and (rank.rank, rank.world_size) != (other.rank, other.world_size)
            ):
                agents.add(above.pid)
    return agents & told.keys()


def _own_step(
    told: Mapping[int, HostRank], among: Mapping[int, HostProcess]
) -> set[int]:
    """This program and its other tasks here, where srun has started it: they have a rank's
    variables. A rank that has started it itself (on_stall) has loaded torch.
    """
    own = among.get(os.getpid())
    line = [own, *_above(own, among)] if own is not None else []
    tops = [each for each in line if each.pid in told]
    if not tops or told[tops[-1].pid].found_by != SLURM or _has_torch(tops[-1]):
        return set()
    step = _step(tops[-1])
    return {
        pid
        for pid, rank in told.items()
        if rank.found_by == SLURM
        and _step(among[pid]) == step
        and (rank.world_size > 1 or among[pid] in tops)
    }


def _step(process: HostProcess) -> tuple[str | None, str | None]:
    given = process.variables
    return given.get("SLURM_JOB_ID"), given.get("SLURM_STEP_ID")


def _above(
    process: HostProcess, among: Mapping[int, HostProcess]
) -> Iterator[HostProcess]:
    """Its parent, its parent's parent, and so on."""
    passed = {process.pid}
    while (above := among.get(process.parent)) is not None and above.pid not in passed:
        yield above
        passed.add(above.pid)
        process = above


def _is_below(
    process: HostProcess,
    rank: HostRank,
    told: Mapping[int, HostRank],
    among: Mapping[int, HostProcess],
) -> bool:
    """Whether it is a child of a rank, with that one's variables, and no rank itself. A shell may
    be between them.
    """
    other = next(
        (told[above.pid] for above in _above(process, among) if above.pid in told), None
    )
    return other is not None and (
        other.rank == rank.rank or LIGHTNING not in (rank.found_by, other.found_by)
    )


def _with_workers(
    rank: HostRank, among: Mapping[int, HostProcess], tops: set[int]
) -> HostRank:
    found, rest = list[int](), [rank.pid]
    while rest and len(found) < _MOST_WORKERS:
        parent = rest.pop(0)
        children = [
            process
            for process in among.values()
            if process.parent == parent and process.pid not in tops
        ]
        rest += [process.pid for process in children]
        found += [process.pid for process in children if process.is_python]
    return replace(rank, workers=tuple(found))


def _is_of(job: str, rank: HostRank, process: HostProcess) -> bool:
    given = process.variables
    element = f"{given.get('SLURM_ARRAY_JOB_ID')}_{given.get('SLURM_ARRAY_TASK_ID')}"
    if job in (rank.job, given.get("SLURM_JOB_ID"), element):  # as squeue names it
        return True
    try:
        return os.path.samefile(f"/proc/{rank.pid}/cwd", job)
    except OSError:
        return False
