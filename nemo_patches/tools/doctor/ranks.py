"""`doctor --ranks`: every rank publishes facts in the job's store, and rank 0 collects them, in bounded time.

In three steps, each with a time limit of its own, so that a rank which does not answer, or hangs, becomes a finding and
no more: every rank publishes its facts; rank 0 names those that have come; these make one Gloo group and measure it.
What a rank publishes is checked for its types and its size, and printed without control characters.
"""

from __future__ import annotations

import os
import secrets
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from nemo_patches.channel.safe_text import safe
from nemo_patches.stall.rank_text import named
from nemo_patches.sync import settings
from nemo_patches.tools import status
from nemo_patches.tools.doctor import gloo_probe, machine
from nemo_patches.tools.doctor.errors import DoctorError

if TYPE_CHECKING:
    import torch.distributed as dist

_Result = TypeVar("_Result")

_MEASUREMENTS = 20  # syncs, and requests to the store
_SMOKE_BYTES = 1 << 20  # of each collective over the job's backend
_MOST_BYTES = 1 << 18  # that a rank may publish at once
_MOST_ITEMS = 256  # of a list or mapping in it
_POLL_S = 0.02
_SHOWN_RANKS = 32  # ranks that are printed one by one
_OF_A_HOST = ("_IFNAME", "_HCA")  # variables that end so are a host's own, and may differ


@dataclass(frozen=True)
class Place:
    """This process's place in the job, by its launcher's variables."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    has_server: bool  # rank 0, where the launcher has not started the store's server already


@dataclass(frozen=True)
class Facts:
    """What a rank publishes about itself.

    unpatched: why NeMo would not be patched there, empty where it would. auto_apply: as `nemo-patches status` has it.
    loaders: what the config given makes of the data loaders there, by name; empty where none was given.
    """

    rank: int
    host: str
    pid: int
    device: str
    device_id: str
    versions: dict[str, str]
    settings: dict[str, str]
    environment: dict[str, str]
    unpatched: tuple[str, ...]
    auto_apply: str
    loaders: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What a rank measured, in seconds: each sync, each request to the store, its clock (Unix time) after each sync.

    problem: why there is no more. address: where Gloo listens there.
    """

    rank: int
    syncs: tuple[float, ...] = ()
    requests: tuple[float, ...] = ()
    clocks: tuple[float, ...] = ()
    address: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Smoke:
    """How a rank came through the job's backend: the collectives that it ended, in seconds each, over which backend.

    at: the one that it is in, where it came to no end or failed; problem: why, in the backend's words.
    """

    rank: int
    backend: str
    ended: dict[str, float] = field(default_factory=dict)
    at: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Ranks:
    """What rank 0 collected, by rank; a rank without facts has not answered within the timeout.

    smoke: of --nccl, None without it. Ranks with facts that are not in it have not come to the backend's test.
    """

    size: int
    timeout: timedelta
    facts: Mapping[int, Facts] = field(default_factory=dict)
    measured: Mapping[int, Measured] = field(default_factory=dict)
    smoke: Mapping[int, Smoke] | None = None

    @property
    def headline(self) -> str:
        """One line on what the rules go by."""
        hosts = len({facts.host for facts in self.facts.values()})
        return f"{len(self.facts)} of {self.size} ranks answered, on {hosts} host{'s' * (hosts != 1)}"

    def clock_offset(self, rank: int) -> float | None:
        """How far this rank's clock is ahead of rank 0's, in seconds; right to about the duration of a sync."""
        own, first = self.measured.get(rank), self.measured.get(0)
        if own is None or first is None or not own.clocks or len(own.clocks) != len(first.clocks):
            return None
        return statistics.median(mine - theirs for mine, theirs in zip(own.clocks, first.clocks, strict=True))

    def grouped(self, what: Callable[[Facts], str]) -> dict[str, list[int]]:
        """The ranks by what `what` makes of their facts, the most frequent first."""
        ranks: dict[str, list[int]] = {}
        for rank, facts in sorted(self.facts.items()):
            ranks.setdefault(what(facts), []).append(rank)
        return dict(sorted(ranks.items(), key=lambda item: -len(item[1])))

    def lines(self) -> list[str]:
        """One line for each rank, those with the slowest syncs first where there are many."""
        ranks = sorted(self.facts, key=lambda rank: -_median(self.measured.get(rank, Measured(rank)).syncs))
        shown = sorted(ranks[:_SHOWN_RANKS])
        rest = len(ranks) - len(shown)
        lines = [self._line(rank) for rank in shown] + ([f"{rest} more ranks, with faster syncs"] if rest else [])
        if self.smoke and len({tuple(each.ended) for each in self.smoke.values()}) == 1:
            lines += [self._slowest(name) for name in next(iter(self.smoke.values())).ended]
        return lines + [f"on all of them {name}: {text}" for name, text in self._common_loaders().items()]

    def _slowest(self, name: str) -> str:
        slowest = max((self.smoke or {}).values(), key=lambda each: each.ended[name])
        return f"{name} over {slowest.backend}: {1000 * slowest.ended[name]:.1f} ms at most (rank {slowest.rank})"

    def _common_loaders(self) -> dict[str, str]:
        first, *others = [facts.loaders for _, facts in sorted(self.facts.items())] or [{}]
        return {name: text for name, text in first.items() if all(other.get(name) == text for other in others)}

    def _line(self, rank: int) -> str:
        facts, measured = self.facts[rank], self.measured.get(rank, Measured(rank))
        offset = self.clock_offset(rank)
        parts = [
            f"rank {rank}: {facts.host}, pid {facts.pid}, {facts.device}",
            f"sync {_range(measured.syncs)}",
            f"store {_range(measured.requests)}",
            "clock not measured" if offset is None else f"clock {offset:+.3f} s",
            "would not be patched" if facts.unpatched else f"auto-apply {facts.auto_apply.partition(' ')[0]}",
        ]
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "ranks": [
                {
                    **msgspec.to_builtins(facts),
                    "measured": msgspec.to_builtins(self.measured[rank]) if rank in self.measured else None,
                    "clock_offset": self.clock_offset(rank),
                    "smoke": msgspec.to_builtins(self.smoke[rank]) if self.smoke and rank in self.smoke else None,
                }
                for rank, facts in sorted(self.facts.items())
            ]
        }


