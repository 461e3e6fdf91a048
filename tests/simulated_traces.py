"""Traces as real ranks would write them, by the real protocol in simulated time, each rank with a clock of its own.

A schedule is what one rank does. A rank that reaches the end of its schedule without `Exit` waits there for ever, as in
a collective that nobody else comes to. When nobody can go on, all report a stall, and are killed.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from nemo_patches.stall.rank_kinds import ELSEWHERE, LEFT, SILENT, UNANNOUNCED
from nemo_patches.sync.protocol import LengthProtocol
from nemo_patches.tracing import records

TIMEOUT = timedelta(seconds=10)
LATENCY = 0.0005
STALL_S = 60.0
RANKS_OF_A_HOST = 4
PLACE = "read_audio (my_asr/dataset.py:41) < __getitem__ (my_asr/dataset.py:30) < main (my_asr/train.py:88)"
PHASES = ("length sync", "growth", "pre_encode", "layers")


@dataclass(frozen=True)
class Call:
    """One encoder call, `pause` seconds after what was before. stuck: the phase that it never leaves.

    raises: the exception's type. found: a finding of the check `inputs`.
    """

    length: int = 1000
    training: bool = True
    pause: float = 0.1
    stuck: str = ""
    dies: bool = False  # there, by SIGKILL
    raises: str = ""
    found: str = ""
    features: int = 80
    batch: int = 8
    path: str = records.PRE_ENCODE
    group: bool = True
    encoder: int = 0


@dataclass(frozen=True)
class Gradients:
    """The backward of the call before, where a rank waits for all others, as under DDP."""


@dataclass(frozen=True)
class LocalBackward:
    """The backward of the call before, which waits for nobody, as where gradients are accumulated."""


@dataclass(frozen=True)
class DdpForward(Gradients):
    """Likewise, as in DDP's broadcast of buffers, `pause` seconds after what was before; a call follows."""

    pause: float = 0.1


@dataclass(frozen=True)
class Away:
    """No encoder call for so many seconds, as in a checkpoint, a decode or the writing of a .nemo."""

    seconds: float


@dataclass(frozen=True)
class Killed:
    """SIGKILL. gone: the others' length sync ends at once; else it is only silent, as a stopped process is."""

    gone: bool = True


@dataclass(frozen=True)
class Exit:
    """The interpreter ends. error: the exception that ended it."""

    error: str = ""


Event = Call | Gradients | LocalBackward | Away | Killed | Exit
STEP: tuple[Event, ...] = (Call(), Gradients())


def steps(count: int, pause: float = 0.1, length: int = 1000) -> list[Event]:
    """Training steps."""
    return [event for _ in range(count) for event in (Call(length, pause=pause), Gradients())]


def evaluation(count: int) -> list[Event]:
    """Evaluation calls, which no collective follows."""
    return [Call(training=False, pause=0.05)] * count


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
class _Round:
    came_to: dict[int, int] = field(default_factory=dict)
    came_at: float = math.inf


@dataclass
class _World:
    size: int
    rounds: dict[int, list[_Round]] = field(default_factory=lambda: defaultdict(list))  # by encoder
    gone: dict[int, float] = field(default_factory=dict)  # rank: when its connections closed
    silent: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)  # for the others, in the gradients' reduce

    @property
    def failed_at(self) -> float:
        return min(self.gone.values(), default=math.inf)


@dataclass
class _Pause:
    until: float
    round: _Round | None = None
    world: _World | None = None

    @property
    def end(self) -> float:
        came = self.round.came_at if self.round else math.inf
        failed = self.world.failed_at if self.world and self.round and self.round.came_at == math.inf else math.inf
        return min(self.until, came, failed)


@dataclass
class _Encoder:
    """One encoder of one rank."""

    protocol: LengthProtocol = field(default_factory=LengthProtocol)
    current: _Round | None = None
    issued: int = 0
    calls: int = 0
    backwards: int = 0
    has_graph: bool = False
    described: bool = False


