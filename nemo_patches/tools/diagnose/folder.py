"""A folder of traces: finds the files of the latest launch and reads them, also while they grow.

Any content is tolerated, and what is not read is reported: files that are missing, cut, empty,
foreign, binary or unreadable, lines of any length. Memory is bounded.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from nemo_patches.text import safe
from nemo_patches.tools.diagnose.decoder import (
    LONGEST_LINE,
    decode,
    format_in,
    header_in,
)
from nemo_patches.tools.diagnose.rank_trace import RankTrace
from nemo_patches.tracing import records

_NAME = re.compile(
    r"rank-(\d{1,9})\.[0-9T]{1,20}\.(\d{1,12})(?:\.\d{1,9})?\.jsonl"
)  # format 1 had parts
_BLOCK_BYTES = 1 << 20
_ONE_PROCESS_BYTES = 1 << 26  # up to so many, a further process is not worth its start
_MOST_FILES = 100_000
_MOST_RANKS = 1 << 20
_MOST_LINES = 20  # of problems, and of starts that are not diagnosed
_COMPRESSED = frozenset({".gz", ".zst", ".xz", ".bz2", ".zip"})


class UnreadableError(Exception):
    """There is nothing to diagnose. The text says why."""


@dataclass
class Start:
    """One process start of one rank: its file, how far it has been read, and what that told."""

    path: Path
    trace: RankTrace
    size: int
    written: float = 0.0  # when it was, by the file system's clock
    offset: int = 0
    pending: bytes = b""
    skips: bool = False  # the rest of a line that is too long

    def read_on(self) -> Start:
        """Read what has been written since; return self, for a process pool. What cannot be read is
        a gap.
        """
        try:
            status = self.path.stat()
            self.written = status.st_mtime
            if status.st_size > self.offset:
                self._read()
        except OSError as error:  # what was read before stays
            self.trace.gap = f"it cannot be read: {error.strerror}"
        self.trace.cut = bool(self.pending) or self.skips
        return self

    @property
    def header(self) -> records.Header:
        return self.trace.header

    def _read(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while block := file.read(_BLOCK_BYTES):
                self.offset += len(block)
                self._take(block)
        self.size = self.offset

    def _take(self, block: bytes) -> None:
        if self.skips:
            _, newline, block = block.partition(b"\n")
            self.skips = not newline
        end = block.rfind(b"\n") + 1
        if end:
            self.trace.take(decode(self.pending + block[:end]))
            self.pending = b""
        self.pending += block[end:]
        if len(self.pending) > LONGEST_LINE:
            self.trace.take([None])
            self.pending = b""
            self.skips = True


@dataclass
class TracedJob:
    """The latest launch in a folder."""

    folder: Path
    world_size: int
    traces: dict[int, RankTrace]
    written: dict[int, float] = field(
        default_factory=dict
    )  # by rank when its file was, in seconds since 1970
    moving: bool = False  # its files grow, so records may still come
    ago: dict[int, float] = field(
        default_factory=dict
    )  # by rank seconds since its last record, if the job runs
    alive: set[int] = field(
        default_factory=set
    )  # ranks whose processes run on this host now
    problems: list[str] = field(
        default_factory=list
    )  # files that were not read, or only in part
    suspects: set[int] = field(default_factory=set)  # ranks whose files cannot be read
    earlier: list[str] = field(
        default_factory=list
    )  # process starts of earlier launches

    @property
    def absent(self) -> list[int]:
        """Ranks without a trace."""
        return [rank for rank in range(self.world_size) if rank not in self.traces]

    def untold(self, told: set[int]) -> tuple[int, ...]:
        """Ranks without a file, readable or not, that are not in `told`: ranks known from
        elsewhere.
        """
        return tuple(rank for rank in self.absent if rank not in self.suspects | told)


class Folder:
    """A folder of traces; read() reads on where it has stopped the last time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts: dict[Path, Start] = {}
        self._known: set[tuple[int, int, float, str]] = (
            set()
        )  # rank, pid, started, host
        self._problems: dict[Path, str] = {}
        self._suspects: set[int] = set()

    def read(self) -> TracedJob:
        """Read what has been written since the last time. Raises UnreadableError if there is no
        trace.
        """
        counts_before = {
            path: start.trace.count for path, start in self._starts.items()
        }
        self._find()
        if not self._starts:
            why = "; ".join(self._problem_lines()) or "it is empty"
            raise UnreadableError(f"{self.path}: no trace file in it: {why}")
        starts, others = _of_the_last_job(self._starts.values())
        latest, earlier = _launches(starts)
        self._read_all(latest)
        size = _world_size(latest)
        job = TracedJob(
            self.path,
            size,
            {
                start.trace.rank: start.trace
                for start in latest
                if start.trace.rank < size
            },
        )
        job.written = {
            start.trace.rank: start.written
            for start in latest
            if start.trace.rank < size
        }
        job.problems = self._problem_lines()
        for start in latest:
            if damage := start.trace.damage:
                job.problems.append(f"{safe(start.path.name)}: {damage}")
        job.suspects = {rank for rank in self._suspects if rank not in job.traces}
        job.earlier = [_earlier_line(start) for start in earlier] + [
            _other_job_line(start) for start in others
        ]
        if job.earlier:
            job.earlier.insert(0, _why_these(latest, earlier))
        job.moving = bool(counts_before) and any(
            start.trace.count > counts_before.get(start.path, 0) for start in latest
        )
        return job

    def _find(self) -> None:
        try:
            names = sorted(os.listdir(self.path))
        except OSError as error:
            raise UnreadableError(f"{self.path}: {error.strerror}") from error
        for name in names[:_MOST_FILES]:
            path = self.path / name
            if path in self._starts:
                continue
            self._problems.pop(path, None)
            name_match = _NAME.fullmatch(name)
            try:
                start = _opened(path, name_match)
            except (_NotATrace, OSError) as error:
                self._problems[path] = (
                    f"cannot be read: {error.strerror}"
                    if isinstance(error, OSError)
                    else str(error)
                )
                if name_match and int(name_match[1]) < _MOST_RANKS:
                    self._suspects.add(int(name_match[1]))
                if isinstance(error, _NotATrace) and error.rank >= 0:
                    self._suspects.add(error.rank)
            else:
                self._add(start)
        if len(names) > _MOST_FILES:
            self._problems[self.path] = (
                f"{len(names)} files; only the first {_MOST_FILES} were looked at"
            )

    def _add(self, start: Start) -> None:
        header = start.header
        key = (header.rank, header.pid, header.started, header.host)
        if key in self._known:
            self._problems[start.path] = "a copy of another file"
            return
        self._known.add(key)
        self._starts[start.path] = start

    def _read_all(self, starts: list[Start]) -> None:
        unread = [start for start in starts if not start.trace.count]
        processes = min(len(unread), os.cpu_count() or 1)
        if processes > 1 and sum(start.size for start in unread) > _ONE_PROCESS_BYTES:
            largest_first = sorted(unread, key=lambda start: -start.size)
            try:
                # A reader makes no cycles, and looking for them takes the garbage collector a tenth
                # of the time.
                with ProcessPoolExecutor(
                    processes, multiprocessing.get_context("spawn"), gc.disable
                ) as pool:
                    done = list(pool.map(Start.read_on, largest_first))
            except (
                BrokenProcessPool
            ):  # perhaps no memory for more processes: this one reads all
                done = []
            for start, copy in zip(largest_first, done, strict=False):
                vars(start).update(vars(copy))
        for start in starts:
            start.read_on()

    def _problem_lines(self) -> list[str]:
        return bounded(
            [
                f"{safe(path.name)}: {why}"
                for path, why in sorted(self._problems.items())
            ],
            "files",
        )