def differing(ranks: Ranks, what: Callable[[Facts], Mapping[str, str]]) -> Iterable[tuple[str, str]]:
    """Each name whose value differs between ranks, with its values and their ranks; the most frequent value last."""
    for name in sorted({name for facts in ranks.facts.values() for name in what(facts)}):
        groups = ranks.grouped(lambda facts, name=name: what(facts).get(name, "not set"))  # type: ignore[misc]
        if len(groups) > 1:
            yield name, ", ".join(f"{safe(text)} on {named(which)}" for text, which in reversed(groups.items()))


def place(variables: Mapping[str, str] = os.environ) -> Place:
    """From torchrun's variables, or Slurm's with MASTER_ADDR and MASTER_PORT. Raises DoctorError."""

    def number(*names: str) -> int:
        for name in names:
            if text := variables.get(name):
                if text.isdigit():
                    return int(text)
                raise DoctorError(f"{name}={text!r} is not allowed; allowed: a number, as torchrun sets it")
        raise DoctorError(
            f"--ranks: {names[0]} is not set; it is run on every rank: torchrun ... -m nemo_patches doctor --ranks"
        )

    rank, size = number("RANK", "SLURM_PROCID"), number("WORLD_SIZE", "SLURM_NTASKS")
    if rank >= size:
        raise DoctorError(f"RANK={rank} is not allowed with WORLD_SIZE={size}; allowed: 0 to {size - 1}")
    address, port = variables.get("MASTER_ADDR"), number("MASTER_PORT")
    if not address:
        raise DoctorError("--ranks: MASTER_ADDR is not set; torchrun sets it")
    by_launcher = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    has_server = rank == 0 and not by_launcher
    return Place(rank, size, number("LOCAL_RANK", "SLURM_LOCALID"), address, port, has_server)


