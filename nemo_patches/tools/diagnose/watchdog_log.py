"""The diagnosis of a plain training log: what its lines of PyTorch's NCCL watchdog mean, and whether this patch helps.

It knows the wording of torch 1.13 to 2.9. The log may be of any size, and hold colours, several ranks' lines mixed and
lines that a terminal has wrapped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nemo_patches.stall.rank_text import named
from nemo_patches.sync.safe_text import safe
from nemo_patches.tools.diagnose.decoder import header_in
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding, Report
from nemo_patches.tools.diagnose.folder import UnreadableError

LENGTH_SYNC = "log-length-sync"
ONE_NUMBER = "log-one-number-reduce"
OUT_OF_STEP = "log-out-of-step"
DRIFT = "log-seqnum-drift"
SIZES = "log-sizes-differ"
BUFFERS = "log-buffer-broadcast"
OTHER = "log-other-collective"
OURS = "log-stall-report"

_BLOCK_BYTES = 1 << 20
_LONGEST_LINE = 1 << 14  # characters that are looked at
_MOST_KEPT = 4096  # ranks, and mismatches
_MOST_RANKS = 1 << 20
_MOST_JOINED = 3  # lines that a terminal may have made of one
_LARGE_BROADCAST = 1 << 16  # elements; DDP's buffers are more, a metric is less

_NEEDLES = (b"WorkNCCL", b"Watchdog", b"NCCL work", b"last enqueued", b"CollectiveFingerPrint", b"nemo_patches ")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK = re.compile(r"\[rank(\d{1,7})\]:|\[(?:PG [^\]]{0,80})?Rank (\d{1,7})\]")
_NEW_MESSAGE = re.compile(r"^\W{0,3}(?:\d+: )?\[(?:rank\d|E |E\d|W |W\d|I |I\d|F )")
_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,18}), OpType=(\w{1,40})"
    r"(?:, TensorShape=\[([\d, ]{0,200})\])?(?:, NumelIn=(\d{1,18}))?"
)
_GROUP = re.compile(r"\[PG (?:ID )?(\w{1,40})")
_STATUS = re.compile(
    r"(?:at work|NCCL work|work sequence id): (\d{1,18}).{0,40}"
    r"last enqueued (?:NCCL )?work: (-?\d{1,18}), last completed (?:NCCL )?work: (-?\d{1,18})"
)
_MISMATCH = re.compile(
    r"Rank (\d{1,7}) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(\d{1,18}),? ?)?"
    r"OpType=(\w{1,40})"
)
_OURS = re.compile(r" nemo_patches (INFO|WARNING|ERROR) (\[rank \d{1,7}/(\d{1,7}) [^\]]{0,100}\] .*)")
_PROCESSES = re.compile(r"Starting with (\d{1,7}) processes")


@dataclass(frozen=True)
class TimedOut:
    """One rank's collective that ran out of time."""

    rank: int
    sequence: int
    kind: str
    numel: int  # elements; -1 if the log does not say

    def __str__(self) -> str:
        return f"{self.kind}" + (f" of {self.numel}" if self.numel >= 0 else "")


@dataclass
class Log:
    """What a log says."""

    lines: int = 0
    timeouts: dict[int, TimedOut] = field(default_factory=dict)  # the first of timeout rank
    groups: dict[tuple[int, int], str] = field(default_factory=dict)  # of (rank, sequence number)
    enqueued: dict[int, int] = field(default_factory=dict)  # by rank, the last one's sequence number
    mismatches: list[tuple[tuple[int, int, str], ...]] = field(default_factory=list)  # rank, sequence number, kind
    patched: bool = False  # nemo_patches is in it
    stalls: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    size: int = 0  # the world size; 0 if the log does not say
    in_length_sync: bool = False  # a stack in it shows the encoder's method

    @property
    def world_size(self) -> int:
        return max([self.size, *(rank + 1 for rank in self.ranks)])


def diagnose_log(path: Path) -> Report:
    """The report on a log. Raises UnreadableError."""
    log = read_log(path)
    findings = tuple(_findings(log))
    verdict = findings[0].text if findings else f"Nothing found: no line of the NCCL watchdog in {log.lines} lines."
    return Report(
        folder=safe(str(path)),
        world_size=log.world_size,
        moving=False,
        verdict=verdict,
        next_step=findings[0].next_step if findings else "",
        findings=findings,
        ranks=(),
        problems=(),
        earlier=(),
    )


def read_log(path: Path) -> Log:
    """Read a log, in blocks. Raises UnreadableError."""
    log = Log()
    try:
        with path.open("rb") as file:
            start = file.peek(_BLOCK_BYTES)[:_BLOCK_BYTES]
            if start[:2] == b"\x1f\x8b":
                raise UnreadableError(f"{path}: it is compressed; unpack it first")
            if header_in(start.partition(b"\n")[0]) is not None:
                raise UnreadableError(f"{path}: it is one rank's trace; give the folder that it is in")
            for message in _messages(_lines(iter(lambda: file.read(_BLOCK_BYTES), b""), log)):
                _take(log, message)
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}") from error
    return log


