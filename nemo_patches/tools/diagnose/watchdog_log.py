"""The diagnosis of plain training logs: what the lines of PyTorch and its launcher mean, and whether this patch helps.

It knows the wording of torch 1.10 to 2.15. A log may be of any size, compressed, one of many in a folder, and hold
colours, prefixes, several ranks' lines mixed and lines that a terminal has wrapped.
"""

from __future__ import annotations

import gzip
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from nemo_patches.channel.safe_text import safe
from nemo_patches.stall.rank_text import named
from nemo_patches.tools.diagnose.decoder import header_in
from nemo_patches.tools.diagnose.findings import CRITICAL, NOT_ENOUGH, NOTE, WARNING, Finding, Report
from nemo_patches.tools.diagnose.folder import UnreadableError
from nemo_patches.tools.diagnose.process_failures import LAUNCHER_LINE, ProcessFailures

LENGTH_SYNC = "log-length-sync"
ONE_NUMBER = "log-one-number-reduce"
OUT_OF_STEP = "log-out-of-step"
DRIFT = "log-seqnum-drift"
SIZES = "log-sizes-differ"
BUFFERS = "log-buffer-broadcast"
OTHER = "log-other-collective"
OURS = "log-stall-report"
DESYNC = "log-desync-report"
STUCK = "log-watchdog-stuck"
GLOO = "log-gloo"

STANDARD_INPUT = Path("-")
_BLOCK_BYTES = 1 << 20
_LONGEST_LINE = 1 << 14  # characters that are looked at
_MOST_KEPT = 4096  # ranks, and mismatches
_MOST_RANKS = 1 << 20
_MOST_JOINED = 3  # lines that a terminal may have made of one
_MOST_JOINED_OF_LONG = 16  # likewise, of one that is known to be long
_SIZES_MAY_DIFFER = ("COALESCED", "ALLTOALL", "GATHER", "SCATTER", "SEND", "RECV")  # as these begin
_MOST_APART = 200  # collectives by which the ranks of one group may be apart: what is enqueued is bounded
_LARGE_BROADCAST = 1 << 16  # elements; DDP's buffers are more, a metric is less

_MOST_FILES = 10_000
_OTHER_FORMATS = (b"\xfd7zXZ\0", b"BZh", b"\x28\xb5\x2f\xfd", b"PK\3\4", b"\xff\xfe", b"\xfe\xff")
_ATTEMPT = re.compile(r"attempt_\d{1,6}")

