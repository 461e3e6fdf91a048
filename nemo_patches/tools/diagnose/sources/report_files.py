"""Reader of stall reports as JSON: where all ranks are, as one of them has asked.

They are the answer to --job, and the files that ranks leave in the job's folder. What a rank's
report says of itself is first-hand, and hearsay of the others. Needs no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from nemo_patches.facts import CALLING, COMPUTING, LENGTH_SYNC, MOVING
from nemo_patches.judging.kinds import ELSEWHERE, LEFT, SILENT, UNANNOUNCED, is_guess
from nemo_patches.judging.kinds import GONE as PROCESS_GONE
from nemo_patches.judging.rank_groups import UNHEARD, WAITING
from nemo_patches.text import named, safe
from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.collect.proc_files import (
    CLOCK_SLACK_S,
    pid_here,
    started_at,
)
from nemo_patches.tools.diagnose.findings import (
    CRITICAL,
    WARNING,
    Diagnosis,
    Finding,
    RankSummary,
)
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.rank_facts import (
    Condition,
    Evidence,
    Fact,
    Motion,
    Place,
    ProcessRank,
)
from nemo_patches.tools.diagnose.verdicts import finding
from nemo_patches.watch.job_socket import ENDING, is_ours, process_of
from nemo_patches.watch.process_id import is_of_container, machine, started

KIND = "stall reports"
LONGEST = 16 << 20  # bytes
_OVER = "its process has ended, and the job runs again: not taken into account"
_NAME = re.compile(r"stall_rank_\d{1,7}\.json")
_CONDITIONS = {
    SILENT: conditions.SILENT,
    LEFT: conditions.ENDED,
    UNANNOUNCED: conditions.UNSEEN,
}
_GOES_ON = (CALLING, MOVING, COMPUTING)


class ReportedGroup(msgspec.Struct):
    """Ranks at one place, as judging/rank_groups.py tells of them. Older versions leave out what
    has a default.
    """

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
    request: str = ""
    worker_states: tuple[str, ...] = ()
    batch: str = ""
    still: float = -1.0
    goes_on_for: float = 0.0

    @property
    def place(self) -> Place:
        worker, *others = [
            f"its data loader's {text}" for text in self.worker_states
        ] or [""]
        batch = [f"last batch {self.batch}"] if self.batch else []
        caller = f"{self.caller}, in {self.hook}" if self.hook else self.caller
        return Place(
            self.where,
            self.collective,
            caller,
            self.activity,
            worker,
            details=(*others, *batch),
        )

    @property
    def goes_on(self) -> bool:
        return self.kind in _GOES_ON

    @property
    def is_placed(self) -> bool:
        """Whether it is known where it is."""
        return self.goes_on or self.kind in (WAITING, ELSEWHERE)

    @property
    def position(self) -> tuple[str, bool]:
        """By which it is seen that it has moved from one collective to another."""
        return self.place.wait, self.goes_on

    @property
    def is_unsettled(self) -> bool:
        """Whether it has called an encoder lately, or moved, and is away now: it may be stuck
        there, or not.
        """
        is_away = self.collective or (self.where and self.kind == CALLING)
        return self.goes_on and bool(is_away)

    @property
    def text(self) -> str:
        return self.collective or self.where


class ReportedProcess(msgspec.Struct):
    """As watch/process_id.py tells of it."""

    pid: int
    started: int
    machine: str
    attempt: str = ""

    @property
    def is_here(self) -> bool:
        """Whether a pid of its machine means the same here."""
        return bool(self.machine) and self.machine == machine()

    @property
    def seen_here(self) -> int:
        """A container's process, by the pid that it has here; 0: it is not seen."""
        boot, _, namespace = self.machine.partition(" ")
        is_seen = machine().startswith(f"{boot} ") and namespace.isdecimal()
        return pid_here(self.pid, namespace) if is_seen else 0

    @property
    def has_ended(self) -> bool:
        """Whether it certainly has; another one may have its pid."""
        return self.is_here and started(self.pid) != self.started


class RankReport(msgspec.Struct):
    """One rank's report. time: seconds since 1970 by its host's clock. idle_s: since its last
    step. process: the reporter's.
    """

    world_size: int
    level: str
    text: str
    groups: tuple[ReportedGroup, ...]
    rank: int = -1
    time: float = 0.0
    idle_s: float = 0.0
    process: ReportedProcess | None = None

    @property
    def has_ended(self) -> bool:
        return self.process is not None and self.process.has_ended

    @property
    def goes_on(self) -> bool:
        """Whether some rank does."""
        return any(group.goes_on for group in self.groups)

    @property
    def clock(self) -> str:
        """The machine, or the host, by whose clock `time` is."""
        return self.process.machine if self.process is not None else self.host

    @property
    def host(self) -> str:
        """The reporter's; empty where its group does not tell it."""
        return next((one.host for one in self.groups if self.rank in one.ranks[:1]), "")

    @property
    def calls(self) -> dict[int, int]:
        """By rank of which it is known where it is: encoder calls, which ranks make in step."""
        return {rank: one.calls for rank, one in self.by_rank if one.is_placed}

    def is_of_the_stall_of(self, newest: RankReport) -> bool:
        """Hosts' clocks may differ by hours: of another one's report the calls tell."""
        if self.clock == newest.clock:
            return self.time >= newest.time - newest.idle_s
        then = self.calls
        return all(then.get(rank, n) == n for rank, n in newest.calls.items())

    @property
    def by_rank(self) -> list[tuple[int, ReportedGroup]]:
        pairs = ((rank, group) for group in self.groups for rank in group.ranks)
        return sorted(pairs, key=lambda one: one[0])


