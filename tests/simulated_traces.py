"""Traces as the ranks of a simulated job would write them, each rank with a clock of its own.

When nobody can go on, all report a stall, and are killed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from simulated_job import STALL_S, Call, Event, Job, Listener, Rank, Sync, run

from nemo_patches.judging.kinds import ELSEWHERE, LEFT, SILENT, UNANNOUNCED
from nemo_patches.tracing import records

RANKS_OF_A_HOST = 4
PLACE = (
    "read_audio (my_asr/dataset.py:41) < __getitem__ (my_asr/dataset.py:30) < main"
    " (my_asr/train.py:88)"
)


@dataclass(frozen=True)
class Setup:
    """How a rank's process is set up, where it is not as the others' are."""

    flag: bool = True
    sync: str = "bounded"
    torch: str = "2.13.0"
    traced: bool = True
    patched: bool = True
    restart: int = 0
    job: str = ""


@dataclass
class Trace(Listener):
    """One rank's."""

    setup: Setup
    patched: set[int]  # ranks
    reports: bool
    begins: float
    room: int = 5000  # frames that the positional encoding has room for
    lines: list[records.Record] = field(default_factory=list)

    def write(self, now: float, kind: type, **values: object) -> None:
        self.lines.append(kind(t=round(now - self.begins, 6), **values))

    def entered(self, rank: Rank, now: float, call: Call) -> None:
        self._of_call(
            rank,
            now,
            call,
            records.Enter,
            training=call.training,
            shape=[8, 80, call.length],
            dtype="float32",
            device=f"cuda:{rank.number % 8}",
        )

    def synced(self, rank: Rank, now: float, call: Call, sync: Sync) -> None:
        facts = {
            "outcome": sync.outcome,
            "waited": round(sync.waited_s, 6),
            "local": call.length,
        }
        self._of_call(
            rank,
            now,
            call,
            records.Sync,
            round=rank.rounds.issued,
            result=sync.length,
            **facts,
        )
        if sync.outcome == records.TIMEOUT and self.reports:
            assert rank.rounds.latest is not None
            absent = [
                number
                for number in range(rank.job.size)
                if number not in rank.rounds.latest.values
            ]
            self._of_call(
                rank,
                now + 0.05,
                call,
                records.Stalled,
                **self._told_of(rank.job, absent),
            )

    def grown(self, rank: Rank, now: float, call: Call, length: int) -> None:
        if length > self.room:
            self._of_call(
                rank, now + 0.001, call, records.Grow, old=self.room, new=length
            )
            self.room = length

    def raised(self, rank: Rank, now: float, call: Call) -> None:
        text = (
            'Traceback (most recent call last):\n  File "train.py", line 1, in'
            " forward\n" + call.raises
        )
        what = {
            "type": call.raises,
            "message": f"{call.raises} here",
            "traceback": text,
        }
        self._of_call(rank, now, call, records.Raised, **what)

    def left(self, rank: Rank, now: float, call: Call, length: int) -> None:
        self._of_call(rank, now, call, records.Leave, shape=[8, 512, length // 8])

    def stalled(self, rank: Rank, now: float) -> None:
        """As watch/stalls.py does: who waits in a collective is no suspect, and where none does,
        nobody is.
        """
        waiting = rank.job.waiting(now)
        suspects = sorted(set(range(rank.job.size)) - waiting) if waiting else []
        told = self._told_of(rank.job, suspects)
        text = f"no step for {STALL_S:.0f} s. {' | '.join(self._groups(rank.job, suspects, waiting))}"
        self.write(
            now, records.Stalled, e="", n=0, text=text, waited=bool(waiting), **told
        )

    def _groups(
        self, job: Job, suspects: list[int], waiting: set[int]
    ) -> Iterator[str]:
        """As judging/rank_groups.py words them."""
        where = {LEFT: "has left", SILENT: "answers nothing", ELSEWHERE: PLACE}
        for rank in suspects:
            yield f"rank {rank}: {where.get(self._kind(job, rank), 'not announced')}"
        if waiting:
            ranks = ", ".join(map(str, sorted(waiting)))
            yield f"ranks {ranks}: a collective"
        for rank in sorted(set(range(job.size)) - waiting - set(suspects)):
            yield f"rank {rank}: forward (my_asr/model.py:7)"

    def ended(self, now: float, error: str) -> None:
        self.write(now, records.End, error=error)

    def _of_call(
        self, rank: Rank, now: float, call: Call, kind: type, **values: object
    ) -> None:
        n = rank.encoders[call.encoder].calls
        self.write(now, kind, e=_title(call.encoder), n=n, **values)

    def _told_of(self, job: Job, ranks: list[int]) -> dict[str, object]:
        kinds = [self._kind(job, rank) for rank in ranks]
        return {
            "ranks": ranks,
            "kinds": kinds,
            "where": [PLACE if kind == ELSEWHERE else "" for kind in kinds],
        }

    def _kind(self, job: Job, rank: int) -> str:
        if rank in job.gone:
            return LEFT
        if rank in job.silent:
            return SILENT
        return ELSEWHERE if rank in self.patched else UNANNOUNCED


def _title(e: int) -> str:
    return "ConformerEncoder" if not e else f"ConformerEncoder #{e + 1}"


def write(
    folder: Path,
    schedules: list[list[Event]],
    setups: Mapping[int, Setup] | None = None,
    reports: bool = True,
    seed: int = 0,
    launched: float = 1.7e9,
) -> Path:
    """Run the schedules to where nobody can go on, and write each rank's trace into the folder,
    which is returned.
    """
    folder.mkdir(exist_ok=True)
    draw = random.Random(seed)
    job = Job(len(schedules))
    of_ranks = [(setups or {}).get(number, Setup()) for number in range(job.size)]
    patched = {number for number, setup in enumerate(of_ranks) if setup.patched}
    traces = [
        Trace(setup, patched, reports, draw.uniform(-30, 0)) for setup in of_ranks
    ]
    ranks = [
        Rank(
            number,
            events,
            job,
            trace,
            sync=trace.setup.sync,
            flag=trace.setup.flag,
            watched=reports,
        )
        for number, (events, trace) in enumerate(zip(schedules, traces, strict=True))
        if trace.setup.patched
    ]
    ended_at = run(ranks)
    if reports:
        for rank in ranks:
            if rank.number not in job.gone | job.silent:
                rank.listener.stalled(rank, ended_at + STALL_S)
    # By host, of its clock.
    hours = [draw.uniform(-9, 9) * 3600 for _ in range(job.size)]
    for rank in ranks:
        if (trace := traces[rank.number]).setup.traced:
            _write(
                folder,
                rank,
                trace,
                launched + trace.begins + hours[rank.number // RANKS_OF_A_HOST],
            )
    return folder


def header(rank: int, size: int, started: float, setup: Setup) -> records.Header:
    return records.Header(
        format=records.FORMAT,
        rank=rank,
        world_size=size,
        host=f"node{rank // RANKS_OF_A_HOST}",
        pid=4000 + rank,
        started=started,
        restart=setup.restart,
        versions={
            "nemo_patches": "0.1.0",
            "nemo": "3.0.0",
            "torch": setup.torch,
            "python": "3.11.7",
        },
        settings={"sync": setup.sync, "timeout": "10", "on_timeout": "fallback"},
        checks=[],
        job=setup.job,
    )


def file_name(rank: int, started: float) -> str:
    return f"rank-{rank:05}.{int(started)}T0.{4000 + rank}.jsonl"


def _write(folder: Path, rank: Rank, trace: Trace, started: float) -> None:
    lines = [header(rank.number, rank.job.size, started, trace.setup), *trace.lines]
    content = b"".join(map(records.encode, lines))
    (folder / file_name(rank.number, started)).write_bytes(content)