_NEEDLES = (
    b"WorkNCCL",
    b"atchdog",
    b"ProcessGroupNCCL",
    b"NCCL work",
    b"last enqueued",
    b"CollectiveFingerPrint",
    b"nemo_patches ",
    b"Starting with ",
    b"our best knowledge",
    b"join collective",
    b"missing ranks: {",
    b"gloo",
    b"exitcode",
    b"first observed failure",
    b"rank      :",
    b"monitoredBarrier",
    b"thread terminated",
    b"oom_kill",
    b"ut of memory",
    b"Out Of Memory",
    b"low on memory",
    b"memory pressure",
    b"[rank",
)
LOOKED_FOR = (
    "the NCCL watchdog's time-outs and heartbeat, desync reports, fr_trace's output, Gloo's errors, torchrun's table "
    "of failures, exceptions and CUDA errors that ended a rank, kills for want of memory, nemo_patches' own lines"
)
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK = re.compile(r"\[rank(\d{1,7})\]:|\[(?:PG [^\]]{0,80})?Rank (\d{1,7})\]")
_NEW_MESSAGE = re.compile(
    r"^\W{0,3}(?:\d+: )?\[(?:rank\d|E |E\d|W |W\d|I |I\d|F )|\[rank\d{1,7}\]:|ProcessGroupNCCL\.cpp:\d{1,6}\]|NCCL INFO"
)
_SEVERAL = re.compile(r"(?=\[rank\d{1,7}\]:\[[EFWI])|(?<=[^:])(?=\[[EFWI] ProcessGroupNCCL)")  # processes' in a line
_QUOTED = re.compile(r"^(?:> ?){1,8}")
_TIMEOUT = re.compile(
    r"(?:Watchdog ?caught ?collective ?operation ?timeout:|\] Work) ?WorkNCCL\("
    r"(?:SeqNum=(\d{1,18}), ?)?OpType=(\w{1,40})(?:, ?TensorShape=\[([\d, ]{0,200})\])?(?:, ?NumelIn=(\d{1,18}))?"
)
_GROUP = re.compile(r"\[PG ?(?:ID ?)?(\w{1,40})(?: ?PG ?GUID ?(\w{1,40}))?")
_STATUS = re.compile(
    r"(?:at ?work|NCCL ?work|work ?sequence ?id): ?(\d{1,18}).{0,40}?"
    r"last ?enqueued ?(?:NCCL ?)?work: ?(-?\d{1,18}), ?last ?completed ?(?:NCCL ?)?work: ?(-?\d{1,18})"
)
_MISMATCH = re.compile(
    r"Rank ?(\d{1,7}) ?is ?running ?collective: ?CollectiveFingerPrint\((?:SequenceNumber=(\d{1,18}),? ?)?"
    r"OpType=(\w{1,40})(?:, ?TensorShape=\[([\d, ]{0,200})\])?"
)
_LAGGING = re.compile(r"\[([\d, -]{1,2000})\] finished collective #\d{1,18}, but didn't join collective #(\d{1,18})")
_NEVER_JOINED = re.compile(r"ranks? \[([\d, -]{1,2000})\] are the lagging ranks")
_JOINED = re.compile(r"\[([\d, -]{1,2000})\] joined but didn't finish collective #\d{1,18}")
_NOT_PASSED = re.compile(r"Ranks? ([\d, ]{1,20000}) failed to pass monitoredBarrier")
_REACHED = re.compile(r"Rank (\d{1,7}) successfully reached monitoredBarrier")
_EXPECTED_RANKS = re.compile(r"expected ranks: \{([\d, ]{1,20000})\}")
_MISSING_RANKS = re.compile(r"missing ranks: \{([\d, ]{1,20000})\}")
_SIGNAL = re.compile(
    r"dump ?signal ?due ?to ?a ?collective ?timeout ?from ?(this ?local)?.{0,120}?"
    r"Last ?enqueued ?NCCL ?work: ?(-?\d{1,18}), ?last ?completed ?NCCL ?work: ?(-?\d{1,18})"
)
_STUCK = re.compile(r"watchdog got stuck for (\d{1,9}) seconds|(Heartbeat monitor timed out)")
_GLOO = re.compile(
    r"(?:gloo[/:]|ProcessGroupGloo).{0,300}?"
    r"(Timed ?out ?waiting ?\d+ ?ms[\w ]{0,60}|Connection ?closed ?by ?peer|Connection ?reset ?by ?peer)"
)
_FAILED_COLLECTIVE = re.compile(
    r"Some NCCL operations have failed|To avoid data inconsistency|watchdog thread terminated with exception"
)
_TELLS_OF_AN_END = re.compile(
    r"collective operation timeout|timed out in blocking wait|closing signal SIG|dump signal|failed \(exitcode|"
    r"first observed failure|monitoredBarrier"
)
_OURS = re.compile(r" nemo_patches (INFO|WARNING|ERROR) (\[rank \d{1,7}/(\d{1,7}) [^\]]{0,100}\] .*)")
_PROCESSES = re.compile(r"Starting with (\d{1,7}) processes")


@dataclass(frozen=True)
class TimedOut:
    """One rank's collective that ran out of time."""

    rank: int
    sequence: int  # -1 if the log does not say
    kind: str  # empty if the log does not say
    numel: int  # elements; -1 if the log does not say

    def __str__(self) -> str:
        return (self.kind or "a collective") + (f" of {self.numel}" if self.numel >= 0 else "")


@dataclass(frozen=True)
class Fingerprint:
    """What a rank ran, as torch's debug wrapper found it. shape: empty if the log does not say."""

    rank: int
    sequence: int
    kind: str
    shape: str