@dataclass
class _Rank:
    number: int
    events: list[Event]
    setup: Setup
    world: _World
    reports: bool
    begins: float
    lines: list[records.Record] = field(default_factory=list)
    encoders: dict[int, _Encoder] = field(default_factory=lambda: defaultdict(_Encoder))
    at_gradients: bool = False
    in_ddp_since: float | None = None
    entered: float = 0.0  # the last call

    def write(self, now: float, kind: type, **values: object) -> None:
        self.lines.append(kind(t=round(now - self.begins, 6), **values))

    def live(self) -> Generator[_Pause, float, None]:
        room = self.setup.room
        now = yield _Pause(0.0)
        for event in self.events:
            if isinstance(event, DdpForward):
                now = yield _Pause(now + event.pause)
                self.in_ddp_since = now
            if isinstance(event, Gradients | LocalBackward):
                with_graph = [(e, encoder) for e, encoder in self.encoders.items() if encoder.has_graph]
                for e, encoder in with_graph:
                    encoder.backwards += 1
                    encoder.has_graph = False
                    self.write(now, records.Backward, e=e, n=encoder.calls)
                if isinstance(event, Gradients):
                    self.at_gradients = True
                    self.world.waiting.add(self.number)
                    now = yield _Pause(math.inf)
                    self.at_gradients = False
                    self.world.waiting.discard(self.number)
                for e, encoder in with_graph:
                    self.write(now, records.BackwardEnded, e=e, n=encoder.calls)
                continue
            if isinstance(event, Away):
                until = now + event.seconds
                for look in range(9):
                    due_at = self.entered + STALL_S * 2**look
                    if self.reports and now < due_at < until:
                        now = yield _Pause(due_at)
                        self.report_stall(now)
                now = yield _Pause(until)
                continue
            if isinstance(event, Killed):
                if event.gone:
                    self.world.gone[self.number] = now
                else:
                    self.world.silent.add(self.number)
                yield _Pause(math.inf)
            if isinstance(event, Exit):
                self.write(now, records.End, error=event.error)
                self.world.gone[self.number] = now
                return
            assert isinstance(event, Call)
            now = yield _Pause(now + event.pause)
            e, encoder = event.encoder, self.encoders[event.encoder]
            encoder.calls += 1
            n = encoder.calls
            self.entered = now
            if not encoder.described:
                encoder.described = True
                self.write(now, records.Encoder, **self._encoder(e))
            in_ddp = now - self.in_ddp_since if self.in_ddp_since is not None else None
            self.write(now, records.Enter, **self._enter(event), in_ddp=in_ddp)
            self.in_ddp_since = None
            if event.found:
                self.write(now, records.CheckFinding, e=e, n=n, check="inputs", text=event.found)
            if event.stuck == "length sync":
                yield _Pause(math.inf)
            outcome, waited, result = "", 0.0, event.length
            for pause_or_result in self._sync(now, event):
                if isinstance(pause_or_result, _Pause):
                    now = yield pause_or_result
                    self._now = now
                else:
                    outcome, waited, result = pause_or_result
            self.write(
                now,
                records.Sync,
                e=e,
                n=n,
                outcome=outcome,
                round=encoder.issued,
                waited=round(waited, 6),
                local=event.length,
                result=result,
            )
            if outcome == records.TIMEOUT and self.reports:
                self._report(now, event)
            if event.stuck == "growth":
                yield _Pause(math.inf)
            if result > room:
                self.write(now + 0.001, records.Grow, e=e, n=n, old=room, new=result)
                room = result
            for phase, kind, seconds in (
                ("pre_encode", records.PreEncoded, 0.004),
                ("layers", records.FirstLayer, 0.002),
            ):
                if event.stuck == phase:
                    if event.dies:
                        self.world.gone[self.number] = now
                    yield _Pause(math.inf)
                now = yield _Pause(now + seconds)
                if event.raises and phase == "layers":
                    break
                self.write(now, kind, e=e, n=n)
            if event.raises:
                text = 'Traceback (most recent call last):\n  File "train.py", line 1, in forward\n' + event.raises
                self.write(
                    now, records.Raised, e=e, n=n, type=event.raises, message=f"{event.raises} here", traceback=text
                )
                continue
            now = yield _Pause(now + 0.01)
            if n % 10 == 0:
                base, grows = self.setup.memory
                self.write(
                    now, records.Memory, rss=int((base + grows * n) * (1 << 30)), allocated=4 << 30, reserved=6 << 30
                )
            encoder.has_graph = event.training and not self.setup.frozen
            shape, graph = [8, 512, result // 8], encoder.has_graph
            self.write(now, records.Leave, e=e, n=n, shape=shape, took=0.02, graph=graph)
        yield _Pause(math.inf)

    def _encoder(self, e: int) -> dict[str, object]:
        return {
            "e": e,
            "name": _title(e),
            "flag": self.setup.flag,
            "configured": self.setup.configured,
            "pos_emb_max_len": self.setup.room,
            "normalisation": "batch_norm",
            "ddp": True,
            "registered": {"pos_enc.pe": [1, self.setup.registered, 512]},
            "grown": {},
        }

    def _enter(self, event: Call) -> dict[str, object]:
        return {
            "e": event.encoder,
            "n": self.encoders[event.encoder].calls,
            "training": event.training,
            "grad": event.training,
            "shape": [event.batch, event.features, event.length],
            "dtype": "float32",
            "device": f"cuda:{self.number % 8}",
            "lengths_shape": [event.batch],
            "path": event.path,
            "group": event.group,
            "backwards": self.encoders[event.encoder].backwards,
        }

    def _sync(self, now: float, event: Call) -> Generator[_Pause | tuple[str, float, int], None, None]:
        """The length sync of one call: pauses, and last its outcome, the time waited, and the length."""
        self._now = now
        encoder, world = self.encoders[event.encoder], self.world
        protocol, rounds = encoder.protocol, world.rounds[event.encoder]
        if not self.setup.flag or self.setup.sync == "local":
            yield records.LOCAL, 0.0, event.length
            return
        if world.failed_at <= now:
            yield records.ENDED, 0.0, event.length
            return
        completed = None
        if encoder.current is not None and encoder.current.came_at <= now:
            completed, encoder.current = max(encoder.current.came_to.values()), None
        if not protocol.begin(event.length, event.training, completed):
            outcome = records.SERVED if protocol.served else records.UNWAITED
            yield outcome, 0.0, protocol.agreed() if protocol.served else event.length
            return
        if encoder.issued == len(rounds):
            rounds.append(_Round())
        one = encoder.current = rounds[encoder.issued]
        encoder.issued += 1
        one.came_to[self.number] = protocol.value()
        if len(one.came_to) == world.size:
            one.came_at = now + LATENCY
        wait = protocol.wait_limit(TIMEOUT)
        if self.setup.sync == "overlapped":
            yield records.SERVED, 0.0, protocol.agreed()
            return
        if wait is None:
            yield records.UNWAITED, 0.0, event.length
            return
        yield _Pause(now + wait.total_seconds(), one, world)
        waited = self._now - now
        if one.came_at <= self._now:
            protocol.came_in_time(max(one.came_to.values()), event.training)
            encoder.current = None
            yield records.CAME, waited, protocol.agreed()
        elif world.failed_at <= self._now:
            yield records.ENDED, waited, event.length
        else:
            protocol.timed_out()
            yield records.TIMEOUT, waited, event.length

    def _report(self, now: float, event: Call) -> None:
        encoder = self.encoders[event.encoder]
        one = self.world.rounds[event.encoder][encoder.issued - 1]
        absent = [rank for rank in range(self.world.size) if rank not in one.came_to]
        kinds = [self._kind(rank) for rank in absent]
        where = [PLACE if kind == ELSEWHERE else "" for kind in kinds]
        self.write(
            now + 0.05,
            records.Missing,
            name=_title(event.encoder),
            n=encoder.calls,
            ranks=absent,
            kinds=kinds,
            where=where,
            unknown="",
        )

    def report_stall(self, now: float) -> None:
        """As stall/job_stall.py does: who waits in a collective is no suspect, and where none does, nobody is."""
        waiting = self.world.waiting
        suspects = sorted(set(range(self.world.size)) - waiting) if waiting else []
        kinds = [self._kind(rank) for rank in suspects]
        where = [PLACE if kind == ELSEWHERE else "" for kind in kinds]
        text = f"waiting: {sorted(waiting)}"
        self.write(now, records.Stalled, ranks=suspects, kinds=kinds, where=where, text=text, waited=bool(waiting))

    def _kind(self, rank: int) -> str:
        if rank in self.world.gone:
            return LEFT
        if rank in self.world.silent:
            return SILENT
        return ELSEWHERE if rank in _ALIVE.get(id(self.world), set()) else UNANNOUNCED


def _title(e: int) -> str:
    return "ConformerEncoder" if not e else f"ConformerEncoder #{e + 1}"


_ALIVE: dict[int, set[int]] = {}


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
    size = len(schedules)
    world = _World(size)
    ranks = [
        _Rank(number, events, (setups or {}).get(number, Setup()), world, reports, begins=draw.uniform(-30, 0))
        for number, events in enumerate(schedules)
    ]
    _ALIVE[id(world)] = {rank.number for rank in ranks if rank.setup.patched}
    ended_at = _run([rank for rank in ranks if rank.setup.patched], size)
    if reports:
        _report_stall(world, ranks, ended_at + STALL_S)
    del _ALIVE[id(world)]
    hours = [draw.uniform(-9, 9) * 3600 for _ in range(size)]  # by host, of its clock
    for rank in ranks:
        if rank.setup.traced and rank.setup.patched:
            _write(folder, rank, launched + rank.begins + hours[rank.number // RANKS_OF_A_HOST], bound)
    return folder


def _report_stall(world: _World, ranks: list[_Rank], now: float) -> None:
    for rank in ranks:
        if rank.setup.patched and rank.number not in world.gone and rank.number not in world.silent:
            rank.report_stall(now)


def _run(ranks: list[_Rank], size: int) -> float:
    """When nobody can go on."""
    runners = {rank.number: rank.live() for rank in ranks}
    pauses = {number: next(runner) for number, runner in runners.items()}
    by_number = {rank.number: rank for rank in ranks}
    now = 0.0
    while pauses:
        if len(pauses) == size and all(by_number[number].at_gradients for number in pauses):
            pauses = {number: _Pause(now + LATENCY) for number in pauses}
        number = min(pauses, key=lambda one: pauses[one].end)
        if pauses[number].end == math.inf:
            return now
        now = max(now, pauses[number].end)
        try:
            pauses[number] = runners[number].send(now)
        except StopIteration:
            del pauses[number]
    return now


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


def _write(folder: Path, rank: _Rank, started: float, bound: int) -> None:
    """In parts of half the bound, all but the last two of which are gone, as the recorder does it."""
    introductions = [line for line in rank.lines if isinstance(line, records.Encoder)]
    part, written, lines = 0, 0, [b""]
    files: list[list[bytes]] = []
    for line in rank.lines:
        if not files or written >= bound / 2:
            first = header(rank.number, rank.world.size, started, rank.setup, bound, part + rank.setup.part)
            lines = [records.encode(first)]
            lines += [records.encode(one) for one in introductions] if part else []
            files.append(lines)
            part, written = part + 1, sum(map(len, lines))
        lines.append(records.encode(line))
        written += len(lines[-1])
    if not files:
        files = [[records.encode(header(rank.number, rank.world.size, started, rank.setup, bound))]]
    for number, content in list(enumerate(files))[-2:]:
        name = file_name(rank.number, started, number + rank.setup.part)
        (folder / name).write_bytes(b"".join(content))