def decode(data: bytes) -> RankReport:
    """Raises ValueError, RecursionError."""
    return msgspec.json.decode(data, type=RankReport)


def diagnose_answer(
    answer: RankReport, source: str, problems: tuple[str, ...]
) -> Diagnosis:
    """The report on what a running job has just answered."""
    report = judge(evidence_of(answer), safe(source), stuck_after_s=0.0)
    findings = _findings(answer, report.findings)
    who = named(range(answer.world_size)) if answer.world_size else "the ranks"
    fine = f"Nothing found: of {who} none is known to wait for another. {answer.text}"
    return replace(
        report,
        verdict=findings[0].text if findings else fine,
        next_step=findings[0].next_step if findings else "",
        findings=findings,
        ranks=tuple(_summary(rank, group) for rank, group in answer.by_rank),
        problems=problems,
        summary=(answer.text,),
    )


def evidence_of(answer: RankReport) -> Evidence:
    """What a running job has just answered."""
    return Evidence(list(facts_of(answer)), world_size=answer.world_size)


def recognises(name: str, head: bytes) -> bool:
    """By the name that watch/report_file.py gives."""
    return _NAME.fullmatch(os.path.basename(name)) is not None


def read(files: list[Path], evidence: Evidence) -> None:
    """Add what the reports on the latest stall say. A rank that took no part in it may have left an
    earlier one; so may an earlier attempt, whose processes have ended.
    """
    answers: list[tuple[Path, RankReport]] = []
    for file in files:
        try:
            with file.open("rb") as opened:
                answers.append((file, decode(opened.read(LONGEST))))
        except OSError as error:
            evidence.problems.append(safe(f"{file}: {error.strerror}"))
        except (ValueError, RecursionError):
            evidence.problems.append(safe(f"{file}: no stall report"))
    running_since = {
        folder: _running_since(folder, [one for _, one in answers])
        for folder in {file.parent for file in files}
    }
    for file, answer in list(answers):
        if answer.has_ended and answer.time < running_since[file.parent]:
            answers.remove((file, answer))
            evidence.earlier.append(safe(f"{file.name}: {_dated(answer)}: {_OVER}"))
    if not answers:
        return
    answers.sort(key=lambda one: one[1].time)
    by_clock = {answer.clock: answer for _, answer in answers}
    newest = max(
        by_clock.values(),
        key=lambda one: (max(one.calls.values(), default=0), one.time),
    )
    # Of a rank that was in another collective in an earlier one, that one tells no more.
    positions = {
        rank: group.position for rank, group in newest.by_rank if group.is_placed
    }
    for file, answer in answers:
        is_of_its_size = answer.world_size == newest.world_size
        if not is_of_its_size or not answer.is_of_the_stall_of(newest):
            evidence.earlier.append(
                safe(
                    f"{file.name}: the report of an earlier stall, not taken into"
                    " account"
                )
            )
        else:
            then = {rank: group.position for rank, group in answer.by_rank}
            evidence.facts += (
                fact
                for fact in facts_of(answer)
                if positions.get(fact.rank, then[fact.rank]) == then[fact.rank]
            )
    evidence.world_size = newest.world_size
    evidence.patched = True
    evidence.ranks += (_summary(rank, group) for rank, group in newest.by_rank)
    evidence.summary.append(safe(newest.text))
    if newest.has_ended:
        evidence.past = (
            f"No present hang: the stall reports are {_dated(newest)}, and their"
            " processes have ended. It was then:"
        )
    elif newest.process is not None:
        unseen = "; whether its process still runs cannot be seen here"
        seen = "" if newest.process.is_here else unseen
        evidence.summary.append(f"The newest report is {_dated(newest)}{seen}.")


def _running_since(folder: Path, answers: Sequence[RankReport]) -> float:
    """When the first of the job's processes that run has begun, in seconds since 1970; 0: none is
    known to run.
    """
    pids = {
        one.process.pid
        for one in answers
        if one.process is not None and one.process.is_here and not one.has_ended
    }
    began = [started_at(pid) for pid in pids]
    for file in folder.glob(f"*{ENDING}"):
        at = started_at(process_of(file)) if is_ours(file) else 0.0
        with contextlib.suppress(OSError):
            # Else another process has its pid.
            if at and at <= file.lstat().st_mtime + CLOCK_SLACK_S:
                began.append(at)
    return min(began) - CLOCK_SLACK_S if began else 0.0