@dataclass
class Log:
    """What a log says."""

    lines: int = 0
    timeouts: dict[int, TimedOut] = field(default_factory=dict)  # the first of each rank
    unnamed: dict[int, TimedOut] = field(default_factory=dict)  # by rank, where another line alone tells of a timeout
    ambiguous: bool = False  # a rank has timeouts with several sequence numbers, of several groups
    fell_to: dict[int, set[int]] = field(default_factory=dict)  # by rank, sequence numbers below its first
    groups: dict[tuple[int, int], str] = field(default_factory=dict)  # of (rank, sequence number)
    enqueued: dict[tuple[str, int], int] = field(default_factory=dict)  # by group and rank, the last sequence number
    mismatches: list[tuple[Fingerprint, ...]] = field(default_factory=list)
    lagging: dict[int, str] = field(default_factory=dict)  # ranks that a desync report, or fr_trace, names; the line
    joined: dict[int, str] = field(default_factory=dict)  # likewise, which had joined a collective
    deduplicated: bool = False  # Ray has left out lines of some ranks that are as others'
    came: set[int] = field(default_factory=set)  # ranks that such a report tells to have come
    in_a_collective: set[int] = field(default_factory=set)  # ranks whose watchdog has met an error, of any collective
    signalled: set[int] = field(default_factory=set)  # ranks that say that a collective of theirs has timed out
    stuck: dict[int, int] = field(default_factory=dict)  # by rank the seconds, 0 if not told
    gloo: dict[int, str] = field(default_factory=dict)  # by rank, -1 if the line does not tell it: the error
    failures: ProcessFailures = field(default_factory=ProcessFailures)
    over: bool = False  # a line of the present file tells of a time-out, or of an end
    patched: bool = False  # nemo_patches is in it
    stalls: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    by_file: list[set[int]] = field(default_factory=list)  # the ranks that each file tells of
    size: int = 0  # the world size; 0 if the log does not say
    in_length_sync: bool = False  # a stack in it shows the encoder's method
    problems: list[str] = field(default_factory=list)  # files that were not read, or only in part
    earlier: list[str] = field(default_factory=list)  # folders of torchrun's earlier attempts
    launches: int = 0  # that have begun in the present file
    before: Log | None = None  # the last launch before the present one that tells anything, where all is in one file
    _missing: set[int] = field(default_factory=set)  # of fr_trace's present report


def diagnose_logs(paths: list[Path]) -> Report:
    """The report on logs: files, also compressed ones, folders, or "-", standard input. Raises UnreadableError."""
    log = Log()
    files = [(path, file) for path in paths for file in _files(path, log)]
    for path, file in files:
        try:
            _read_file(file, log, alone=len(files) == 1)
        except UnreadableError as error:
            if file == path:
                raise
            log.problems.append(safe(str(error)))
    findings = tuple(_findings(log)) or tuple(_findings(log.before or log)) or (_not_recognised(log),)
    if log.before is not None:
        log.earlier.append(f"{log.launches} launches in one log: told is of the last one that tells anything")
    return Report(
        folder=", ".join(safe(str(path)) for path in paths[:4]),
        world_size=log.size,
        moving=False,
        verdict=findings[0].text,
        next_step=findings[0].next_step,
        findings=findings,
        ranks=(),
        problems=tuple(log.problems[:20]),
        earlier=tuple(log.earlier[:20]),
    )


def _not_recognised(log: Log) -> Finding:
    return Finding(
        id=NOT_ENOUGH,
        severity=NOTE,
        ranks=(),
        text=f"Nothing is recognised in {log.lines} lines. Looked for: {LOOKED_FOR}.",
        next_step="Give the stderr of every rank (torchrun's --log-dir, several files, a folder); or run with "
        "NEMO_PATCHES_TRACE, and diagnose that folder.",
    )


def _files(path: Path, log: Log) -> list[Path]:
    if not path.is_dir():
        return [path]

    def note(error: OSError) -> None:
        log.problems.append(safe(f"{error.filename}: {error.strerror}"))

    files = sorted(Path(folder, name) for folder, _, names in os.walk(path, onerror=note) for name in names)
    if not files:
        raise UnreadableError(f"{path}: {'; '.join(log.problems) or 'it is empty'}")
    if len(files) > _MOST_FILES:
        log.problems.append(f"{len(files)} files; only the first {_MOST_FILES} were read")
    return [file for file in _of_the_last_attempt(files[:_MOST_FILES], log) if file.is_file()]  # a pipe never ends


def _of_the_last_attempt(files: list[Path], log: Log) -> list[Path]:
    """Without the files of earlier attempts, which torchrun --log-dir keeps: their ranks waited for other ones."""
    attempts = {
        file: next(((up.parent, int(up.name[8:])) for up in file.parents if _ATTEMPT.fullmatch(up.name)), None)
        for file in files
    }
    last: dict[Path, int] = {}
    for folder, number in filter(None, attempts.values()):
        last[folder] = max(number, last.get(folder, 0))
    for folder, number in sorted({one for one in attempts.values() if one and one[1] < last[one[0]]}):
        log.earlier.append(safe(f"{folder.name}/attempt_{number}: an earlier attempt, not read; give it to read it"))
    return [file for file, attempt in attempts.items() if attempt is None or attempt[1] == last[attempt[0]]]


