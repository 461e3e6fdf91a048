"""Facts: what one source tells of one rank, with where it says so. Readers return these and judge nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from nemo_patches.stall.judge import Seat
from nemo_patches.tools.diagnose.findings import Finding, RankSummary

ALL_WELL = "nemo_patches is on, and no line tells of a stall, an error or an end."  # a summary of logs
NOT_TOLD = -1  # a Fact's rank where its source does not tell whose it is; likewise a Seat's number


@dataclass(frozen=True)
class Fate:
    """text: "ValueError: stack expects each tensor...", "SIGKILL", "Timed out waiting 1800000 ms". where: the innermost
    frames of the user's own code, as in a Place. details: lines that show it, such as a traceback's last. exit_code:
    None where it is not told.
    """

    kind: str
    text: str = ""
    where: str = ""
    details: tuple[str, ...] = ()
    exit_code: int | None = None


@dataclass(frozen=True)
class Place:
    """Where a rank's training thread is: it explains, and accuses nobody.

    where: "read (data.py:41) < main (train.py:80)". collective: what it waits in, as a stall report calls it; empty: in
    none. caller: who called that: "the length sync (conformer_encoder.py:794)". activity: as stall/rank_kinds.py has
    them, or facts' own. worker: "its worker (pid 24950) is in __getitem__ (hang.py:24), at a.wav". way: its Python
    frames, outermost first. counters: integers of its loops, by "batch_idx of run (evaluation_loop.py)". loops: by the
    same, at which line that loop begins; 0: it has come out of it; NO_LOOP (source.py): it is another one in each call;
    none where that is not known.
    """

    where: str = ""
    collective: str = ""
    caller: str = ""
    activity: str = ""
    worker: str = ""
    details: tuple[str, ...] = ()
    way: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    loops: Mapping[str, int] = field(default_factory=dict)

    @property
    def seat(self) -> str:
        """What makes two ranks' waits the same."""
        return f"{self.collective} of {self.caller}" if self.caller else self.collective


@dataclass(frozen=True)
class Call:
    """A rank's last encoder call. That ranks are at different ones shows by itself no wait.

    title: "training call 71 of ConformerEncoder". number: 0 before the first. position: (training calls, evaluation
    calls since), alike on ranks that are in step, whatever their numbers. phase: where it is in it; empty: it has come
    out. round, came_to: of the length sync, the latest that it is known to have come to, and that it may have.
    in_vain: it gave a round up there. sync_ended: its length sync has ended, because a rank had gone. raised: the call
    ended so. in_backward: it is in that call's. since_s: for how long it had entered no other when it was looked at;
    None where nobody looked. behind_since: the call from which on others gave up waiting for it; 0: none. unsure: why
    this may not be what it did last; lost_last: that is so only because the last round is not there, as in the record
    of a rank that was killed. reported: others that wait for a round of this encoder, or for the job, say that it is
    missing. last: its last record, for a person.
    """

    encoder: str
    number: int
    title: str
    position: tuple[int, int] = (0, 0)
    phase: str = ""
    round: int = 0
    came_to: int = 0
    in_vain: bool = False
    sync_ended: bool = False
    raised: bool = False
    in_backward: bool = False
    since_s: float | None = None
    behind_since: int = 0
    unsure: str = ""
    lost_last: bool = False
    reported: bool = False
    last: str = ""


@dataclass(frozen=True)
class Motion:
    """Whether it went on between two looks. by: "i of train went from 55 to 99". still_s: so long it has not."""

    moved: bool
    by: str = ""
    still_s: float | None = None


@dataclass(frozen=True)
class Member:
    """That it is a rank of the job. world_size: 0 where not told. notes_sigterm: SIGTERM would leave a line in its
    trace.
    """

    world_size: int = 0
    pid: int = 0
    notes_sigterm: bool = False


Value: TypeAlias = Seat | Fate | Place | Call | Motion | Member


@dataclass(frozen=True)
class Fact:
    """cite: printed as it is: "train.log:4711", "rank 3's dump", "node7, pid 4711".

    at: seconds since 1970 by the clock of `host`, 0 where not told; compared only with the same host's. own: its own
    process or the kernel says it; False: another rank, or the launcher, does.
    """

    rank: int
    value: Value
    cite: str
    at: float = 0.0
    host: str = ""
    own: bool = True

    @property
    def fate_kind(self) -> str:
        """Empty where it is no fate."""
        return self.value.kind if isinstance(self.value, Fate) else ""

    @property
    def fate_text(self) -> str:
        return self.value.text if isinstance(self.value, Fate) else ""

    @property
    def seat(self) -> Seat | None:
        return self.value if isinstance(self.value, Seat) else None


@dataclass
class Evidence:
    """All facts of a job, and what else its sources tell.

    groups: by process group, as Seats name it, its ranks of which anything is known; begins: by group and rank from
    which number on its record is whole. partly_known: groups that may have ranks of which nothing is known. patched:
    nemo_patches is on, so a reduce of one number is not the length sync's. world_size: 0 where nothing tells it.
    findings: of what is no hang (a source's own: stragglers, settings that differ). looked_for: what was looked for in
    files that told nothing. saw_a_wait: a stall monitor saw some rank wait in a collective. perhaps_missing: ranks
    whom only those report missing that have ended in good order since; or whose dumps may lie elsewhere. traces_alone:
    there is no other source, and the ranks' calls tell all that their rounds and places do. explained: by encoder the
    ranks that are behind for a reason that a finding has; not empty where ranks are not at one step, so that who came
    to a round shows nothing.
    """

    facts: list[Fact] = field(default_factory=list)
    groups: dict[str, set[int]] = field(default_factory=dict)
    begins: dict[tuple[str, int], int] = field(default_factory=dict)
    partly_known: set[str] = field(default_factory=set)
    patched: bool = False
    saw_a_wait: bool = False
    perhaps_missing: set[int] = field(default_factory=set)
    traces_alone: bool = False
    explained: dict[str, set[int]] = field(default_factory=dict)
    world_size: int = 0
    findings: list[Finding] = field(default_factory=list)
    ranks: list[RankSummary] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    earlier: list[str] = field(default_factory=list)
    looked_for: list[str] = field(default_factory=list)
    moving: bool = False
    runs: bool = False