def examine(here: Place, loaders: Mapping[str, str], smoke: bool = False) -> Ranks | None:
    """Take part as this rank; return what all ranks published on rank 0, None on the others. Raises DoctorError.

    loaders: what a config makes of this rank's data loaders.
    It takes the timeout of NEMO_PATCHES_TIMEOUT a few times, whatever other ranks do.
    """
    try:
        timeout = settings.resolve().timeout
    except settings.SettingsError as error:
        raise DoctorError(str(error)) from None
    own = _facts(here, loaders)  # imports torch, which the time limits must not count
    part = _Part(here, own, timeout, smoke)
    thread = threading.Thread(target=part.take, daemon=True)  # torch's calls cannot be interrupted
    thread.start()
    thread.join((5 + 3 * smoke) * timeout.total_seconds() + 5)
    problem = part.error or (f"rank {here.rank} came to no end; it was at {part.at}" if thread.is_alive() else "")
    if problem and not part.facts:
        raise DoctorError(problem)
    if here.rank:
        return None
    measured = dict(part.measured)
    if problem:
        measured[0] = replace(measured.get(0, Measured(0)), problem=problem)
    return Ranks(here.size, timeout, dict(part.facts), measured, dict(part.smoke) if smoke else None)


class _Part:
    """This rank's part, on a thread; what it has so far is read when its time is up."""

    def __init__(self, here: Place, own: Facts, timeout: timedelta, smoke: bool) -> None:
        self.facts: dict[int, Facts] = {}
        self.measured: dict[int, Measured] = {}
        self.smoke: dict[int, Smoke] = {}
        self._with_smoke = smoke
        self.at, self.error = "its start", ""
        self._here, self._own, self._timeout = here, own, timeout

    def take(self) -> None:
        try:
            self._take()
        except Exception as error:  # torch has no common class for what its stores raise
            self.error = f"rank {self._here.rank}, at {self.at}: {_first_line(error)}"

    def _take(self) -> None:
        import torch.distributed as dist

        from nemo_patches.channel.store import JobStore, StoreConnection

        here = self._here
        self.at = f"connecting to the job's store at {here.address}:{here.port}"
        tcp_store = dist.TCPStore(
            here.address,
            here.port,
            is_master=here.has_server,
            timeout=self._timeout,
            wait_for_workers=False,
            **({"multi_tenant": True} if here.has_server else {}),
        )
        part = dist.PrefixStore("nemo_patches/doctor", tcp_store)
        store = StoreConnection(JobStore(tcp_store, here.rank), part).join(anew=True)
        self.at = "publishing its facts"
        _publish(store, "facts", self._own)
        if here.rank == 0:
            self.at = "collecting the ranks' facts"
            self.facts = _collect(store, "facts", range(here.size), Facts, self._timeout)
            self.facts.setdefault(0, self._own)  # as they were published, to be compared
            store.set("smoke_name", secrets.token_hex(8))
            store.set("present", msgspec.json.encode(sorted(self.facts)).decode())
            present = sorted(self.facts)
        else:
            self.at = "waiting for rank 0 to say who is there"
            present = _ranks_present(store, 2 * self._timeout)
            if here.rank not in present:
                raise DoctorError(f"rank {here.rank} came too late: rank 0 has stopped waiting")
        self.at = "measuring"
        began = time.monotonic()
        own = self._measure(store, present)
        _publish(store, "measured", own)
        if self._with_smoke:
            self.at = "the collectives of the job's backend"
            tried = _smoke(store, here, present, self._timeout)
            _publish(store, "smoke", tried)
        if here.rank == 0:
            self.at = "collecting what the ranks measured"
            self.measured[0] = own
            others = [rank for rank in present if rank]
            end = began + (2 + 2 * self._with_smoke) * self._timeout.total_seconds()  # each has a limit of its own
            self.measured |= _collect(store, "measured", others, Measured, _until(end))
            if self._with_smoke:
                self.smoke[0] = tried
                self.smoke |= _collect(store, "smoke", others, Smoke, _until(end))
        self.at = "its end"

    def _measure(self, store: dist.Store, present: list[int]) -> Measured:
        """Requests first: then no rank makes its group while another measures the store."""
        requests = tuple(_timed(lambda: store.get("present")))
        gloo = gloo_probe.probe()
        measured = Measured(self._here.rank, (), requests, (), gloo.address, gloo.problem)
        if measured.problem:
            return measured
        limit = 1.5 * self._timeout  # Gloo can wait longer than its timeout for ranks that never connect
        try:
            syncs, clocks = _within(limit, lambda: _syncs(store, present, self._here.rank, self._timeout))
        except (RuntimeError, ValueError) as error:  # Gloo's
            return replace(measured, problem=_first_line(error))
        return replace(measured, syncs=syncs, clocks=clocks)