def _read_file(path: Path, log: Log, alone: bool) -> None:
    """alone: no other file is read, so that a launch that begins in it ends all that was told of the one before."""
    log.over, log.launches = False, 0
    log.by_file.append(set())
    try:
        with nullcontext(sys.stdin.buffer) if path == STANDARD_INPUT else path.open("rb") as file:
            start = file.peek(_BLOCK_BYTES)[:_BLOCK_BYTES]  # type: ignore[union-attr]  # of a buffered reader
            if header_in(start.partition(b"\n")[0]) is not None:
                raise UnreadableError(f"{path}: it is one rank's trace; give the folder that it is in")
            if start.startswith(_OTHER_FORMATS):
                raise UnreadableError(f"{path}: compressed, not by gzip, or in UTF-16: give its plain text")
            packed: BinaryIO = gzip.GzipFile(fileobj=file) if start[:2] == b"\x1f\x8b" else file  # type: ignore[assignment]
            for message in _messages(_lines(iter(lambda: packed.read(_BLOCK_BYTES), b""), log)):
                if _PROCESSES.search(message):
                    log.launches += 1
                    if alone and log.launches > 1:
                        _put_aside(log)
                _take(log, message)
    except (EOFError, gzip.BadGzipFile, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        log.problems.append(f"{safe(path.name)}: its compressed data are not whole: {error}")
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}") from error


def _put_aside(log: Log) -> None:
    """Begin with the next launch of a job whose launches write into one log, as Slurm's requeued ones do."""
    told = replace(log, before=None)
    before = told if any(_findings(told)) else log.before
    kept = {"lines": log.lines, "launches": log.launches, "in_length_sync": log.in_length_sync, "patched": log.patched}
    vars(log).update(vars(Log(**kept, problems=log.problems, by_file=[set()], before=before)))  # type: ignore[arg-type]


def _lines(blocks: Iterable[bytes], log: Log) -> Iterator[str]:
    """The lines of the blocks that hold anything of interest, without colours, cut to a bounded length."""
    rest = b""
    for block in blocks:
        log.lines += block.count(b"\n")
        whole = rest + block
        end = whole.rfind(b"\n") + 1
        rest = whole[end:][-_BLOCK_BYTES:]
        log.in_length_sync = log.in_length_sync or b"update_max_seq" in whole
        if any(needle in whole for needle in _NEEDLES):
            for line in map(_clean, whole[:end].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[:-1]):
                yield from _SEVERAL.split(line) if line.count("ProcessGroupNCCL") > 1 else (line,)
        else:
            yield ""  # ends a message that was begun before
    yield from _SEVERAL.split(_clean(rest))


def _clean(line: bytes) -> str:
    text = _COLOURS.sub("", line[: 4 * _LONGEST_LINE].decode("utf-8", "replace"))[:_LONGEST_LINE].rstrip()
    return _QUOTED.sub("", text)


_BEGINNINGS = (
    "ProcessGroupNCCL",
    "Watchdog caught",
    "last enqueued",
    "gloo/",
    "failed (exitcode",
    "Detected mismatch",
    "watchdog thread",
)
_LONG = ("Watchdog caught", "Detected mismatch", "dump signal")
_ENDS = ("before timing out", "timing out", "ng out.")
_WHOLE = re.compile("before timing out|timed out in blocking wait")
_WHOLE_MISMATCH = re.compile(
    r"running ?collective:.{1,2000}running ?collective: ?CollectiveFingerPrint\([^)]{0,300}(?:\)|TensorDtypes)"
)
_COMPLETED = re.compile(r"last ?completed ?(?:NCCL ?)?work: ?-?\d")


def _messages(lines: Iterable[str]) -> Iterator[str]:
    """The lines, with those that a terminal has wrapped put together again."""
    begun: list[str] = []
    for line in lines:
        most = _MOST_JOINED_OF_LONG if any(text in "".join(begun) for text in _LONG) else _MOST_JOINED
        if begun and len(begun) < most and line and not _NEW_MESSAGE.search(line):
            begun.append(line.lstrip() if begun[-1].endswith(" ") else line)
            if _is_whole("".join(begun)):
                yield "".join(begun)
                begun = []
            continue
        if begun:
            yield "".join(begun)
            begun = []
        if line.endswith("[Rank") or (any(text in line for text in _BEGINNINGS) and not _is_whole(line)):
            begun = [line + " " if line.endswith(("[Rank", ":", ",", "by")) else line]
        else:
            yield line
    if begun:
        yield "".join(begun)


def _is_whole(line: str) -> bool:
    if "Detected mismatch" in line:
        return _WHOLE_MISMATCH.search(line) is not None
    return line.endswith(_ENDS) or any(
        pattern.search(line) for pattern in (_COMPLETED, _WHOLE, _STUCK, _GLOO, LAUNCHER_LINE)
    )


