"""Runs of hangs, stock and with nemo_patches, several at a time: each until it has ended, hangs, or
is named.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import ranks
from gallery import DIES, ENDS, HANGS, NAMED, Hang
from group import RANKS, Rank
from rank_process import RankProcess
from scenario import LIMIT_S

from nemo_patches.tools.demo import job_logs

LOOK_EVERY_S = 0.1
OTHERS_END_S = 8.0  # for the other ranks once one has ended: they may hang, or find out
# Of NeMo, for which the first rank that a fork server is asked for has to wait.
IMPORT_LIMIT_S = 180
_STALL = re.compile(
    r"nemo_patches (?:INFO|WARNING) \[.*?\] no (?:encoder call|step|\w+) for ([\d.]+) s[.:]? (.*)"
)


@dataclass(frozen=True)
class StallLine:
    """A stall report of a rank's log. after: how long the rank had stood still by then, as the line
    says.
    """

    after: timedelta
    text: str


@dataclass(frozen=True)
class Result:
    """How a run came out. ranks: a sentence on each. lines: the first stall line of each that names
    the hang.
    """

    hang: Hang
    patched: bool
    ending: str
    ranks: tuple[str, ...]
    lines: tuple[StallLine, ...]
    logs: tuple[Path, ...]

    @property
    def as_expected(self) -> bool:
        return self.ending == (self.hang.ours if self.patched else self.hang.stock)

    def __str__(self) -> str:
        version = "with nemo_patches it" if self.patched else "stock"
        told = [
            f"{version} {self.ending}:",
            *(f"  rank {rank}: {text}" for rank, text in enumerate(self.ranks)),
        ]
        told += [
            f"  its line, after {line.after.total_seconds():g} s: {line.text}"
            for line in self.lines[:1]
        ]
        return "\n".join(told)


def run(
    hangs: Iterable[tuple[Hang, bool]], folder: Path, at_once: int
) -> Iterator[Result]:
    """The results, in the order in which the runs end. hangs: each with whether nemo_patches is
    applied.
    """
    pending = list(hangs)
    running = list[_Run]()
    try:
        while pending or running:
            while pending and len(running) < at_once:
                hang, patched = pending.pop(0)
                running.append(_Run(hang, patched, folder))
                running[-1].start()
            time.sleep(LOOK_EVERY_S)
            for each in list(running):
                if ending := each.ending():
                    running.remove(each)
                    yield each.result(ending)  # which kills its ranks
    finally:
        for each in running:
            each.kill()


class _Run:
    def __init__(self, hang: Hang, patched: bool, folder: Path) -> None:
        self._hang = hang
        self._patched = patched
        self._folder = folder / hang.name / ("nemo_patches" if patched else "stock")
        self._folder.mkdir(parents=True)
        self._ranks: list[RankProcess] = []
        self._began = time.monotonic()
        self._first_end: float | None = None

    def start(self) -> None:
        port = ranks.free_port()
        for number in range(RANKS):
            self._ranks.append(
                RankProcess(Rank(self._hang, self._patched, number, port, self._folder))
            )

    def ending(self) -> str:
        """One of the gallery's; empty while it goes on."""
        for rank in self._ranks:
            rank.receive()
        live = [rank for rank in self._ranks if rank.is_running]
        if not live:
            return ENDS if all(rank.is_complete for rank in self._ranks) else DIES
        now = time.monotonic()
        if len(live) < len(self._ranks) and self._first_end is None:
            self._first_end = now
        if self._patched:
            if all(self._named(rank) for rank in live):
                return NAMED
        elif self._hangs(live) and (
            self._first_end is None or now - self._first_end > OTHERS_END_S
        ):
            return HANGS
        return HANGS if now - self._began > IMPORT_LIMIT_S + LIMIT_S else ""

    @staticmethod
    def _hangs(live: list[RankProcess]) -> bool:
        """Whether no rank runs, and some rank waits in a collective."""
        standing = [rank.stands for rank in live if rank.stands]
        return len(standing) == len(live) and any(each.collective for each in standing)

    def _named(self, rank: RankProcess) -> StallLine | None:
        if not self._hang.named:
            return None
        return next(
            (
                line
                for line in stall_lines(rank.rank.log)
                if re.search(self._hang.named, line.text)
            ),
            None,
        )

    def result(self, ending: str) -> Result:
        for rank in self._ranks:
            rank.hold()
        ends = tuple(rank.end() for rank in self._ranks)
        lines = [self._named(rank) for rank in self._ranks] if self._patched else []
        named = tuple(line for line in lines if line is not None)
        files = tuple(rank.rank.log for rank in self._ranks)
        return Result(
            self._hang, self._patched, ending, ranks=ends, lines=named, logs=files
        )

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()


def stall_lines(log: Path) -> list[StallLine]:
    found = (_STALL.search(line) for line in job_logs.lines(log))
    return [
        StallLine(timedelta(seconds=float(each[1])), each[2]) for each in found if each
    ]