def _until(end: float) -> timedelta:
    return timedelta(seconds=end - time.monotonic())


def _smoke(store: dist.Store, here: Place, present: list[int], timeout: timedelta) -> Smoke:
    """Three collectives of 1 MB over the backend that the job would have; what has no end in time is left alone."""
    import torch
    import torch.distributed as dist

    # A client of its own: a wait for a rank that never comes holds the client's lock, in a thread that is left alone.
    client = dist.TCPStore(here.address, here.port, is_master=False, timeout=timeout, wait_for_workers=False)
    own = dist.PrefixStore(f"nemo_patches/doctor/{store.get('smoke_name').decode()}", client)
    gpu = torch.cuda.is_available() and here.local_rank < torch.cuda.device_count()
    backend, device = ("nccl", f"cuda:{here.local_rank}") if gpu else ("gloo", "cpu")
    ended: dict[str, float] = {}
    at = ["the start of the group"]

    def run() -> None:
        if gpu:
            torch.cuda.set_device(here.local_rank)
        seat, size = present.index(here.rank), len(present)
        # Its own limit is longer than ours: where it passes, NCCL's watchdog ends the process.
        dist.init_process_group(backend, store=own, rank=seat, world_size=size, timeout=20 * timeout)
        block = torch.ones(_SMOKE_BYTES // 4, device=device)
        parts = [torch.empty_like(block) for _ in range(size)]
        collectives: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(block),
            "broadcast": lambda: dist.broadcast(block, 0),
            "all_gather": lambda: dist.all_gather(parts, block),
        }
        for name, collective in collectives.items():
            at[0] = name
            began = time.perf_counter()
            collective()
            if gpu:
                torch.cuda.synchronize()
            ended[name] = time.perf_counter() - began

    try:
        _within(1.5 * timeout, run)
    except (RuntimeError, ValueError) as error:
        return Smoke(here.rank, backend, dict(ended), at[0], _first_line(error))
    return Smoke(here.rank, backend, dict(ended))