def _take(log: Log, line: str) -> None:
    if ours := _OURS.search(line):
        log.patched = log.patched or " patched " in ours[2] or "Missing: " in ours[2]
        log.size = max(log.size, min(int(ours[3]), _MOST_RANKS))
        if "Missing: " in ours[2] and len(log.stalls) < 8:
            log.stalls.append(safe(ours[2]))
    if processes := _PROCESSES.search(line):
        log.size = max(log.size, min(int(processes[1]), _MOST_RANKS))
    mismatch = tuple(Fingerprint(int(m[1]), int(m[2] or -1), m[3], m[4] or "") for m in _MISMATCH.finditer(line))
    if len(mismatch) > 1 and len(log.mismatches) < _MOST_KEPT:
        log.mismatches.append(mismatch[:8])
    log.deduplicated = log.deduplicated or "x across cluster]" in line
    _take_report(log, line)
    log.failures.take(line)
    prefix = _RANK.search(line)
    rank = int(prefix[1] or prefix[2]) if prefix is not None else -1
    log.over = log.over or _TELLS_OF_AN_END.search(line) is not None
    if not log.over:
        log.failures.take_exception(line, rank)
    if (gloo := _GLOO.search(line)) and len(log.gloo) < _MOST_KEPT:
        log.gloo.setdefault(rank, safe(gloo[1]))
    if prefix is None or rank >= _MOST_RANKS or (len(log.ranks) >= _MOST_KEPT and rank not in log.ranks):
        return
    log.ranks.add(rank)
    log.by_file[-1].add(rank)
    if _FAILED_COLLECTIVE.search(line):
        log.in_a_collective.add(rank)
    if stuck := _STUCK.search(line):
        log.stuck[rank] = int(stuck[1] or log.stuck.get(rank, 0))
    if timeout := _TIMEOUT.search(line):
        _take_timeout(log, TimedOut(rank, int(timeout[1] or -1), safe(timeout[2]), _numel(timeout[3], timeout[4])))
    if (status := _STATUS.search(line)) and len(log.groups) < 4 * _MOST_KEPT:
        group = _GROUP.search(line)
        name = (group[2] or group[1]) if group else ""
        log.groups.setdefault((rank, int(status[1])), name)
        log.unnamed.setdefault(rank, TimedOut(rank, int(status[1]), "", -1))
        log.enqueued[name, rank] = max(int(status[2]), log.enqueued.get((name, rank), -1))
    _take_signal(log, line, rank)


def _take_timeout(log: Log, found: TimedOut) -> None:
    first = log.timeouts.setdefault(found.rank, found)
    log.ambiguous = log.ambiguous or first.sequence != found.sequence
    if found.sequence < first.sequence:
        log.fell_to.setdefault(found.rank, set()).add(found.sequence)


def _take_report(log: Log, line: str) -> None:
    """What torch itself reports: of a desync, of monitored_barrier, and of its Flight Recorder."""
    for pattern in (_LAGGING, _NEVER_JOINED, _MISSING_RANKS, _NOT_PASSED):
        if lagging := pattern.search(line):
            ranks = _ranks(lagging[1])
            for rank in ranks:
                log.lagging.setdefault(rank, safe(line.strip())[:300])
            if pattern is _MISSING_RANKS:
                log._missing = set(ranks)
    if joined := _JOINED.search(line):
        for rank in _ranks(joined[1]):
            log.joined.setdefault(rank, safe(line.strip())[:300])
    if expected := _EXPECTED_RANKS.search(line):
        log.came |= set(_ranks(expected[1])) - log._missing
    if reached := _REACHED.search(line):
        log.came.add(int(reached[1]))


def _take_signal(log: Log, line: str, rank: int) -> None:
    """Of a time-out, told with how far this rank has come in one group; the collective may be another group's."""
    signal, group = _SIGNAL.search(line), _GROUP.search(line)
    if signal is None or len(log.enqueued) >= 4 * _MOST_KEPT:
        return
    name, enqueued, completed = (group[2] or group[1]) if group else "", int(signal[2]), int(signal[3])
    log.enqueued[name, rank] = max(enqueued, log.enqueued.get((name, rank), -1))
    if signal[1]:
        log.signalled.add(rank)
        if enqueued > completed >= 0:
            log.groups.setdefault((rank, completed + 1), name)
            log.unnamed.setdefault(rank, TimedOut(rank, completed + 1, "", -1))