def _lines(blocks: Iterable[bytes], log: Log) -> Iterator[str]:
    """The lines of the blocks that hold anything of interest, without colours, cut to a bounded length."""
    rest = b""
    for block in blocks:
        log.lines += block.count(b"\n")
        whole = rest + block
        end = whole.rfind(b"\n") + 1
        rest = whole[end:][-_BLOCK_BYTES:]
        log.in_length_sync = log.in_length_sync or b"update_max_seq" in whole
        if any(needle in whole for needle in _NEEDLES) or b"Starting with " in whole:
            yield from map(_clean, whole[:end].replace(b"\r", b"\n").split(b"\n"))
        else:
            yield ""  # ends a message that was begun before
    yield _clean(rest)


def _clean(line: bytes) -> str:
    return _COLOURS.sub("", line[: 4 * _LONGEST_LINE].decode("utf-8", "replace"))[:_LONGEST_LINE].rstrip()


def _messages(lines: Iterable[str]) -> Iterator[str]:
    """The lines, with those that a terminal has wrapped put together again."""
    begun: list[str] = []
    for line in lines:
        if begun and len(begun) < _MOST_JOINED and line and not _NEW_MESSAGE.search(line):
            begun.append(line)
            if "timing out" in line or "ng out." in line:
                yield "".join(begun)
                begun = []
            continue
        if begun:
            yield "".join(begun)
            begun = []
        cut = ("Watchdog caught" in line or line.endswith("[Rank")) and "before timing out" not in line
        if cut:
            begun = [line + " " if line.endswith("[Rank") else line]
        else:
            yield line
    if begun:
        yield "".join(begun)


def _take(log: Log, line: str) -> None:
    if ours := _OURS.search(line):
        log.patched = log.patched or " patched " in ours[2] or "Missing: " in ours[2]
        log.size = max(log.size, min(int(ours[3]), _MOST_RANKS))
        if "Missing: " in ours[2] and len(log.stalls) < 8:
            log.stalls.append(safe(ours[2]))
    if processes := _PROCESSES.search(line):
        log.size = max(log.size, min(int(processes[1]), _MOST_RANKS))
    mismatch = tuple((int(match[1]), int(match[2] or -1), match[3]) for match in _MISMATCH.finditer(line))
    if len(mismatch) > 1 and len(log.mismatches) < _MOST_KEPT:
        log.mismatches.append(mismatch[:8])
    prefix = _RANK.search(line)
    if prefix is None:
        return
    rank = int(prefix[1] or prefix[2])
    if rank >= _MOST_RANKS or (len(log.ranks) >= _MOST_KEPT and rank not in log.ranks):
        return
    log.ranks.add(rank)
    timeout = _TIMEOUT.search(line)
    if timeout and rank not in log.timeouts:
        log.timeouts[rank] = TimedOut(rank, int(timeout[1]), safe(timeout[2]), _numel(timeout[3], timeout[4]))
    if (status := _STATUS.search(line)) and len(log.groups) < 4 * _MOST_KEPT:
        group = _GROUP.search(line)
        log.groups.setdefault((rank, int(status[1])), group[1] if group else "")
        log.enqueued.setdefault(rank, int(status[2]))


def _numel(shape: str | None, numel: str | None) -> int:
    if numel:
        return int(numel)
    if shape is None:
        return -1
    product = 1
    for length in shape.replace(" ", "").split(","):
        product *= int(length[:9] or 1)
    return min(product, 1 << 60)


def _findings(log: Log) -> Iterator[Finding]:
    timeouts = sorted(log.timeouts.values(), key=lambda timeout: timeout.rank)
    if log.mismatches:
        yield _mismatch(log)
    elif timeouts:
        yield _timed_out(log, timeouts)
    if log.stalls:
        yield Finding(
            id=OURS,
            severity=WARNING,
            ranks=(),
            text=f"nemo_patches' own stall reports are in this log, {len(log.stalls)} of them at least.",
            next_step="They name the rank that was missing, and what it did.",
            evidence=tuple(log.stalls[:4]),
        )


def _mismatch(log: Log) -> Finding:
    first = log.mismatches[0]
    collectives = ", ".join(f"rank {rank} {safe(kind)}" for rank, _, kind in first)
    return Finding(
        id=OUT_OF_STEP,
        severity=CRITICAL,
        ranks=tuple(rank for rank, _, _ in first),
        text=f"The ranks ran different collectives at the same time ({collectives}): they are out of step.",
        next_step=_OUT_OF_STEP,
        evidence=tuple(f"rank {rank}: {safe(kind)}, sequence number {number}" for rank, number, kind in first),
    )


_OUT_OF_STEP = (
    "One rank has made a collective more or fewer: look for uneven batches, and for code that only one rank runs. "
    "nemo_patches helps where the one too many is the encoder's length sync (uneven evaluation); run with "
    "NEMO_PATCHES_TRACE, and diagnose the folder, to see which rank makes more calls."
)


