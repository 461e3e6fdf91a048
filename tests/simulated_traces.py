"""Traces as the ranks of a simulated job would write them, each rank with a clock of its own.

When nobody can go on, all report a stall, and are killed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from simulated_job import STALL_S, Call, Event, Job, Listener, Rank, Sync, run

from nemo_patches.stall.rank_kinds import ELSEWHERE, LEFT, SILENT, UNANNOUNCED
from nemo_patches.tracing import records

RANKS_OF_A_HOST = 4
PLACE = "read_audio (my_asr/dataset.py:41) < __getitem__ (my_asr/dataset.py:30) < main (my_asr/train.py:88)"


@dataclass(frozen=True)
class Setup:
    """How a rank's process is set up, where it is not as the others' are."""

    flag: bool = True
    sync: str = "bounded"
    torch: str = "2.13.0"
    configured: str = records.NOT_SET
    room: int = 5000
    traced: bool = True
    patched: bool = True
    memory: tuple[float, float] = (8.0, 0.0)  # GiB at the start, and more per call
    part: int = 0
    restart: int = 0
    registered: int = 9999
    job: str = ""
    frozen: bool = False


@dataclass
class Trace(Listener):
    """One rank's."""

    setup: Setup
    patched: set[int]  # ranks
    reports: bool
    begins: float
    room: int
    lines: list[records.Record] = field(default_factory=list)
    backwards: dict[int, int] = field(default_factory=dict)  # by encoder, of those that were called
    graphs: dict[int, int] = field(default_factory=dict)  # by encoder: the call whose backward is to come
    in_ddp_since: float | None = None

    def write(self, now: float, kind: type, **values: object) -> None:
        self.lines.append(kind(t=round(now - self.begins, 6), **values))

    def entered(self, rank: Rank, now: float, call: Call) -> None:
        e, n = call.encoder, rank.encoders[call.encoder].calls
        if e not in self.backwards:
            self.backwards[e] = 0
            self.write(
                now,
                records.Encoder,
                e=e,
                name=_title(e),
                flag=self.setup.flag,
                configured=self.setup.configured,
                pos_emb_max_len=self.setup.room,
                normalisation="batch_norm",
                ddp=True,
                registered={"pos_enc.pe": [1, self.setup.registered, 512]},
                grown={},
            )
        self.write(
            now,
            records.Enter,
            e=e,
            n=n,
            training=call.training,
            grad=call.training,
            shape=[call.batch, call.features, call.length],
            dtype="float32",
            device=f"cuda:{rank.number % 8}",
            lengths_shape=[call.batch],
            path=call.path,
            group=call.group,
            backwards=self.backwards[e],
            in_ddp=now - self.in_ddp_since if self.in_ddp_since is not None else None,
        )
        self.in_ddp_since = None
        if call.found:
            self.write(now, records.CheckFinding, e=e, n=n, check="inputs", text=call.found)

    def synced(self, rank: Rank, now: float, call: Call, sync: Sync) -> None:
        encoder = rank.encoders[call.encoder]
        facts = {"outcome": sync.outcome, "waited": round(sync.waited_s, 6), "local": call.length}
        self._of_call(rank, now, call, records.Sync, round=encoder.issued, result=sync.length, **facts)
        if sync.outcome == records.TIMEOUT and self.reports:
            assert rank.rounds.latest is not None
            absent = [number for number in range(rank.job.size) if number not in rank.rounds.latest.values]
            told = self._told_of(rank.job, absent)
            name = _title(call.encoder)
            self.write(now + 0.05, records.Missing, name=name, n=encoder.calls, unknown="", **told)

    def grown(self, rank: Rank, now: float, call: Call, length: int) -> None:
        if length > self.room:
            self._of_call(rank, now + 0.001, call, records.Grow, old=self.room, new=length)
            self.room = length

    def phase_ended(self, rank: Rank, now: float, call: Call, phase: str) -> None:
        if kind := {"pre_encode": records.PreEncoded, "layers": records.FirstLayer}.get(phase):
            self._of_call(rank, now, call, kind)

    def raised(self, rank: Rank, now: float, call: Call) -> None:
        text = 'Traceback (most recent call last):\n  File "train.py", line 1, in forward\n' + call.raises
        what = {"type": call.raises, "message": f"{call.raises} here", "traceback": text}
        self._of_call(rank, now, call, records.Raised, **what)

    def left(self, rank: Rank, now: float, call: Call, length: int) -> None:
        n = rank.encoders[call.encoder].calls
        if n % 10 == 0:
            base, grows = self.setup.memory
            rss = int((base + grows * n) * (1 << 30))
            self.write(now, records.Memory, rss=rss, allocated=4 << 30, reserved=6 << 30)
        if has_graph := call.training and not self.setup.frozen:
            self.graphs[call.encoder] = n
        else:
            self.graphs.pop(call.encoder, None)
        self._of_call(rank, now, call, records.Leave, shape=[8, 512, length // 8], took=0.02, graph=has_graph)

    def ddp_began(self, now: float) -> None:
        self.in_ddp_since = now

    def backward_began(self, rank: Rank, now: float) -> None:
        for e in sorted(self.graphs):
            self.backwards[e] += 1
            self.write(now, records.Backward, e=e, n=self.graphs[e])

    def backward_ended(self, rank: Rank, now: float) -> None:
        for e in sorted(self.graphs):
            self.write(now, records.BackwardEnded, e=e, n=self.graphs[e])
        self.graphs.clear()

    def stalled(self, rank: Rank, now: float) -> None:
        """As stall/job_stall.py does: who waits in a collective is no suspect, and where none does, nobody is."""
        waiting = rank.job.waiting(now)
        suspects = sorted(set(range(rank.job.size)) - waiting) if waiting else []
        told = self._told_of(rank.job, suspects)
        self.write(now, records.Stalled, text=f"waiting: {sorted(waiting)}", waited=bool(waiting), **told)

    def ended(self, now: float, error: str) -> None:
        self.write(now, records.End, error=error)

    def _of_call(self, rank: Rank, now: float, call: Call, kind: type, **values: object) -> None:
        self.write(now, kind, e=call.encoder, n=rank.encoders[call.encoder].calls, **values)

    def _told_of(self, job: Job, ranks: list[int]) -> dict[str, object]:
        kinds = [self._kind(job, rank) for rank in ranks]
        return {"ranks": ranks, "kinds": kinds, "where": [PLACE if kind == ELSEWHERE else "" for kind in kinds]}

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
    bound: int = 1 << 30,
) -> Path:
    """Run the schedules to where nobody can go on, and write each rank's trace into the folder, which is returned."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(seed)
    job = Job(len(schedules))
    of_ranks = [(setups or {}).get(number, Setup()) for number in range(job.size)]
    patched = {number for number, setup in enumerate(of_ranks) if setup.patched}
    traces = [Trace(setup, patched, reports, draw.uniform(-30, 0), setup.room) for setup in of_ranks]
    ranks = [
        Rank(number, events, job, trace, sync=trace.setup.sync, flag=trace.setup.flag, watched=reports)
        for number, (events, trace) in enumerate(zip(schedules, traces, strict=True))
        if trace.setup.patched
    ]
    ended_at = run(ranks)
    if reports:
        for rank in ranks:
            if rank.number not in job.gone | job.silent:
                rank.listener.stalled(rank, ended_at + STALL_S)
    hours = [draw.uniform(-9, 9) * 3600 for _ in range(job.size)]  # by host, of its clock
    for rank in ranks:
        if (trace := traces[rank.number]).setup.traced:
            _write(folder, rank, trace, launched + trace.begins + hours[rank.number // RANKS_OF_A_HOST], bound)
    return folder


def header(rank: int, size: int, started: float, setup: Setup, bound: int = 1 << 30, part: int = 0) -> records.Header:
    return records.Header(
        format=records.FORMAT,
        rank=rank,
        world_size=size,
        host=f"node{rank // RANKS_OF_A_HOST}",
        pid=4000 + rank,
        started=started,
        part=part,
        restart=setup.restart,
        bound=bound,
        versions={"nemo_patches": "0.1.0", "nemo": "3.0.0", "torch": setup.torch, "python": "3.11.7"},
        settings={"sync": setup.sync, "timeout": "10", "on_timeout": "fallback", "trace": f"/tmp/{rank}"},
        checks=[],
        job=setup.job,
    )


def file_name(rank: int, started: float, part: int = 0) -> str:
    return f"rank-{rank:05}.{int(started)}T0.{4000 + rank}.{part}.jsonl"


def _write(folder: Path, rank: Rank, trace: Trace, started: float, bound: int) -> None:
    """In parts of half the bound, all but the last two of which are gone, as the recorder does it."""
    introductions = [line for line in trace.lines if isinstance(line, records.Encoder)]
    part, written, lines = 0, 0, [b""]
    files: list[list[bytes]] = []
    for line in trace.lines:
        if not files or written >= bound / 2:
            first = header(rank.number, rank.job.size, started, trace.setup, bound, part + trace.setup.part)
            lines = [records.encode(first)]
            lines += [records.encode(one) for one in introductions] if part else []
            files.append(lines)
            part, written = part + 1, sum(map(len, lines))
        lines.append(records.encode(line))
        written += len(lines[-1])
    if not files:
        files = [[records.encode(header(rank.number, rank.job.size, started, trace.setup, bound))]]
    for number, content in list(enumerate(files))[-2:]:
        name = file_name(rank.number, started, number + trace.setup.part)
        (folder / name).write_bytes(b"".join(content))