def _ranks(text: str) -> list[int]:
    """ "0, 2-4": [0, 2, 3, 4]; at most so many as are kept."""
    ranks: list[int] = []
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit() and int(first[:8]) <= int((last or first)[:8]):
            ranks += range(int(first[:8]), min(int((last or first)[:8]) + 1, int(first[:8]) + _MOST_KEPT))
    return ranks[:_MOST_KEPT]


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
    timeouts = sorted((log.timeouts or log.unnamed).values(), key=lambda timeout: timeout.rank)
    if killed := log.failures.killed_for_memory():
        yield killed
    if raised := log.failures.raised_first():
        yield raised
    if log.mismatches:
        yield _mismatch(log)
    if log.lagging or log.joined:
        yield _lagging(log)
    if timeouts and not log.mismatches:
        yield _timed_out(log, timeouts)
    waited = bool(timeouts or log.mismatches or log.lagging or log.joined)
    if log.signalled and not waited:
        yield _signalled(log)
        waited = True
    if log.stuck and not waited:
        yield _stuck(log)
    if failure := log.failures.failed_first(waited or bool(log.gloo)):
        yield failure
    if log.gloo and not waited:
        yield _gloo(log)
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
    evidence = tuple(
        f"rank {one.rank}: {safe(one.kind)}, shape [{one.shape or '?'}], sequence number {_told(one.sequence)}"
        for one in first
    )
    ranks = tuple(one.rank for one in first)
    if len({one.kind for one in first}) == 1:
        if len({one.shape for one in first} - {""}) > 1:
            shapes = ", ".join(f"rank {one.rank} [{one.shape}]" for one in first)
            text = f"The ranks gave the same {safe(first[0].kind)} different shapes ({shapes})."
            return Finding(SIZES, CRITICAL, ranks, text, _SIZES, evidence=evidence)
        if len({one.sequence for one in first} - {-1}) > 1:
            numbers = ", ".join(f"rank {one.rank} number {one.sequence}" for one in first)
            text = f"The ranks ran {safe(first[0].kind)}s of different sequence numbers ({numbers})."
            return Finding(DRIFT, CRITICAL, ranks, text, _OUT_OF_STEP, evidence=evidence)
        text = f"The ranks' {safe(first[0].kind)}s do not match, says torch, in something other than their shapes: the "
        return Finding(SIZES, CRITICAL, ranks, f"{text}types or devices of the tensors.", _SIZES, evidence=evidence)
    collectives = ", ".join(f"rank {one.rank} {safe(one.kind)}" for one in first)
    text = f"The ranks ran different collectives at the same time ({collectives}): they are out of step."
    return Finding(OUT_OF_STEP, CRITICAL, ranks, text, _OUT_OF_STEP, evidence=evidence)


def _lagging(log: Log) -> Finding:
    ranks = tuple(sorted(log.lagging.keys() - log.came))[:64]
    text = (
        f"{_capital(named(ranks))} did not come to the collective that the others waited in, as torch's own report of "
        "the desync says."
    )
    if not ranks and log.lagging:
        text = (
            f"torch's own reports of the desync name {named(sorted(log.lagging))}, and one also tells that these "
            "ranks came to a collective: ranks are in different ones, and which rank is wrong, it does not tell."
        )
    elif not ranks:
        text = (
            f"torch's own report of the desync names {named(sorted(log.joined))}, which joined a collective and did "
            "not finish it: ranks may be in different ones, and which rank is wrong, it does not tell."
        )
    return Finding(
        id=DESYNC,
        severity=CRITICAL,
        ranks=ranks,
        text=text,
        next_step="Look at what that rank did then: its data loader, its stack (`py-spy dump`), its stderr.",
        evidence=tuple(dict.fromkeys((log.lagging or log.joined).values()))[:4],
    )


def _signalled(log: Log) -> Finding:
    ranks = sorted(log.signalled)
    return Finding(
        id=OTHER,
        severity=CRITICAL,
        ranks=(),
        text=f"A collective timed out on {named(ranks)}, in a process group of which the log does not tell more; which "
        "rank did not come cannot be told from it.",
        next_step="Give the whole stderr of every rank: the line `Watchdog caught collective operation timeout` names "
        "the collective.",
        evidence=tuple(
            f"rank {rank}: last enqueued {number}" for (_, rank), number in sorted(log.enqueued.items())[:8]
        ),
    )


def _stuck(log: Log) -> Finding:
    ranks = tuple(sorted(log.stuck))
    seconds = max(log.stuck.values())
    lasted = f" for {seconds} s" if seconds else ""
    return Finding(
        id=STUCK,
        severity=CRITICAL,
        ranks=ranks[:64],
        text=f"The NCCL watchdog of {named(ranks)} got stuck{lasted}, and the log has no collective that timed out: a "
        "call of CUDA or NCCL does not return, or something holds Python's lock. Perhaps it waits for another rank.",
        next_step="Look at the stacks of all ranks (`py-spy dump --native`); with NEMO_PATCHES_TRACE the next run "
        "tells whether all ranks came out of the encoder.",
        evidence=tuple(f"rank {rank}: stuck" for rank in ranks[:8]),
    )


