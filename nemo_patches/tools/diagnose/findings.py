"""Findings, their ids and order, and the report that holds them."""

from __future__ import annotations

from dataclasses import dataclass

CRITICAL, WARNING, NOTE = "critical", "warning", "note"

# Ids. ORDER has those that explain others first.
EXCEPTION = "exception"
OUT_OF_MEMORY = "out-of-memory"
STOPPED = "stopped"
TRACED = "in-a-debugger"
START_UP = "start-up"
DIFFERENT_SYNC = "different-sync"
DIFFERENT_ORDER = "different-order"
NO_BACKWARD = "no-backward"
KILLED = "killed"
ENDED = "ended"
MISSING_RANK = "missing-rank"
UNEVEN_CALLS = "uneven-calls"
SILENT = "no-heartbeat"
FEWER_BATCHES = "fewer-batches"
SKIPPED = "skipped-collective"
OUT_OF_STEP = "out-of-step"
SIZES = "sizes-differ"
CROSSED = "crossed-groups"
SOME_INSIDE = "some-inside"
ALL_INSIDE = "all-inside"
ALL_IN = "all-in"
OUTSIDE = "stuck-outside-encoder"
NO_RANK_MOVES = "no-rank-moves"
NOT_SEEN = "not-seen"
WAITED_IN_VAIN = "waited-in-vain"
FIRST_FAILURE = "first-failure"
STUCK_WATCHDOG = "watchdog-stuck"
SYNC_ENDED = "length-sync-ended"
STOPPED_AT_ONCE = "all-stopped"
BAD_INPUT = "bad-input"
CHECK_FAILED = "check-failed"
MEMORY = "memory-runs-away"
UNTRACED = "untraced-rank"
NOT_ENOUGH = "not-enough-records"
DIFFERENT = "different-ranks"
NOT_AS_CONFIGURED = "not-as-configured"
STRAGGLER = "straggler"
LATE = "late"
CAUGHT = "exception-caught"
THREAD_FAILED = "thread-failed"
TIMEOUTS = "timeouts"
ORDER = (
    EXCEPTION,
    OUT_OF_MEMORY,
    START_UP,
    DIFFERENT_SYNC,
    DIFFERENT_ORDER,
    NO_BACKWARD,
    KILLED,
    STOPPED,
    TRACED,
    ENDED,
    MISSING_RANK,
    FEWER_BATCHES,
    SKIPPED,
    UNEVEN_CALLS,
    SILENT,
    OUT_OF_STEP,
    SIZES,
    CROSSED,
    SOME_INSIDE,
    ALL_INSIDE,
    ALL_IN,
    OUTSIDE,
    NO_RANK_MOVES,
    NOT_SEEN,
    WAITED_IN_VAIN,
    FIRST_FAILURE,
    STUCK_WATCHDOG,
    STOPPED_AT_ONCE,
    SYNC_ENDED,
    BAD_INPUT,
    CHECK_FAILED,
    MEMORY,
    UNTRACED,
    NOT_ENOUGH,
    DIFFERENT,
    NOT_AS_CONFIGURED,
    CAUGHT,
    THREAD_FAILED,
    STRAGGLER,
    LATE,
    TIMEOUTS,
)

# Phases of a call.
LENGTH_SYNC, GROWTH, PRE_ENCODE, LAYERS = "length sync", "growth", "pre_encode", "layers"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    id: str
    severity: str
    ranks: tuple[int, ...]  # that it is about, not those that wait for them
    text: str  # one or two sentences
    next_step: str
    encoder: str = ""
    call: int = 0  # its number on the first of these ranks; 0 if the finding is about no call
    phase: str = ""  # of that call, as above; empty if the finding is about none
    evidence: tuple[str, ...] = ()
    because: str = ""  # the id of the finding that explains this one


@dataclass(frozen=True)
class RankSummary:
    """One rank at the end of its trace."""

    rank: int
    host: str
    pid: int
    calls: int
    state: str
    behind: float | None  # seconds by which its last record is older than the newest of all
    ago: float | None  # seconds since its last record: until now while the job runs, else as `behind`
    waited: float | None  # seconds in length syncs, also in those that it gave up
    caused: float | None  # the share of all waiting that is for this rank
    lag: float | None  # seconds; the median of its rounds


@dataclass(frozen=True)
class Report:
    """All that `diagnose` found in a folder or a log."""

    folder: str
    world_size: int
    moving: bool
    verdict: str
    next_step: str
    findings: tuple[Finding, ...]
    ranks: tuple[RankSummary, ...]
    problems: tuple[str, ...]  # files that were not read, or only in part
    earlier: tuple[str, ...]  # process starts of earlier launches
    summary: tuple[str, ...] = ()  # of each encoder: calls, fallbacks, longest wait, cost
    runs: bool = False  # the job does, as far as is known

    @property
    def exit_code(self) -> int:
        """0: nothing found; 1: a finding; 2: not enough records to tell."""
        if not self.findings:
            return 0
        return 2 if all(finding.id == NOT_ENOUGH for finding in self.findings) else 1


@dataclass(frozen=True)
class Ruling:
    """What it comes to. goes_on: the job does, as `text` says. is_too_early: its waits are young; look again."""

    findings: tuple[Finding, ...] = ()
    text: str = ""
    goes_on: bool = False
    is_too_early: bool = False
