"""Runs of hangs, stock and with nemo_patches, several at a time: each until it has ended, hangs, or is named."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from nemo_patches.tools.demo import logs
from nemo_patches.tools.demo.hangs.gallery import DIES, ENDS, HANGS, NAMED, Hang
from nemo_patches.tools.demo.jobs import IMPORT_LIMIT, RankJob
from nemo_patches.tools.demo.processes import RankProcess, free_port, start

RANKS = 2
LOOK_EVERY_S = 0.1
OTHERS_END_S = 8.0  # for the other ranks once one has ended: they may hang, or find out
_STALL = re.compile(r"nemo_patches (?:INFO|WARNING) \[.*?\] no (?:encoder call|step|\w+) for ([\d.]+) s[.:]? (.*)")


@dataclass(frozen=True)
class StallLine:
    """A stall report of a rank's log. after: how long the rank had stood still by then, as the line says."""

    after: timedelta
    text: str


@dataclass(frozen=True)
class Result:
    """How a run came out. ranks: a sentence on each. lines: the first stall line of each that names the hang."""

    hang: Hang
    patched: bool
    ending: str
    ranks: tuple[str, ...]
    lines: tuple[StallLine, ...]
    took: timedelta
    logs: tuple[Path, ...]

    @property
    def as_expected(self) -> bool:
        return self.ending == (self.hang.ours if self.patched else self.hang.stock)


def run(
    hangs: Iterable[tuple[Hang, bool]], folder: Path, at_once: int, port: Callable[[], int] = free_port
) -> Iterator[Result]:
    """The results, in the order in which the runs end. Needs the fork server.

    hangs: each with whether nemo_patches is applied. port: returns a free one, for a job's store.
    """
    pending, running = list(hangs), list[_Run]()
    try:
        while pending or running:
            while pending and len(running) < at_once:
                running.append(_Run.of(*pending.pop(0), folder, port()))
            time.sleep(LOOK_EVERY_S)
            for each in list(running):
                if ending := each.ending():
                    running.remove(each)
                    yield each.result(ending)  # which kills its ranks
    finally:
        for each in running:
            each.kill()


@dataclass
class _Run:
    hang: Hang
    patched: bool
    ranks: list[RankProcess]
    began: float = field(default_factory=time.monotonic)
    first_end: float | None = None

    @classmethod
    def of(cls, hang: Hang, patched: bool, folder: Path, port: int) -> _Run:
        own = folder / hang.name / ("nemo_patches" if patched else "stock")
        own.mkdir(parents=True)
        jobs = (RankJob("hang", patched, rank, RANKS, port, own, timedelta(0), hang) for rank in range(RANKS))
        started = cls(hang, patched, [])
        try:
            started.ranks.extend(map(start, jobs))
        except BaseException:
            started.kill()
            raise
        return started

    def ending(self) -> str:
        """One of the gallery's; empty while it goes on."""
        for rank in self.ranks:
            rank.receive()
        live = [rank for rank in self.ranks if rank.is_running]
        if not live:
            return ENDS if all(rank.outcome.completed for rank in self.ranks) else DIES
        now = time.monotonic()
        if len(live) < len(self.ranks) and self.first_end is None:
            self.first_end = now
        if self.patched:
            if all(self._named(rank) for rank in live):
                return NAMED
        elif self._hangs(live) and (self.first_end is None or now - self.first_end > OTHERS_END_S):
            return HANGS
        return HANGS if now - self.began > self._limit.total_seconds() else ""

    @property
    def _limit(self) -> timedelta:
        """With NeMo's import, for which the first rank that a fork server is asked for has to wait."""
        return IMPORT_LIMIT + self.ranks[0].outcome.job.limit

    @staticmethod
    def _hangs(live: list[RankProcess]) -> bool:
        """Whether no rank runs, and some rank waits in a collective."""
        standing = [rank.outcome.stands for rank in live if rank.outcome.stands]
        return len(standing) == len(live) and any(each.collective for each in standing)

    def _named(self, rank: RankProcess) -> StallLine | None:
        if not self.hang.named:
            return None
        return next((line for line in stall_lines(rank.outcome.job.log) if re.search(self.hang.named, line.text)), None)

    def result(self, ending: str) -> Result:
        took = timedelta(seconds=time.monotonic() - self.began)
        sentences, lines = [], []
        for rank in self.ranks:
            stood = rank.outcome.stands
            end = rank.end("at the end of this run")
            sentences.append(stood.where if stood and end.ended.endswith("killed") else end.ended)
            if self.patched and (line := self._named(rank)):
                lines.append(line)
        files = tuple(rank.outcome.job.log for rank in self.ranks)
        return Result(self.hang, self.patched, ending, tuple(sentences), tuple(lines), took, files)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()


def stall_lines(log: Path) -> list[StallLine]:
    found = (_STALL.search(line) for line in logs.lines(log))
    return [StallLine(timedelta(seconds=float(each[1])), each[2]) for each in found if each]