def _timed_out(log: Log, timeouts: list[TimedOut]) -> Finding:
    evidence = [f"rank {timeout.rank}: {timeout}, SeqNum {timeout.sequence}" for timeout in timeouts[:8]]
    evidence += [f"rank {rank}: last enqueued {number}" for rank, number in sorted(log.enqueued.items())[:8]]
    if log.in_length_sync:
        evidence.append("a stack in the log shows update_max_seq_length")
    ranks = tuple(timeout.rank for timeout in timeouts)
    kinds = {timeout.kind for timeout in timeouts}
    groups = {log.groups.get((timeout.rank, timeout.sequence), "") for timeout in timeouts} - {""}
    comparable = len(groups) < 2
    behind = _not_there(log, timeouts) if comparable else ()

    def finding(kind: str, text: str, next_step: str, concerned: tuple[int, ...] = ()) -> Finding:
        return Finding(kind, CRITICAL, concerned or behind or ranks, text, next_step, evidence=tuple(evidence))

    if comparable and len(kinds) > 1:
        return finding(
            OUT_OF_STEP,
            f"The ranks waited in different collectives ({_by_kind(timeouts)}): they are out of step.",
            _OUT_OF_STEP,
            ranks,
        )
    sequences = {timeout.sequence for timeout in timeouts}
    if comparable and len(sequences) > 1:
        low, high = min(sequences), max(sequences)
        late = tuple(timeout.rank for timeout in timeouts if timeout.sequence == low)
        return finding(
            DRIFT,
            f"The ranks' collectives have drifted apart: {named(late)} waited in SeqNum {low}, others in up to {high}.",
            _OUT_OF_STEP,
            late,
        )
    sizes = {timeout.numel for timeout in timeouts}
    if comparable and len(sizes) > 1:
        return finding(
            SIZES,
            f"The ranks gave the same {timeouts[0].kind} different sizes ({', '.join(map(str, sorted(sizes)))}).",
            "With sync_max_audio_length=false, DDP's buffer broadcast meets positional encodings of different sizes: "
            "nemo_patches keeps their shapes equal. Otherwise look for parameters that only some ranks use.",
            ranks,
        )
    return finding(*_one_collective(log, timeouts[0], ranks, behind))


def _one_collective(
    log: Log, timeout: TimedOut, ranks: tuple[int, ...], behind: tuple[int, ...]
) -> tuple[str, str, str]:
    who = f"; {named(behind)} did not come to it" if behind else ""
    if timeout.kind == "ALLREDUCE" and timeout.numel == 1 and not log.patched:
        return (
            LENGTH_SYNC,
            f"{_capital(named(ranks))} waited in an all-reduce of one number, as the encoder's length sync is"
            f"{who or '; the log does not tell for whom'}.",
            "nemo_patches bounds this wait and names the missing rank: `nemo-patches run -- COMMAND`. That rank is "
            "held up elsewhere; if it never comes, the gradients' all-reduce waits for it all the same. (Other reduces "
            "of one number: a logged loss with sync_dist, skip_nan_grad.)",
        )
    if timeout.kind == "ALLREDUCE" and timeout.numel == 1:
        return (
            ONE_NUMBER,
            f"{_capital(named(ranks))} waited in an all-reduce of one number{who}. With nemo_patches, which is in this "
            "log, it is not the encoder's length sync.",
            "Look for a logged value with sync_dist, skip_nan_grad, or an early stop: their reduces are of one number, "
            "too. nemo_patches cannot bound those.",
        )
    if timeout.kind == "BROADCAST" and (timeout.numel < 0 or timeout.numel >= _LARGE_BROADCAST):
        return (
            BUFFERS,
            f"{_capital(named(ranks))} waited in a broadcast of {timeout.numel} elements, as DDP makes of a model's "
            f"buffers before each training step{who}.",
            "A rank has not come to that step: its data, or an evaluation that is longer on it. nemo_patches does not "
            "bound DDP's broadcast; a trace (NEMO_PATCHES_TRACE) and its stall reports name the rank.",
        )
    return (
        OTHER,
        f"{_capital(named(ranks))} waited in {timeout}{who}: this is not the encoder's length sync.",
        "nemo_patches cannot bound it; a trace (NEMO_PATCHES_TRACE) tells whether all ranks came out of the encoder, "
        "and which one did not.",
    )


def _not_there(log: Log, timeouts: list[TimedOut]) -> tuple[int, ...]:
    """Ranks that had not enqueued the collective, or of which the log has other lines but not this one."""
    number = max(timeout.sequence for timeout in timeouts)
    behind = {rank for rank, last in log.enqueued.items() if last < number}
    silent = set(range(log.world_size)) - set(log.timeouts) if log.size else log.ranks - set(log.timeouts)
    missing = behind or (silent if len(silent) < log.world_size else set())
    return tuple(sorted(missing))[:64]


def _by_kind(timeouts: list[TimedOut]) -> str:
    kinds = sorted({timeout.kind for timeout in timeouts})
    return ", ".join(
        f"{safe(kind)} on {named(timeout.rank for timeout in timeouts if timeout.kind == kind)}" for kind in kinds
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