def _dated(answer: RankReport) -> str:
    ago_s = max(time.time() - answer.time, 0.0)
    ago = f"{ago_s:.0f} s" if ago_s < 120 else f"{ago_s / 60:.0f} min"
    if ago_s > 3 * 3600:
        ago = f"{ago_s / 3600:.0f} h"
    attempt = answer.process.attempt if answer.process is not None else ""
    of = f"of attempt {attempt}, " if attempt.isdecimal() else ""  # as torchrun counts
    return f"{of}{ago} old"


def _findings(answer: RankReport, judged: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The job decides whether ranks wait in vain: it knows which of them go on, and which waits end
    by themselves.
    """
    kinds = {group.kind for group in answer.groups}
    if answer.level == "WARNING":
        return (
            judged
            if kinds & {WAITING, SILENT}
            else (finding(ids.NO_RANK_MOVES, answer.text),)
        )
    elsewhere = [group for group in answer.groups if group.kind == ELSEWHERE]
    if elsewhere and all(
        group.request and not is_guess(group.request) for group in elsewhere
    ):
        return ()  # they wait for a person or a request, and the others for them
    unsettled = [group for group in answer.groups if group.is_unsettled]
    if answer.goes_on and not unsettled:
        return ()
    if unsettled or WAITING not in kinds:
        return (_not_yet(answer, unsettled),)
    return tuple(
        replace(one, severity=WARNING) if one.severity == CRITICAL else one
        for one in judged
    )


def _not_yet(answer: RankReport, unsettled: Sequence[ReportedGroup]) -> Finding:
    """unsettled: ranks that are away from the encoder, and not for long; else no rank waits."""
    groups = unsettled or answer.groups
    idle_s = min((group.idle for group in groups if group.idle >= 0), default=None)
    if unsettled:
        since = "ranks moved just now"
        if idle_s is not None:
            since = f"the last encoder call began {idle_s:.0f} s ago"
        again = max(1, math.ceil(max(group.goes_on_for for group in unsettled)))
        step = f"Ask again in {again} s."
        text = f"Too early to tell whether the job hangs: {since}. {step}"
    else:
        since = "so far" if idle_s is None else f"for {idle_s:.0f} s"
        step = "Ask again; ranks that are at the same places then are stuck there."
        text = (
            f"No rank has come to an encoder call {since}, and none is known to wait"
            " for another."
        )
    places = [f"{named(one.ranks)}: {one.kind}: {one.text}" for one in groups[:8]]
    return finding(ids.NOT_ENOUGH, text, evidence=places, next_step=step)


def facts_of(answer: RankReport) -> Iterator[Fact]:
    clock = safe(answer.host)
    for rank, group in answer.by_rank:
        is_first = rank == group.ranks[0] and group.pid
        cite = (
            f"rank {answer.rank}'s stall report"
            if answer.rank >= 0
            else f"rank {rank}'s answer"
        )
        host, pid = (safe(group.host), group.pid) if is_first else ("", 0)
        in_container = pid == 1
        if answer.process is not None and is_of_container(answer.process.machine):
            seen = answer.process.seen_here if rank == answer.rank else 0
            pid = seen or pid
            in_container = not seen
        own = rank == answer.rank and group.kind not in _CONDITIONS
        yield Fact(
            rank,
            ProcessRank(answer.world_size, pid, in_container),
            f"{host}, pid {pid}" if pid else cite,
            host=host,
            own=own,
        )
        for value in _values(group, is_hang=answer.level == "WARNING"):
            yield Fact(rank, value, cite, answer.time, clock, own)


def _values(
    group: ReportedGroup, is_hang: bool
) -> Iterator[Condition | Place | Motion]:
    if group.kind in _CONDITIONS:
        is_gone = group.kind == SILENT and group.where == PROCESS_GONE
        yield Condition(conditions.GONE if is_gone else _CONDITIONS[group.kind])
    elif group.goes_on:  # from one collective to the next
        in_sync = "" if group.kind == COMPUTING else LENGTH_SYNC
        yield replace(group.place, collective=group.collective or in_sync)
        yield Motion(True, f"it was {group.kind}")
    elif group.kind in (WAITING, ELSEWHERE):  # of any other nothing is known
        yield Condition(conditions.RUNS)
        yield group.place
        still_s = group.still if group.still >= 0 else None
        yield Motion(still_s=still_s, is_hang=is_hang)


def _summary(rank: int, group: ReportedGroup) -> RankSummary:
    """The place is the first rank's, and stands for all ranks of the group; host and pid are the
    first rank's only.
    """
    is_first = rank == group.ranks[0]
    process = (group.host, group.pid) if is_first else ("", 0)
    state = f"{group.kind}: {group.text}" if group.text else group.kind
    ago = group.idle if group.idle >= 0 else None
    # Such a rank has not told.
    is_unknown = group.kind in (*_CONDITIONS, UNHEARD) and not group.calls
    calls = None if is_unknown else group.calls
    return RankSummary(rank, *process, calls, state, ago)
