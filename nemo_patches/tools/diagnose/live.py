"""A running job, asked through the Unix socket of one of its ranks on this host: where all ranks are. Needs no torch.

Nothing is written. Whichever rank answers first has asked all others, as it does for a stall report.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

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
    """No job with nemo_patches is found there; there may be one without it."""


class Group(msgspec.Struct):
    """Ranks at one place, as stall/rank_groups.py tells of them. Older versions leave out what has a default."""

    ranks: tuple[int, ...]
    kind: str
    host: str
    pid: int
    calls: int
    idle: float
    where: str
    collective: str
    caller: str = ""
    hook: str = ""
    activity: str = ""
    worker_states: tuple[str, ...] = ()
    batch: str = ""
    still: float = -1.0
    goes_on_for: float = 0.0

    @property
    def place(self) -> Place:
        workers = [f"its data loader's {text}" for text in self.worker_states]
        batch = [f"last batch {self.batch}"] if self.batch else []
        caller = f"{self.caller}, in {self.hook}" if self.hook else self.caller
        return Place(self.where, self.collective, caller, self.activity, details=(*workers, *batch))

    @property
    def is_unsettled(self) -> bool:
        """Whether it has called an encoder lately, or moved, and is away now: it may be stuck there, or not."""
        return bool(self.collective or (self.where and self.kind == CALLING)) and self.kind in _GOES_ON

    @property
    def text(self) -> str:
        return self.collective or self.where


class Answer(msgspec.Struct):
    world_size: int
    level: str
    text: str
    groups: tuple[Group, ...]


def diagnose_job(folder: Path) -> Diagnosis:
    """folder: the job's own, or one that its processes work in, or that their dumps go to. Raises UnreadableError."""
    sockets = _sockets(folder)
    problems: list[str] = []
    for file in sockets:
        try:
            return _report(folder, msgspec.json.decode(_ask(file), type=Answer), tuple(problems))
        except OSError as error:
            problems.append(f"{file.name}: {error.strerror or error}")
        except (ValueError, RecursionError):
            problems.append(f"{file.name}: what it says cannot be read")
    raise UnreadableError(f"--job={folder}: no rank of the job answers here: {'; '.join(problems)}")


def _sockets(folder: Path) -> list[Path]:
    """The sockets of the one job that the folder stands for, in rank order. Raises UnreadableError."""
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
    """Whether the socket's process has the folder as its working directory or its dump folder."""
    process = Path(f"/proc/{process_of(file)}")
    with contextlib.suppress(OSError):
        if started_at(process_of(file)) > file.lstat().st_mtime + CLOCK_SLACK_S:
            return False  # a killed process left its socket, and another process has its pid now
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


def _report(folder: Path, answer: Answer, problems: tuple[str, ...]) -> Diagnosis:
    report = judge(_evidence(answer), safe(str(folder)), stuck_after_s=0.0)
    findings = _findings(answer, report.findings)
    who = named(range(answer.world_size)) if answer.world_size else "the ranks"
    fine = f"Nothing found: of {who} none is known to wait for another. {answer.text}"
    return replace(
        report,
        verdict=findings[0].text if findings else fine,
        next_step=findings[0].next_step if findings else "",
        findings=findings,
        ranks=tuple(_summary(rank, group) for rank, group in _by_rank(answer)),
        problems=problems,
        summary=(answer.text,),
        moving=any(group.kind == CALLING for group in answer.groups),
        runs=True,
    )


def _findings(answer: Answer, judged: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The job decides whether ranks wait in vain: it knows which of them go on, and which waits end by themselves."""
    kinds = {group.kind for group in answer.groups}
    if answer.level == "WARNING":
        return judged if kinds & {WAITING, SILENT} else (finding(ids.NO_RANK_MOVES, answer.text),)
    unsettled = [group for group in answer.groups if group.is_unsettled]
    if unsettled:
        return (_too_early(unsettled),)
    if kinds & set(_GOES_ON):
        return ()
    if WAITING not in kinds:
        return (_no_call(answer),)
    return tuple(replace(one, severity=WARNING) if one.severity == CRITICAL else one for one in judged)


def _too_early(unsettled: list[Group]) -> Finding:
    """Ranks are away from the encoder, and not for long."""
    again = max(1, math.ceil(max(group.goes_on_for for group in unsettled)))
    idle_s = [group.idle for group in unsettled if group.idle >= 0]
    since = f"the last encoder call began {min(idle_s):.0f} s ago" if idle_s else "ranks moved just now"
    text = f"Too early to tell whether the job hangs: {since}. Ask again in {again} s."
    return finding(ids.NOT_ENOUGH, text, evidence=_places(unsettled), next_step=f"Ask again in {again} s.")


def _no_call(answer: Answer) -> Finding:
    idle_s = [group.idle for group in answer.groups if group.idle >= 0]
    since = f"for {min(idle_s):.0f} s" if idle_s else "so far"
    text = f"No rank has come to an encoder call {since}, and none is known to wait for another."
    step = "Ask again; ranks that are at the same places then are stuck there."
    return finding(ids.NOT_ENOUGH, text, evidence=_places(answer.groups), next_step=step)


def _places(groups: Sequence[Group]) -> list[str]:
    return [f"{named(group.ranks)}: {group.kind}: {group.text}" for group in groups[:8]]


def _evidence(answer: Answer) -> Evidence:
    evidence = Evidence(world_size=answer.world_size, runs=True)
    for rank, group in _by_rank(answer):
        is_first = rank == group.ranks[0] and group.pid
        cite = f"{group.host}, pid {group.pid}" if is_first else f"rank {rank}'s answer"
        host, pid = (group.host, group.pid) if is_first else ("", 0)
        evidence.facts += (
            Fact(rank, value, cite, host=host, own=group.kind not in _FATES)
            for value in (Member(answer.world_size, pid), *_values(group))
        )
    return evidence


def _values(group: Group) -> Iterator[Fate | Place | Motion]:
    if group.kind in _FATES:
        is_gone = group.kind == SILENT and group.where == PROCESS_GONE
        yield Fate(fates.GONE if is_gone else _FATES[group.kind])
    elif group.kind in _GOES_ON:  # from one collective to the next
        yield replace(group.place, collective=group.collective or LENGTH_SYNC)
        yield Motion(True, f"it was {group.kind}")
    elif group.kind in (WAITING, ELSEWHERE):  # of any other nothing is known
        yield Fate(fates.RUNS)
        yield group.place
        yield Motion(False, still_s=group.still if group.still >= 0 else None)


def _by_rank(answer: Answer) -> list[tuple[int, Group]]:
    return sorted(((rank, group) for group in answer.groups for rank in group.ranks), key=lambda one: one[0])


def _summary(rank: int, group: Group) -> RankSummary:
    """The place is the first rank's, and stands for all ranks of the group; host and pid are the first rank's only."""
    is_first = rank == group.ranks[0]
    process = (group.host, group.pid) if is_first else ("", 0)
    state = f"{group.kind}: {group.text}" if group.text else group.kind
    ago = group.idle if group.idle >= 0 else None
    return RankSummary(rank, *process, group.calls, state, None, ago, None, None, None)
