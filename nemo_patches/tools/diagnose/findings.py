"""Findings, their ids and order, and the report that holds them."""

from __future__ import annotations

from dataclasses import dataclass

CRITICAL, WARNING, NOTE = "critical", "warning", "note"

ORDER: list[str] = []  # all ids, those that explain others first


def _id(text: str) -> str:
    ORDER.append(text)
    return text


EXCEPTION = _id("exception")
OUT_OF_MEMORY = _id("out-of-memory")
START_UP = _id("start-up")
NODE_FAILED = _id("node-failed")
KILLED = _id("killed")
STOPPED = _id("stopped")
TRACED = _id("in-a-debugger")
ENDED = _id("ended")
MISSING_RANK = _id("missing-rank")
FEWER_BATCHES = _id("fewer-batches")
SKIPPED = _id("skipped-collective")
UNEVEN_CALLS = _id("uneven-calls")
SILENT = _id("no-heartbeat")
OUT_OF_STEP = _id("out-of-step")
SIZES = _id("sizes-differ")
CROSSED = _id("crossed-groups")
ALL_IN = _id("all-in")
NO_RANK_MOVES = _id("no-rank-moves")
NOT_SEEN = _id("not-seen")
WAITED_IN_VAIN = _id("waited-in-vain")
FIRST_FAILURE = _id("first-failure")
STUCK_WATCHDOG = _id("watchdog-stuck")
NOT_ENOUGH = _id("not-enough-records")
STRAGGLER = _id("straggler")
LATE = _id("late")

LAYERS = "layers"  # the phase of a call after its length sync


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    id: str
    severity: str
    ranks: tuple[int, ...]  # that it is about, not those that wait for them
    text: str  # one or two sentences
    next_step: str
    evidence: tuple[str, ...] = ()
    because: str = ""  # the id of the finding that explains this one


@dataclass(frozen=True)
class RankSummary:
    """One rank, in the report's table; None where it is not known."""

    rank: int
    host: str
    pid: int
    calls: int | None  # of encoders
    state: str
    ago: float | None = None  # seconds since its last call
    waited: float | None = (
        None  # seconds in length syncs, also in those that it gave up
    )
    lag: float | None = None  # seconds that it came after the first rank; the median


@dataclass(frozen=True)
class Diagnosis:
    """All that `diagnose` found in a folder or a log."""

    folder: str
    world_size: int
    verdict: str
    next_step: str
    findings: tuple[Finding, ...]
    ranks: tuple[RankSummary, ...]
    problems: tuple[str, ...]  # files that were not read, or only in part
    earlier: tuple[str, ...]  # process starts of earlier launches
    summary: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: nothing found; 1: a finding; 2: not enough records to tell."""
        if not self.findings:
            return 0
        return 2 if all(finding.id == NOT_ENOUGH for finding in self.findings) else 1


@dataclass(frozen=True)
class Ruling:
    """What it comes to. goes_on: the job does, as `text` says. is_too_early: its waits are young;
    look again.
    """

    findings: tuple[Finding, ...] = ()
    text: str = ""
    goes_on: bool = False
    is_too_early: bool = False