class _NotATrace(Exception):
    """A file is no trace. The text says why. rank: the one that its header names; -1 if it names
    none.
    """

    def __init__(self, why: str, rank: int = -1) -> None:
        super().__init__(why)
        self.rank = rank


def _opened(path: Path, name_match: re.Match[str] | None) -> Start:
    """The file, its header read. Raises _NotATrace or OSError if it is none."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise _NotATrace("a folder; not looked into")
    if not stat.S_ISREG(status.st_mode):
        raise _NotATrace("not a file")
    if path.suffix in _COMPRESSED:
        raise _NotATrace("compressed; unpack it first")
    if path.suffix != ".jsonl":
        raise _NotATrace("not a trace")
    if not status.st_size:
        raise _NotATrace("empty")
    with path.open("rb") as file:
        line, newline, _ = file.read(_BLOCK_BYTES).partition(b"\n")
    number = format_in(line) if newline else None
    if number not in (None, records.FORMAT):
        raise _NotATrace(
            f"format {number}; this nemo_patches reads {records.FORMAT}: use the one"
            " that wrote it"
        )
    header = header_in(line) if number is not None else None
    if header is None:
        raise _NotATrace("does not begin with a trace's header")
    if not 0 <= header.rank < header.world_size <= _MOST_RANKS:
        raise _NotATrace(f"rank {header.rank} of {header.world_size} in its header")
    if name_match and tuple(map(int, name_match.groups())) != (header.rank, header.pid):
        raise _NotATrace(
            f"its header is of rank {header.rank}, pid {header.pid}", header.rank
        )
    return Start(path, RankTrace(header), status.st_size)


def bounded(lines: list[str], what: str) -> list[str]:
    more = len(lines) - _MOST_LINES
    return lines[:_MOST_LINES] + ([f"and {more} more {what}"] if more > 0 else [])


def _world_size(starts: list[Start]) -> int:
    return Counter(start.header.world_size for start in starts).most_common(1)[0][0]


def _of_the_last_job(starts: Iterable[Start]) -> tuple[list[Start], list[Start]]:
    """The starts of the job that has begun last, and those of other jobs."""
    jobs: dict[str, list[Start]] = defaultdict(list)
    for start in starts:
        jobs[start.header.job].append(start)
    last = max(
        jobs.values(), key=lambda of_job: max(start.header.started for start in of_job)
    )
    return last, [
        start for of_job in jobs.values() if of_job is not last for start in of_job
    ]


def _why_these(latest: list[Start], earlier: list[Start]) -> str:
    header = latest[0].header
    counted = earlier and all(
        start.header.restart < header.restart for start in earlier
    )
    by = "torchrun's restart count" if counted else "its hosts' clocks"
    job = f" of job {safe(header.job)}" if header.job else ""
    return (
        f"diagnosed is the launch with restart {header.restart}{job}, begun last by"
        f" {by}; the following are not"
    )


def _other_job_line(start: Start) -> str:
    header = start.header
    return (
        f"{safe(start.path.name)}: of another job, {safe(header.job) or 'not named'},"
        f" rank {header.rank}"
    )


def _launches(starts: list[Start]) -> tuple[list[Start], list[Start]]:
    """The starts of the latest launch, at most one for each rank; and all earlier starts.

    Where no rank has two starts with one torchrun restart count, and all ranks have one with the
    highest, these are
    it: an elastic job may have other ranks, and a rank another host, after each restart. Else
    hosts' clocks tell.
    A rank with fewer starts than others was not part of every launch. Its last start belongs to the
    launch with the same torchrun restart count, else to the one nearest in time, by its own host's
    clock if possible.
    """
    highest = max(start.header.restart for start in starts)
    last = [start for start in starts if start.header.restart == highest]
    once = len({(start.trace.rank, start.header.restart) for start in starts}) == len(
        starts
    )
    if once and {start.trace.rank for start in last} == set(
        range(last[0].header.world_size)
    ):
        before = [start for start in starts if start.header.restart != highest]
        return sorted(last, key=lambda start: start.trace.rank), sorted(
            before, key=lambda start: start.trace.rank
        )
    of_rank: dict[int, list[Start]] = defaultdict(list)
    for start in sorted(
        starts, key=lambda each: (each.header.started, each.header.restart)
    ):
        of_rank[start.trace.rank].append(start)
    most = max(map(len, of_rank.values()))
    whole = [ranks for ranks in of_rank.values() if len(ranks) == most]
    latest = []
    for ranks in of_rank.values():
        if len(ranks) == most or _is_of_the_last(ranks[-1].header, whole):
            latest.append(ranks[-1])
    chosen = {id(start) for start in latest}
    earlier = [
        start
        for ranks in of_rank.values()
        for start in ranks
        if id(start) not in chosen
    ]
    return sorted(latest, key=lambda start: start.trace.rank), earlier


def _is_of_the_last(header: records.Header, whole: list[list[Start]]) -> bool:
    peers = [ranks for ranks in whole if ranks[-1].header.host == header.host] or whole
    last, before = (peers[0][number].header for number in (-1, -2))
    if last.restart != before.restart and header.restart in (
        last.restart,
        before.restart,
    ):
        return header.restart == last.restart
    return abs(header.started - last.started) < abs(header.started - before.started)


def _earlier_line(start: Start) -> str:
    header = start.header
    return (
        f"{safe(start.path.name)}: an earlier start of rank {header.rank}, restart"
        f" {header.restart}"
    )
