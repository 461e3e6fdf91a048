"""Findings, their ids and order, and the report that holds them."""

from __future__ import annotations

from dataclasses import dataclass

CRITICAL, WARNING, NOTE = "critical", "warning", "note"

EXCEPTION = "exception"
OUT_OF_MEMORY = "out-of-memory"
START_UP = "start-up"
NODE_FAILED = "node-failed"
KILLED = "killed"
STOPPED = "stopped"
TRACED = "in-a-debugger"
ENDED = "ended"
MISSING_RANK = "missing-rank"
FEWER_BATCHES = "fewer-batches"
SKIPPED = "skipped-collective"
UNEVEN_CALLS = "uneven-calls"
SILENT = "no-heartbeat"
OUT_OF_STEP = "out-of-step"
SIZES = "sizes-differ"
CROSSED = "crossed-groups"
ALL_IN = "all-in"
NO_RANK_MOVES = "no-rank-moves"
NOT_SEEN = "not-seen"
WAITED_IN_VAIN = "waited-in-vain"
FIRST_FAILURE = "first-failure"
STUCK_WATCHDOG = "watchdog-stuck"
NOT_ENOUGH = "not-enough-records"
STRAGGLER = "straggler"
LATE = "late"
# No hang, and the only findings then; a report has their text alone.
TOO_EARLY, GOES_ON = "too-early", "goes-on"  # waits are young: look again; ranks move
NO_HANG = (TOO_EARLY, GOES_ON)
# By id, those that explain others first: what to do. {pid}, {host}: of the rank in question.
NEXT_STEPS = {
    EXCEPTION: (
        "Fix what the traceback shows; the other ranks only waited for this one."
    ),
    OUT_OF_MEMORY: (
        "Give the job more host memory, or use less: data loader workers, caches,"
        " pinned memory. Which process was killed, the host's `dmesg` shows; ranks that"
        " time out after it waited for it."
    ),
    START_UP: (
        "Look at the ranks without any evidence here, and their stderr: a process that"
        " was not started, one that ended at once, another MASTER_ADDR or MASTER_PORT,"
        " or a firewall."
    ),
    NODE_FAILED: (
        "Look at that node (`scontrol show node`, its console, `dmesg`), leave it out"
        " (`--exclude`), and start the job again from its last checkpoint; the code is"
        " not the reason."
    ),
    KILLED: (
        "Look who killed it on {host}: an out-of-memory kill (`dmesg`), the scheduler,"
        " or a user; the job cannot go on without it."
    ),
    STOPPED: "`kill -CONT {pid}` on {host}, once you know who stopped it.",
    TRACED: "Detach the debugger from process {pid} on {host}.",
    ENDED: (
        "Look at the end of this rank's stderr for an error; if there is none, it had"
        " fewer batches: make their number equal on all ranks (drop_last,"
        " DistributedSampler)."
    ),
    MISSING_RANK: (
        "Look at what it does there; on {host}, with C frames: `py-spy dump --native"
        " --pid {pid}`. Then its data, a checkpoint, the end of its stderr."
    ),
    FEWER_BATCHES: (
        "Make the number of batches equal on all ranks (drop_last, DistributedSampler,"
        " a limit)."
    ),
    SKIPPED: (
        "Look for what was skipped between these two: a backward, a swallowed"
        " exception, one batch fewer in an evaluation, a collective that only some"
        " ranks call."
    ),
    UNEVEN_CALLS: (
        "Make the number of batches equal on all ranks (drop_last, DistributedSampler)."
    ),
    SILENT: (
        "Look at {host}: is process {pid} stopped (`ps` says T), gone, or the host"
        " unreachable? `py-spy dump` shows a thread that holds Python's lock."
    ),
    OUT_OF_STEP: (
        "One rank made one collective more or fewer: look for uneven batches, and for"
        " code that only some ranks run. nemo_patches helps if the extra one is the"
        " encoder's length sync (uneven evaluation)."
    ),
    SIZES: (
        "Look for a tensor whose size depends on the rank: modules that run in another"
        " order or only on some ranks, unlike parameters, or unused ones."
    ),
    CROSSED: (
        "Look for the ranks without any evidence here, and for code that runs"
        " collectives of several groups in an order that depends on the rank."
    ),
    ALL_IN: (
        "No rank is missing: look at the network and the GPUs (NCCL_DEBUG=INFO); Flight"
        " Recorder dumps (TORCH_FR_BUFFER_SIZE=2000) show which call each rank is in."
    ),
    NO_RANK_MOVES: (
        "They wait for something outside: a server, a file, a lock. Look at the place."
    ),
    NOT_SEEN: (
        "Collect on every host of the job (`nemo-patches stacks --json >"
        " $(hostname).json`), and give the folder; a rank that was stopped or killed"
        " leaves nothing: look at its stderr."
    ),
    WAITED_IN_VAIN: (
        "Look for the rank without such an error, and for the first error of any rank;"
        " `nemo-patches diagnose` on each host while it hangs names the rank, and so"
        " does a trace (NEMO_PATCHES_TRACE) of a NeMo job."
    ),
    FIRST_FAILURE: "Look at the end of that rank's stderr.",
    STUCK_WATCHDOG: (
        "Look at the stacks of all ranks (`py-spy dump --native`); with"
        " NEMO_PATCHES_TRACE the next run tells whether all ranks came out of the"
        " encoder."
    ),
    NOT_ENOUGH: (
        "Collect this from all ranks at one time, while the job hangs: `nemo-patches"
        " stacks --json`, dumps, traces, stall reports, every rank's stderr."
    ),
    STRAGGLER: (
        "Compare its host with the others: disk, network, processors, the GPU's clock;"
        " and its share of the data."
    ),
    LATE: (
        "Look at what held it up then: a slow file system, a checkpoint, a log that only"
        " one rank writes. No number of the model was changed by it."
    ),
}
ORDER = tuple(NEXT_STEPS)
# Of others: critical.
SEVERITIES = {
    **dict.fromkeys((UNEVEN_CALLS, STRAGGLER, LATE, NOT_SEEN, FIRST_FAILURE), WARNING),
    NOT_ENOUGH: NOTE,
}

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
