"""A running job, asked through the Unix socket of one of its ranks on this host: where all ranks are. Needs no torch.

Nothing is written. Whichever rank answers first has asked all others, as it does for a stall report.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_patches.stall.job_folder import private_folders
from nemo_patches.stall.job_socket import ENDING, near, process_of
from nemo_patches.stall.rank_groups import WAITING
from nemo_patches.stall.rank_kinds import ELSEWHERE, LEFT, LENGTH_SYNC, SILENT, UNANNOUNCED
from nemo_patches.stall.rank_kinds import GONE as PROCESS_GONE
from nemo_patches.stall.rank_state import CALLING, MOVING
from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.collect.proc_files import CLOCK_SLACK_S, started_at, stat_fields
from nemo_patches.tools.diagnose.facts import Evidence, Fact, Fate, Member, Motion, Place
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Diagnosis, Finding, RankSummary
from nemo_patches.tools.diagnose.folder import UnreadableError
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.verdicts import finding

_ANSWER_S = 15.0  # a rank waits some seconds itself, for others that do not answer
_LONGEST_ANSWER = 1 << 20  # bytes
_MOST_RANKS = 1 << 20
_FATES = {SILENT: fates.SILENT, LEFT: fates.ENDED, UNANNOUNCED: fates.UNSEEN}
_GOES_ON = (CALLING, MOVING)
_HERE = "run it on a host of the job, as the same user; nemo_patches must be on there"


class NoSocketError(UnreadableError):
    """No rank of a job with nemo_patches is meant; one of a job without it may be."""


@dataclass(frozen=True)
class Group:
    """Ranks at one place, as the job tells of them; host, pid and the like are the first one's."""

    ranks: tuple[int, ...]
    kind: str
    host: str
    pid: int
    calls: int
    idle_s: float
    still_s: float
    goes_on_for_s: float
    place: Place

    @property
    def is_unsettled(self) -> bool:
        """Whether it has called an encoder lately, or moved, and is away now: it may be stuck there, or not."""
        return bool(self.place.collective or (self.place.where and self.kind == CALLING)) and self.kind in _GOES_ON

    @property
    def text(self) -> str:
        return self.place.collective or self.place.where


@dataclass(frozen=True)
class Told:
    """A rank's answer."""

    size: int
    level: str
    text: str
    groups: tuple[Group, ...]


def diagnose_job(folder: Path) -> Diagnosis:
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
        raise NoSocketError(f"--job={folder}: no rank of a running job works there or has its dumps there; {_HERE}")
    if len(jobs) > 1:
        raise UnreadableError(f"--job={folder}: several jobs; give one of {', '.join(map(str, sorted(jobs)))}")
    return jobs.popitem()[1]


def _means(folder: Path, file: Path) -> bool:
    """Whether the process of this socket works in the folder, or has its dumps there."""
    process = Path(f"/proc/{process_of(file)}")
    with contextlib.suppress(OSError):
        if started_at(process_of(file)) > file.lstat().st_mtime + CLOCK_SLACK_S:
            return False  # a process that was killed has left its socket, and another one has its number now
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
    if stat_fields(f"/proc/{process_of(file)}/stat")[:1] in (["T"], ["t"]):
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


def _told(data: bytes) -> Told:
    """Raises what JSON of another form raises."""
    content = json.loads(data)
    groups = tuple(_group(group) for group in content["groups"][:1000])
    return Told(int(content["world_size"]), str(content["level"]), str(content["text"]), groups)


def _group(content: dict[str, Any]) -> Group:
    hook = str(content.get("hook", ""))
    workers = [f"its data loader's {text}" for text in content.get("worker_states", ())]
    batch = [f"last batch {content['batch']}"] if content.get("batch") else []
    place = Place(
        where=str(content["where"]),
        collective=str(content["collective"]),
        caller=str(content.get("caller", "")) + (f", in {hook}" if hook else ""),
        activity=str(content.get("activity", "")),
        details=(*workers, *batch),
    )
    return Group(
        ranks=tuple(int(rank) for rank in content["ranks"]),
        kind=str(content["kind"]),
        host=str(content["host"]),
        pid=int(content["pid"]),
        calls=int(content["calls"]),
        idle_s=float(content["idle"]),
        still_s=float(content.get("still", -1.0)),
        goes_on_for_s=float(content.get("goes_on_for", 0.0)),  # a job with an older nemo_patches does not say
        place=place,
    )


