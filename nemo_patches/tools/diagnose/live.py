"""A running job, asked through the Unix socket of one of its ranks on this host: where all ranks are. Needs no torch.

Nothing is written. Whichever rank answers first has asked all others, as it does for a stall report.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_patches.channel.safe_text import safe
from nemo_patches.stall.job_folder import private_folders
from nemo_patches.stall.job_socket import ENDING, near, process_of
from nemo_patches.stall.rank_state import CALLING
from nemo_patches.stall.rank_text import ELSEWHERE, LEFT, SILENT, UNANNOUNCED, named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding, RankSummary, Report
from nemo_patches.tools.diagnose.folder import UnreadableError

_ANSWER_S = 15.0  # a rank waits some seconds itself, for others that do not answer
_LONGEST_ANSWER = 1 << 20  # bytes
_MOST_RANKS = 1 << 20
_IDS = {ELSEWHERE: ids.BEFORE_ENCODER, SILENT: ids.SILENT, LEFT: ids.ENDED, UNANNOUNCED: ids.MISSING_RANK}
_HERE = "run it on a host of the job, as the same user; nemo_patches must be on there"


@dataclass(frozen=True)
class Group:
    """Ranks at one place, as the job tells of them."""

    ranks: tuple[int, ...]
    kind: str
    host: str
    pid: int
    calls: int
    idle_s: float
    place: str


@dataclass(frozen=True)
class Told:
    """A rank's answer."""

    size: int
    level: str
    text: str
    missing: tuple[int, ...]
    groups: tuple[Group, ...]


def diagnose_job(folder: Path) -> Report:
    """folder: the job's own, or one that its processes work in, or that their dumps go to. Raises UnreadableError."""
    sockets = _sockets(folder)
    problems: list[str] = []
    for file in sockets:
        try:
            return _report(folder, _told(_ask(file)), tuple(problems))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(f"{file.name}: {_why(error)}")
    raise UnreadableError(f"--job={folder}: no rank of the job answers here: {'; '.join(problems)}")


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return str(error.strerror or error)
    return "what it says cannot be read"


def _sockets(folder: Path) -> list[Path]:
    """Of the one job that is meant, in the order of the ranks. Raises UnreadableError."""
    if not os.path.isdir(folder):  # Path's own raises for a name that is too long
        raise UnreadableError(f"--job={folder} is no folder; wanted is the job's: {_HERE}")
    found: dict[Path, list[Path]] = {}
    with contextlib.suppress(OSError):
        for file in private_folders().glob(f"*/*{ENDING}"):
            if _means(folder, file):
                found.setdefault(file.parent, []).append(file)
    for file in folder.glob(f"*{ENDING}"):
        found.setdefault(folder.resolve(), []).append(file)
    jobs = {each.resolve(): sorted(set(files), key=_rank_of) for each, files in found.items()}
    if not jobs:
        raise UnreadableError(f"--job={folder}: no rank of a running job works there or has its dumps there; {_HERE}")
    if len(jobs) > 1:
        raise UnreadableError(f"--job={folder}: several jobs; give one of {', '.join(map(str, sorted(jobs)))}")
    return jobs.popitem()[1]


def _means(folder: Path, file: Path) -> bool:
    """Whether the process of this socket works in the folder, or has its dumps there."""
    process = Path(f"/proc/{process_of(file)}")
    with contextlib.suppress(OSError):
        if (process / "cwd").samefile(folder):
            return True
        variables = (process / "environ").read_bytes().split(b"\0")
        dumps = [one.partition(b"=")[2] for one in variables if one.startswith(b"NEMO_PATCHES_DUMP=")]
        return any(one and Path(os.fsdecode(one)).samefile(folder) for one in dumps)
    return False


def _rank_of(file: Path) -> int:
    number = file.name.removeprefix("rank_").partition(".")[0]
    return int(number) if number.isdecimal() else _MOST_RANKS


def _ask(file: Path) -> bytes:
    """Raises OSError."""
    if _is_stopped(process_of(file)):
        raise TimeoutError(0, "its process is stopped")
    deadline = time.monotonic() + _ANSWER_S
    with socket.socket(socket.AF_UNIX) as own, near(file.parent, file.name) as path:
        own.settimeout(_ANSWER_S)
        own.connect(path)
        data = b""
        while len(data) <= _LONGEST_ANSWER and (left := deadline - time.monotonic()) > 0:
            own.settimeout(left)
            if not (more := own.recv(1 << 16)):
                return data
            data += more
    raise TimeoutError(0, "no whole answer in time")


def _is_stopped(process: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    return False


def _told(data: bytes) -> Told:
    """Raises what JSON of another form raises."""
    content = json.loads(data)
    groups = tuple(_group(group) for group in content["groups"][:1000])
    missing = tuple(int(one["rank"]) for one in content["missing"])
    return Told(int(content["world_size"]), str(content["level"]), str(content["text"]), missing, groups)


def _group(content: dict[str, Any]) -> Group:
    ranks = tuple(int(rank) for rank in content["ranks"])
    place = str(content["collective"] or content["where"])
    process = str(content["host"]), int(content["pid"])
    return Group(ranks, str(content["kind"]), *process, int(content["calls"]), float(content["idle"]), place)


def _report(folder: Path, told: Told, problems: tuple[str, ...]) -> Report:
    accused = [group for group in told.groups if set(told.missing) & set(group.ranks)]
    findings = [_finding(group, told) for group in accused]
    if not findings and told.level == "WARNING":
        next_step = "`py-spy dump --pid PID` on the hosts of two of the ranks."
        findings = [Finding(ids.OUTSIDE, WARNING, (), told.text, next_step)]
    who = named(range(told.size)) if told.size else "the ranks"
    return Report(
        folder=safe(str(folder)),
        world_size=told.size,
        moving=any(group.kind == CALLING for group in told.groups),
        verdict=findings[0].text
        if findings
        else f"Nothing found: of {who} none is known to wait for another. {told.text}",
        next_step=findings[0].next_step if findings else "",
        findings=tuple(findings),
        ranks=tuple(_summary(rank, group) for rank, group in _by_rank(told)),
        problems=problems,
        earlier=(),
        runs=True,
    )


def _by_rank(told: Told) -> list[tuple[int, Group]]:
    return sorted(((rank, group) for group in told.groups for rank in group.ranks), key=lambda one: one[0])


def _finding(group: Group, told: Told) -> Finding:
    who = f"process {group.pid} on {group.host}" if group.pid else "this rank's stderr"
    return Finding(
        id=_IDS.get(group.kind, ids.BEFORE_ENCODER),
        severity=CRITICAL,
        ranks=group.ranks,
        text=told.text,
        next_step=f"Look at {who}: `py-spy dump`, its data loader's workers, the end of its stderr.",
        evidence=tuple(f"{named(one.ranks)}: {one.kind}: {one.place}" for one in told.groups[:8]),
    )


def _summary(rank: int, group: Group) -> RankSummary:
    """Of all ranks of a group the first one's words, which are its own alone where it tells of a process."""
    is_first = rank == group.ranks[0]
    process = (group.host, group.pid) if is_first else ("", 0)
    state = f"{group.kind}: {group.place}" if group.place else group.kind
    ago = group.idle_s if group.idle_s >= 0 else None
    return RankSummary(rank, *process, group.calls, state, None, ago, None, None, None)
