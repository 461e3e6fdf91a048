"""Facts: what one source says about one rank, with its citation.

Readers return facts and judge nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from nemo_patches.tools.diagnose.conditions import NOT_HEARD
from nemo_patches.tools.diagnose.entries import Entry
from nemo_patches.tools.diagnose.findings import Finding, RankSummary

# A summary of logs
ALL_WELL = "nemo_patches is on, and no line tells of a stall, an error or an end."
OF_MODEL = "the model"  # in place of a Entry's group: what DDP's construction compares
# The rank of a Fact, or the number of a Entry, that its source does not name
NOT_TOLD = -1
MAIN_THREAD = "MainThread"  # as Python names it


class UnreadableError(Exception):
    """There is nothing to diagnose. The text says why."""


@dataclass(frozen=True)
class Condition:
    """text: "ValueError: stack expects each tensor...", "SIGKILL", "Timed out waiting 1800000 ms".
    where: the innermost frames of the user's own code, as in a Place. details: lines that show it,
    such as a traceback's last. exit_code: None where it is not told.
    """

    kind: str
    text: str = ""
    where: str = ""
    details: tuple[str, ...] = ()
    exit_code: int | None = None


@dataclass(frozen=True)
class Place:
    """Where a rank's training thread is: it explains, and accuses nobody.

        where: "read (data.py:41) < main (train.py:80)". collective: what it waits in, named as in a
    stall report; empty: none. caller: who called that: "the length sync (conformer_encoder.py:4)".
    activity: one of judging/kinds.py or verdicts.py. worker: "its worker (pid 24950) is in
    __getitem__ (hang.py:24), at a.wav". way: its Python frames, outermost first. counters: integers
    of its loops, by "batch_idx of run (evaluation_loop.py)". loops: by the same names, the line at
    which that loop begins; 0: the thread has left it; NO_LOOP (frame_source.py): no loop sets that
    variable; no entry where the source is not known. thread: its name, where several threads of the
    rank are in collectives: each has a place, beside the rank's. hook: as waits.hook() has it.
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
    thread: str = ""
    hook: str = ""

    @property
    def wait(self) -> str:
        """What makes two ranks' waits the same."""
        return f"{self.collective} of {self.caller}" if self.caller else self.collective


@dataclass(frozen=True)
class EncoderCall:
    """A rank's last encoder call. Ranks at different calls do not by themselves show a wait.

    title: "training call 71 of ConformerEncoder". position: training calls, and evaluation calls
    since.
    """

    title: str
    position: tuple[int, int]


@dataclass(frozen=True)
class Motion:
    """Whether a rank moved between two looks. by: "i of train went from 55 to 99". still_s: how
    long it has not. is_hang: its own job has called that a hang, however short it is.
    """

    moved: bool = False
    by: str = ""
    still_s: float | None = None
    is_hang: bool = False


@dataclass(frozen=True)
class ProcessRank:
    """A process is this rank of the job. world_size: 0: unknown. in_container: the pid is one of a
    container, and on its host another process has it.
    """

    world_size: int = 0
    pid: int = 0
    in_container: bool = False


Value: TypeAlias = Entry | Condition | Place | EncoderCall | Motion | ProcessRank


@dataclass(frozen=True)
class Fact:
    """cite: printed as it is: "train.log:4711", "rank 3's trace", "node7, pid 4711".

    at: seconds since 1970 by the clock of `host`, 0 if unknown; compared only with the same host's.
    own: said by the rank's own process or the kernel; False: by another rank or the launcher.
    """

    rank: int
    value: Value
    cite: str
    at: float = 0.0
    host: str = ""
    own: bool = True

    @property
    def condition(self) -> Condition:
        """Empty where it is about something else."""
        return self.value if isinstance(self.value, Condition) else Condition("")

    @property
    def condition_kind(self) -> str:
        return self.condition.kind

    @property
    def condition_text(self) -> str:
        return self.condition.text

    @property
    def is_of_absence(self) -> bool:
        """Whether its rank is said to be in no collective, or not to be heard."""
        if isinstance(self.value, Place):
            return not self.value.collective
        return self.condition_kind in NOT_HEARD

    @property
    def entry(self) -> Entry | None:
        return self.value if isinstance(self.value, Entry) else None

    @property
    def entered(self) -> Entry:
        """The collective; empty where it is about something else."""
        return self.entry or Entry(NOT_TOLD, "", NOT_TOLD)


@dataclass
class Evidence:
    """All facts of a job, and what else its sources say.

    groups: by process group, as Entries name it, the ranks of which anything is known; begins: by
    group and rank, the number from which its record is complete. partly_known: groups that may have
    ranks of which nothing is known. patched: nemo_patches is on, so an all-reduce of one number is
    not the length sync. world_size: 0 if unknown. findings: a source's own, about other things than
    hangs (stragglers, settings that differ). looked_for: for the report on files in which nothing
    was recognised. other_jobs: by name, the facts of stacks of other jobs, which are judged apart.
    past: why this is no present hang; empty: it may be one. files: by reader, those that it is
    from. printed: by rank, a line of its own, quoted; ran_out: likewise, that it has no more
    batches; alone: likewise, lines that no other has printed. is_numbered: nothing tells the
    stacks' ranks.
    cure: what the running job's own line says of uneven batches. rank_of_pid: as logs tell it.
    idle: by rank, that its GPU alone idles.
    """

    facts: list[Fact] = field(default_factory=list)
    is_well: bool = False  # the traces of all ranks end where nothing is wrong
    groups: dict[str, set[int]] = field(default_factory=dict)
    begins: dict[tuple[str, int], int] = field(default_factory=dict)
    partly_known: set[str] = field(default_factory=set)
    patched: bool = False
    world_size: int = 0
    findings: list[Finding] = field(default_factory=list)
    ranks: list[RankSummary] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    earlier: list[str] = field(default_factory=list)
    past: str = ""
    looked_for: list[str] = field(default_factory=list)
    other_jobs: dict[str, list[Fact]] = field(default_factory=dict)
    files: dict[str, list[Path]] = field(default_factory=dict)
    printed: dict[int, str] = field(default_factory=dict)
    ran_out: dict[int, str] = field(default_factory=dict)
    alone: dict[int, str] = field(default_factory=dict)
    is_numbered: bool = False
    cure: str = ""
    rank_of_pid: dict[int, int] = field(default_factory=dict)
    idle: dict[int, str] = field(default_factory=dict)