def _within(limit: timedelta, what: Callable[[], _Result]) -> _Result:
    """What it returns or raises; RuntimeError where that takes too long, and it is left alone."""
    outcome: list[_Result | Exception] = []

    def run() -> None:
        try:
            outcome.append(what())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit.total_seconds())
    if not outcome:
        raise RuntimeError(f"no end within {limit.total_seconds():g} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _syncs(
    store: dist.Store, present: list[int], rank: int, timeout: timedelta
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The duration of each sync among these ranks, and the clock after it."""
    import torch
    import torch.distributed as dist

    group: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), present.index(rank), len(present), timeout)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]  # torch's stub calls it RedOpType
    length = torch.zeros(1)
    clocks: list[float] = []

    def sync() -> None:
        group.allreduce([length], options).wait(timeout)
        clocks.append(time.time())

    sync()  # the ranks come to the first one at different times
    times = tuple(_timed(sync))
    return times, tuple(clocks[1:])


def _timed(what: Callable[[], object]) -> Iterable[float]:
    for _ in range(_MEASUREMENTS):
        began = time.perf_counter()
        what()
        yield time.perf_counter() - began


def _facts(here: Place, loaders: Mapping[str, str]) -> Facts:
    versions = machine.versions()
    try:
        report = status.examine()
        versions = {**report.versions, **{name: versions[name] for name in versions if "lightning" in name}}
        chosen = {setting.name: setting.value for setting in report.settings}
        unpatched, auto_apply = report.reasons, report.auto_apply
    except status.StatusError as error:
        chosen, unpatched, auto_apply = {}, (str(error),), "off"
    device, identity = _device(here.local_rank)
    return Facts(
        rank=here.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device,
        device_id=identity,
        versions=versions,
        settings=chosen,
        environment=_comparable(os.environ),
        unpatched=unpatched,
        auto_apply=auto_apply,
        loaders=dict(loaders),
    )


def _comparable(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that ought to be the same on all ranks; our own are among the settings."""
    return {
        name: value
        for name, value in machine.environment(variables).items()
        if name.startswith(("NCCL_", "TORCH_", "GLOO_")) and not name.endswith(_OF_A_HOST)
    }


def _device(local_rank: int) -> tuple[str, str]:
    """The GPU that Lightning would give this rank, and what tells it from others; or the CPU."""
    import torch

    if not torch.cuda.is_available():
        return "CPU", ""
    if local_rank >= torch.cuda.device_count():
        return f"no GPU of its own: {torch.cuda.device_count()} on this host", ""
    properties = torch.cuda.get_device_properties(local_rank)
    return f"cuda:{local_rank} {properties.name}", str(getattr(properties, "uuid", ""))


def _publish(store: dist.Store, what: str, content: Facts | Measured | Smoke) -> None:
    printable = _printable(msgspec.to_builtins(content))  # JSON takes no variable that is no text
    store.set(f"{what}/{content.rank}", msgspec.json.encode(printable).decode())
    store.add(what, 1)


def _collect(store: dist.Store, what: str, ranks: Iterable[int], kind: type[Any], timeout: timedelta) -> dict[int, Any]:
    """What these ranks publish in time, by rank; without what is not of that kind, or too long."""
    wanted = list(ranks)
    end = time.monotonic() + timeout.total_seconds()
    while store.add(what, 0) < len(wanted) + (0 not in wanted) and time.monotonic() < end:
        time.sleep(_POLL_S)
    contents = {}
    for rank in wanted:
        if store.check([f"{what}/{rank}"]):
            content = _decoded(store.get(f"{what}/{rank}"), kind)
            if content is not None and content.rank == rank:
                contents[rank] = content
    return contents


def _decoded(data: bytes, kind: type[Any]) -> Any:
    if len(data) > _MOST_BYTES:
        return None
    try:
        return msgspec.convert(_printable(msgspec.json.decode(data)), kind)
    except (msgspec.DecodeError, RecursionError):
        return None


def _printable(content: Any) -> Any:
    """JSON's content with its texts cut, and without control characters."""
    if isinstance(content, dict):
        return {safe(name): _printable(value) for name, value in list(content.items())[:_MOST_ITEMS]}
    if isinstance(content, list | tuple):
        return [_printable(value) for value in content[:_MOST_ITEMS]]
    return safe(content) if isinstance(content, str) else content


def _ranks_present(store: dist.Store, timeout: timedelta) -> list[int]:
    end = time.monotonic() + timeout.total_seconds()
    while not store.check(["present"]):
        if time.monotonic() > end:
            raise DoctorError(f"rank 0 has not answered within {timeout.total_seconds():g} s")
        time.sleep(_POLL_S)
    present: list[int] = msgspec.json.decode(store.get("present"), type=list[int])
    return present


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return safe(text[0]) if text else type(error).__name__


def _median(times: tuple[float, ...]) -> float:
    return statistics.median(times) if times else float("inf")


def _range(times: tuple[float, ...]) -> str:
    if not times:
        return "not measured"
    return f"{1000 * min(times):.2f} ms, median {1000 * _median(times):.2f}"


def leave(code: int) -> NoReturn:
    """End this process at once: a thread in one of torch's calls would keep it, or crash it, at an ordinary exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