def _gloo(log: Log) -> Finding:
    timed_out = sorted(rank for rank, error in log.gloo.items() if error.startswith("Timed out"))
    closed = sorted(log.gloo.keys() - set(timed_out))
    known = [rank for rank in timed_out if rank >= 0]
    who = _capital(named(known)) if known else "A rank" if timed_out else ""
    others = [rank for rank in closed if rank >= 0]
    text = (
        f"{who} waited in a collective of Gloo until its time limit" if timed_out else "Connections of Gloo were closed"
    )
    then = f"; then connections were closed on {named(others)}" if timed_out and others else ""
    return Finding(
        id=GLOO,
        severity=CRITICAL,
        ranks=(),
        text=f"{text}{then}. The log does not tell which rank did not come, or left first.",
        next_step="Look for the rank without such an error, and for the first error of any rank; a trace "
        "(NEMO_PATCHES_TRACE) and its stall reports name the rank.",
        evidence=tuple(f"rank {rank}: {error}" if rank >= 0 else error for rank, error in list(log.gloo.items())[:8]),
    )


_OUT_OF_STEP = (
    "One rank has made a collective more or fewer: look for uneven batches, and for code that only one rank runs. "
    "nemo_patches helps where the one too many is the encoder's length sync (uneven evaluation); run with "
    "NEMO_PATCHES_TRACE, and diagnose the folder, to see which rank makes more calls."
)


_SIZES = (
    "With sync_max_audio_length=false, DDP's buffer broadcast meets positional encodings of different sizes: "
    "nemo_patches keeps their shapes equal. Otherwise look for parameters that only some ranks use."
)


def _timed_out(log: Log, timeouts: list[TimedOut]) -> Finding:
    evidence = [f"rank {timeout.rank}: {timeout}, SeqNum {_told(timeout.sequence)}" for timeout in timeouts[:8]]
    evidence += [f"rank {rank}: last enqueued {number}" for (_, rank), number in sorted(log.enqueued.items())[:8]]
    if log.in_length_sync:
        evidence.append("a stack in the log shows update_max_seq_length")
    ranks = tuple(timeout.rank for timeout in timeouts)
    kinds = {timeout.kind for timeout in timeouts}
    most_told = max(timeouts, key=lambda timeout: timeout.numel)
    groups = {log.groups.get((timeout.rank, timeout.sequence), "") for timeout in timeouts} - {""}
    several_launches = any(
        log.groups.get((rank, number)) == log.groups.get((rank, log.timeouts[rank].sequence), "?")
        for rank, numbers in log.fell_to.items()
        for number in numbers
    )
    sequences = {timeout.sequence for timeout in timeouts}
    one_group = len(groups) < 2 and not (log.ambiguous and not groups) and not several_launches
    comparable = one_group and max(sequences) - min(sequences) <= _MOST_APART
    behind = _behind(log, timeouts, next(iter(groups), "")) if comparable else ()
    silent = _silent(log, timeouts, next(iter(groups), "")) if comparable and not behind else ()

    def finding(kind: str, text: str, next_step: str, concerned: tuple[int, ...] = ()) -> Finding:
        return Finding(kind, CRITICAL, concerned, text, next_step, evidence=tuple(evidence))

    if not comparable:
        shown = ", ".join(sorted({str(timeout) for timeout in timeouts})[:4])
        return finding(
            OTHER,
            f"{_capital(named(ranks))} waited in collectives of several process groups, or launches ({shown}); which "
            "rank did not come cannot be told from this log.",
            "Give one launch's lines. TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 have torch "
            "record the collectives of every rank; a trace (NEMO_PATCHES_TRACE) tells whether all ranks came out of "
            "the encoder.",
        )
    if len(kinds) > 1:
        return finding(
            OUT_OF_STEP,
            f"The ranks waited in different collectives ({_by_kind(timeouts)}): they are out of step.",
            _OUT_OF_STEP,
            ranks,
        )
    if len(sequences) > 1:
        low, high = min(sequences), max(sequences)
        late = tuple(timeout.rank for timeout in timeouts if timeout.sequence == low)
        return finding(
            DRIFT,
            f"The ranks' collectives have drifted apart: {named(late)} waited in SeqNum {low}, others in up to {high}.",
            _OUT_OF_STEP,
            late,
        )
    sizes = {timeout.numel for timeout in timeouts} - {-1}
    if len(sizes) > 1 and not most_told.kind.lstrip("_").startswith(_SIZES_MAY_DIFFER):
        return finding(
            SIZES,
            f"The ranks gave the same {most_told.kind} different sizes ({', '.join(map(str, sorted(sizes)))}).",
            _SIZES,
            ranks,
        )
    who = f"; {named(behind)} did not come to it" if behind else ""
    if silent and not _has_hosts_of(log, silent):
        who = (
            f"; of {named(silent)} these logs tell nothing: they did not come to it, or their logs are not among these"
        )
        silent = ()
    elif silent:
        who = f"; {named(silent)} did not come to it, as far as the log tells, which has no time-out there"
    return finding(*_one_collective(log, most_told, ranks, who), behind or silent)