def _report(folder: Path, told: Told, problems: tuple[str, ...]) -> Diagnosis:
    report = judge(_evidence(told), safe(str(folder)), stuck_after_s=0.0)
    findings = _findings(told, report.findings)
    who = named(range(told.size)) if told.size else "the ranks"
    fine = f"Nothing found: of {who} none is known to wait for another. {told.text}"
    return replace(
        report,
        verdict=findings[0].text if findings else fine,
        next_step=findings[0].next_step if findings else "",
        findings=findings,
        ranks=tuple(_summary(rank, group) for rank, group in _by_rank(told)),
        problems=problems,
        summary=(told.text,),
        moving=any(group.kind == CALLING for group in told.groups),
        runs=True,
    )


def _findings(told: Told, judged: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Whether ranks wait in vain the job tells: it knows what it counts as going on, and what ends by itself."""
    kinds = {group.kind for group in told.groups}
    if told.level == "WARNING":
        return judged if kinds & {WAITING, SILENT} else (finding(ids.NO_RANK_MOVES, told.text),)
    unsettled = [group for group in told.groups if group.is_unsettled]
    if unsettled:
        return (_too_early(unsettled),)
    if kinds & set(_GOES_ON):
        return ()
    if WAITING not in kinds:
        return (_no_call(told),)
    return tuple(replace(one, severity=WARNING) if one.severity == CRITICAL else one for one in judged)


def _too_early(unsettled: list[Group]) -> Finding:
    """Ranks are away from the encoder, and not for long."""
    again = max(1, math.ceil(max(group.goes_on_for_s for group in unsettled)))
    idle_s = [group.idle_s for group in unsettled if group.idle_s >= 0]
    since = f"the last encoder call began {min(idle_s):.0f} s ago" if idle_s else "ranks moved just now"
    text = f"Too early to tell whether the job hangs: {since}. Ask again in {again} s."
    return finding(ids.NOT_ENOUGH, text, evidence=_places(unsettled), next_step=f"Ask again in {again} s.")


def _no_call(told: Told) -> Finding:
    idle_s = [group.idle_s for group in told.groups if group.idle_s >= 0]
    since = f"for {min(idle_s):.0f} s" if idle_s else "so far"
    text = f"No rank has come to an encoder call {since}, and none is known to wait for another."
    step = "Ask again; ranks that are at the same places then are stuck there."
    return finding(ids.NOT_ENOUGH, text, evidence=_places(told.groups), next_step=step)


def _places(groups: Sequence[Group]) -> list[str]:
    return [f"{named(group.ranks)}: {group.kind}: {group.text}" for group in groups[:8]]


def _evidence(told: Told) -> Evidence:
    evidence = Evidence(world_size=told.size, runs=True)
    for rank, group in _by_rank(told):
        is_first = rank == group.ranks[0] and group.pid
        cite = f"{group.host}, pid {group.pid}" if is_first else f"rank {rank}'s answer"
        host, pid = (group.host, group.pid) if is_first else ("", 0)
        evidence.facts += (
            Fact(rank, value, cite, host=host, own=group.kind not in _FATES)
            for value in (Member(told.size, pid), *_values(group))
        )
    return evidence


def _values(group: Group) -> Iterator[Fate | Place | Motion]:
    if group.kind in _FATES:
        is_gone = group.kind == SILENT and group.place.where == PROCESS_GONE
        yield Fate(fates.GONE if is_gone else _FATES[group.kind])
    elif group.kind in _GOES_ON:  # from one collective to the next
        yield replace(group.place, collective=group.place.collective or LENGTH_SYNC)
        yield Motion(True, f"it was {group.kind}")
    elif group.kind in (WAITING, ELSEWHERE):  # of any other nothing is known
        yield Fate(fates.RUNS)
        yield group.place
        yield Motion(False, still_s=group.still_s if group.still_s >= 0 else None)


def _by_rank(told: Told) -> list[tuple[int, Group]]:
    return sorted(((rank, group) for group in told.groups for rank in group.ranks), key=lambda one: one[0])


def _summary(rank: int, group: Group) -> RankSummary:
    """Of all ranks of a group the first one's words, which are its own alone where it tells of a process."""
    is_first = rank == group.ranks[0]
    process = (group.host, group.pid) if is_first else ("", 0)
    state = f"{group.kind}: {group.text}" if group.text else group.kind
    ago = group.idle_s if group.idle_s >= 0 else None
    return RankSummary(rank, *process, group.calls, state, None, ago, None, None, None)
