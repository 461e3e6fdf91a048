"""What `diagnose` says: findings, and the report that they are in."""

from __future__ import annotations

from dataclasses import dataclass

CRITICAL, WARNING, NOTE = "critical", "warning", "note"

# The findings, those that explain others first.
EXCEPTION = "exception"
DIFFERENT_SYNC = "different-sync"
KILLED = "killed"
ENDED = "ended"
MISSING_RANK = "missing-rank"
UNEVEN_CALLS = "uneven-calls"
BEFORE_ENCODER = "stuck-before-encoder"
SILENT = "no-heartbeat"
SOME_INSIDE = "some-inside"
ALL_INSIDE = "all-inside"
OUTSIDE = "stuck-outside-encoder"
SYNC_ENDED = "length-sync-ended"
BAD_INPUT = "bad-input"
CHECK_FAILED = "check-failed"
MEMORY = "memory-runs-away"
UNTRACED = "untraced-rank"
NOT_ENOUGH = "not-enough-records"
DIFFERENT = "different-ranks"
STRAGGLER = "straggler"
LATE = "late"
CAUGHT = "exception-caught"
TIMEOUTS = "timeouts"
ORDER = (
    EXCEPTION,
    DIFFERENT_SYNC,
    KILLED,
    ENDED,
    MISSING_RANK,
    UNEVEN_CALLS,
    BEFORE_ENCODER,
    SILENT,
    SOME_INSIDE,
    ALL_INSIDE,
    OUTSIDE,
    SYNC_ENDED,
    BAD_INPUT,
    CHECK_FAILED,
    MEMORY,
    UNTRACED,
    NOT_ENOUGH,
    DIFFERENT,
    CAUGHT,
    STRAGGLER,
    LATE,
    TIMEOUTS,
)

LENGTH_SYNC, GROWTH, PRE_ENCODE, LAYERS = "length sync", "growth", "pre_encode", "layers"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    ranks: those that it is about, not those that wait for them. call: its number on the first of these ranks, 0 where
    it is about none. phase: of that call: "length sync", "growth", "pre_encode" or "layers"; empty where it is about
    none. text: one or two sentences. evidence: what it was told by. because: the finding that explains this one.
    """

    id: str
    severity: str
    ranks: tuple[int, ...]
    text: str
    next_step: str
    encoder: str = ""
    call: int = 0
    phase: str = ""
    evidence: tuple[str, ...] = ()
    because: str = ""


@dataclass(frozen=True)
class RankSummary:
    """One rank at the end of its trace. behind: seconds by which its last record is older than the newest of all."""

    rank: int
    host: str
    pid: int
    calls: int
    state: str
    behind: float | None
    waited: float | None
    caused: float | None  # the share of all waiting that is for this rank
    lag: float | None  # seconds; the median of its rounds


@dataclass(frozen=True)
class Report:
    """All that `diagnose` found in a folder. problems: files that are not read, or in part."""

    folder: str
    world_size: int
    moving: bool
    verdict: str
    next_step: str
    findings: tuple[Finding, ...]
    ranks: tuple[RankSummary, ...]
    problems: tuple[str, ...]
    earlier: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0: nothing found; 1: a finding; 2: it cannot be told."""
        if not self.findings:
            return 0
        return 2 if all(finding.id == NOT_ENOUGH for finding in self.findings) else 1