def _one_collective(log: Log, timeout: TimedOut, ranks: tuple[int, ...], who: str) -> tuple[str, str, str]:
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
            f"{_capital(named(ranks))} waited in a broadcast of {_elements(timeout.numel)}, as DDP makes of a model's "
            f"buffers before each training step{who}.",
            "A rank has not come to that step: its data, or an evaluation that is longer on it. nemo_patches does not "
            "bound DDP's broadcast; a trace (NEMO_PATCHES_TRACE) and its stall reports name the rank.",
        )
    if timeout.kind == "ALLREDUCE" and timeout.numel < 0:
        return (
            OTHER,
            f"{_capital(named(ranks))} waited in an all-reduce of a size that the log does not tell{who}: the "
            "encoder's length sync is one, and so are DDP's gradients.",
            "A trace (NEMO_PATCHES_TRACE) and its stall reports name the rank that does not come; nemo_patches bounds "
            "the wait if it is the length sync.",
        )
    is_not = ": this is not the encoder's length sync" if timeout.kind else ", of which the log does not tell more"
    return (
        OTHER,
        f"{_capital(named(ranks))} waited in {timeout}{who}{is_not}.",
        "nemo_patches cannot bound it; a trace (NEMO_PATCHES_TRACE) tells whether all ranks came out of the encoder, "
        "and which one did not.",
    )


def _told(number: int) -> str:
    return str(number) if number >= 0 else "not told"


def _elements(numel: int) -> str:
    return f"{numel} elements" if numel >= 0 else "a size that the log does not tell"


def _behind(log: Log, timeouts: list[TimedOut], group: str) -> tuple[int, ...]:
    """The ranks that had not enqueued the collective. Who has enqueued it, or what comes after, has come."""
    number = max(timeout.sequence for timeout in timeouts)
    enqueued = {rank: last for (name, rank), last in log.enqueued.items() if name == group}
    behind = {rank for rank, last in enqueued.items() if last < number} - {timeout.rank for timeout in timeouts}
    return tuple(sorted(behind))[:64]


def _silent(log: Log, timeouts: list[TimedOut], group: str) -> tuple[int, ...]:
    """Where the log tells of all ranks, and few do not tell that they waited: those."""
    # Of another group than the default one the log does not tell the ranks; Ray leaves out some ranks' lines.
    if group not in ("", "0") or log.deduplicated:
        return ()
    waited = {timeout.rank for timeout in timeouts} | log.in_a_collective | log.unnamed.keys()
    waited |= log.stuck.keys() | log.gloo.keys()
    silent = set(range(log.size)) - waited - {rank for _, rank in log.enqueued}
    return tuple(sorted(silent))[:64] if 2 * len(silent) < log.size else ()


def _has_hosts_of(log: Log, silent: tuple[int, ...]) -> bool:
    """Whether the log of each rank's host is among the files, as far as these are hosts' logs, each of several ranks.

    A host has as many ranks as the file with the most, and its ranks' numbers follow each other.
    """
    of_hosts = [ranks for ranks in log.by_file if ranks]
    if len(of_hosts) < 2 or any(len(ranks) < 2 for ranks in of_hosts):
        return True
    size = max(max(ranks) - min(ranks) + 1 for ranks in of_hosts)
    hosts = {rank // size for ranks in of_hosts for rank in ranks}
    return all(rank // size in hosts for rank in silent)


def _by_kind(timeouts: list[TimedOut]) -> str:
    kinds = sorted({timeout.kind for timeout in timeouts})
    return ", ".join(
        f"{safe(kind)} on {named(timeout.rank for timeout in timeouts if timeout.kind == kind)}" for kind in kinds
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
