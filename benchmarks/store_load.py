"""What stall reports cost the job's store: simulated ranks, real requests, one real TCPStore in a process of its own.

Each simulated rank has a connection, sends its heartbeats, and, for a round that some ranks do not come to, asks who
is missing, with stall/'s own code. Prints requests and bytes per second while all is well, and in all for the report,
and how long after the timeout the first and the last rank had it; the same for a census, of a job that calls no
encoder. Then what the roll call leaves for each rank, and how long one rank takes to ask all others directly, as it
does where the store fails.

    python benchmarks/store_load.py [--ranks 64 256]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TypeVar

import torch.distributed as dist

from nemo_patches.stall import store_client
from nemo_patches.stall.census import Census, CensusQuestion
from nemo_patches.stall.heartbeat import Heartbeat, period_for_s
from nemo_patches.stall.missing_query import Introduction, MissingQuery, Question, Surroundings
from nemo_patches.stall.peers import Listener, ask
from nemo_patches.stall.rank_text import SILENT
from nemo_patches.stall.wire import TOKEN_BYTES, Peer, encode_peers

TIMEOUT = 10.0
HEALTHY = 6.0  # seconds for which heartbeats alone are counted
MISSING = 5  # ranks whose heart has stopped
T = TypeVar("T")


@dataclass
class Traffic:
    requests: int = 0
    sent: int = 0
    received: int = 0


class Counted:
    """A store's connection that counts, as the runtime uses it."""

    def __init__(self, store: dist.Store, traffic: Traffic) -> None:
        self._store, self._traffic = store, traffic

    def _count(self, sent: int, received: int = 0) -> None:
        self._traffic.requests += 1  # of one thread at a time, near enough
        self._traffic.sent += sent
        self._traffic.received += received

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        self._count(len(key) + len(value.encode()))

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self._count(len(key), len(value))
        return value

    def add(self, key: str, amount: int) -> int:
        self._count(len(key) + 8, 8)
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        self._count(sum(map(len, keys)), 1)
        return bool(self._store.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        self._count(sum(map(len, keys)), sum(map(len, values)))
        return values


@dataclass(frozen=True)
class CountedConnection:
    """As channel/store.py's StoreConnection, without attempts."""

    part: Counted

    def check(self) -> None:
        pass

    def join(self, anew: bool) -> Counted:
        return self.part


@dataclass(frozen=True)
class CountedStore:
    """Stands for the job's store: every connection to it counts."""

    port: int
    traffic: Traffic

    def connect(self) -> CountedConnection:
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        return CountedConnection(Counted(store, self.traffic))


class SimulatedRank:
    """What a query needs of a rank, and its heartbeat."""

    def __init__(self, rank: int, size: int, port: int, traffic: Traffic) -> None:
        self.rank = rank
        client = store_client.StoreClient(CountedStore(port, traffic))  # type: ignore[arg-type]
        self.surroundings = Surroundings(rank, size, period_for_s(size), client, Introduction)
        self.heartbeat = self.heartbeat_of(rank)

    @staticmethod
    def heartbeat_of(rank: int) -> Heartbeat:
        where = "load (data/manifest.py:88) < __getitem__ (data/manifest.py:41) < main (train.py:120)"
        return Heartbeat(
            rank=rank,
            number=0,
            host=f"node-{rank // 8:03}",
            pid=100000 + rank,
            versions="nemo_patches 0.1.0, nemo 3.0.0",
            settings="sync=bounded, timeout=10 s, on_timeout=fallback, call_timeout=60 s, stall_port=on",
            phase="between encoder calls",
            encoder="ConformerEncoder",
            calls=1000,
            clock=(1000, 0),
            idle=6.0,
            rounds={"ConformerEncoder-0123456789abcdef-1": 7},
            where=where,
        )

    def announce(self) -> None:
        with self.surroundings.client.asking() as store:
            store_client.announce(store, self.heartbeat)

    def send(self, come_to: int) -> None:
        key = next(iter(self.heartbeat.rounds))
        self.heartbeat = replace(self.heartbeat, number=self.heartbeat.number + 1, rounds={key: come_to})
        with self.surroundings.client.asking() as store:
            store_client.send(store, self.heartbeat)


def serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def measure(size: int, port: int) -> str:
    """The traffic while all is well; of a report of a late round; and of a census, in a job that calls no encoder."""
    traffic = Traffic()
    ranks = [SimulatedRank(rank, size, port, traffic) for rank in range(size)]
    stopped = set(range(3, 3 + MISSING * 7, 7))
    for one in ranks:
        one.announce()
    come_to, ended = [7], threading.Event()

    def beat() -> None:
        while not ended.is_set():
            began = time.monotonic()
            for one in ranks:
                if one.rank not in stopped or come_to[0] == 7:
                    one.send(come_to[0])
                ended.wait(max(began + ranks[0].surroundings.period_s * (one.rank + 1) / size - time.monotonic(), 0.0))

    beating = threading.Thread(target=beat)
    beating.start()
    before = replace(traffic)
    time.sleep(HEALTHY)
    healthy = minus(traffic, before)
    come_to[0] = 8
    issued = time.monotonic()
    time.sleep(TIMEOUT / 2)
    for one in ranks:  # as a waiting rank does before it asks
        if one.rank not in stopped:
            one.send(8)
    before = replace(traffic)
    due = issued + TIMEOUT
    key = next(iter(ranks[0].heartbeat.rounds))
    question = Question(key, 8, due, 0, "benchmark")
    queries = [MissingQuery(one.surroundings, question) for one in ranks if one.rank not in stopped]
    done = seconds_until(queries, lambda query: query.done, due)
    report = minus(traffic, before)
    for query in queries:
        query.cancel()
    census_text = census([one for one in ranks if one.rank not in stopped], traffic, stopped)
    ended.set()
    beating.join()
    right = sum(
        one.done
        and {(absent.rank, absent.kind) for absent in one.answer().missing} == {(rank, SILENT) for rank in stopped}
        for one in queries
    )
    rate, both = healthy.requests / HEALTHY, (healthy.sent + healthy.received) / HEALTHY / 1024
    first, last = (f"{done[0]:.2f}", f"{done[-1]:.2f}") if done else ("none", "none")
    return (
        f"| {size} | {rate:.0f} | {both:.0f} | {report.requests} | {report.requests / size:.1f} | "
        f"{(report.sent + report.received) / 1024:.0f} | {first} | {last} | {right} of {len(queries)} {census_text}|"
    )


def census(ranks: list[SimulatedRank], traffic: Traffic, stopped: set[int]) -> str:
    """As stall/job_stall.py takes it: begun before it is due."""
    period_s = ranks[0].surroundings.period_s
    before, due = replace(traffic), time.monotonic() + 2 * period_s + 0.5
    censuses = [
        Census(CensusQuestion(one.surroundings, lambda one=one: replace(one.heartbeat, idle=60.0), due, 1.0))  # type: ignore[misc]
        for one in ranks
    ]
    done = seconds_until(censuses, lambda one: one.counted is not None, due)
    found = minus(traffic, before)
    right = sum(
        {rank for group in one.counted.groups if group.kind == SILENT for rank in group.ranks} == stopped
        for one in censuses
        if one.counted
    )
    last = f"{done[-1]:.2f}" if done else "none"
    return f"| {found.requests} | {(found.sent + found.received) / 1024:.0f} | {last} | {right} of {len(censuses)} "


def seconds_until(asked: Iterable[T], is_done: Callable[[T], bool], due: float) -> list[float]:
    """How long after `due` each was done; none for those that were not after 30 s."""
    done: list[float] = []
    pending = list(asked)
    while pending and time.monotonic() < due + 30:
        done += [time.monotonic() - due for one in pending if is_done(one)]
        pending = [one for one in pending if not is_done(one)]
        time.sleep(0.005)
    return done


def directly(size: int) -> str:
    """KiB that each rank reads once, of the others' addresses; and seconds in which one rank has asked them all."""
    listeners = [Listener(("127.0.0.1", 1)) for _ in range(size)]
    beat = SimulatedRank.heartbeat_of(0)
    token = secrets.token_bytes(TOKEN_BYTES)
    ended = threading.Event()

    def answer() -> None:
        while not ended.is_set():
            for rank, one in enumerate(listeners):
                one.answer(lambda rank=rank: replace(beat, rank=rank))  # type: ignore[misc]

    peers = {
        rank: Peer(f"node-{rank // 8:03}.cluster", 100000 + rank, "127.0.0.1", one.port)
        for rank, one in enumerate(listeners)
    }
    for one in listeners:
        one.introduce(peers, token)
        one.answer(lambda: beat)  # the others seem to be on other hosts: it opens its port to all interfaces now
    answering = threading.Thread(target=answer)
    answering.start()
    began = time.monotonic()
    found = ask(peers, token, 10.0, lambda: False)
    took = time.monotonic() - began
    ended.set()
    answering.join()
    for one in listeners:
        one.close()
    return f"| {len(encode_peers(peers, token)) / 1024:.1f} | {took:.2f} ({len(found)} of {size}) |"


def minus(one: Traffic, other: Traffic) -> Traffic:
    return Traffic(one.requests - other.requests, one.sent - other.sent, one.received - other.received)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    sizes = arguments.parse_args().ranks
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print("Healthy is per second; the report is in all, heartbeats included, and its seconds are after the timeout.")
    print(
        "| ranks | healthy: requests | KiB | report: requests | per rank | KiB | first, s | last, s | right | "
        "census: requests | KiB | last, s | right | "
        "addresses: KiB a rank | all asked directly, s |"
    )
    print("|---" * 15 + "|")
    for size in sizes:
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
        server.start()
        try:
            print(measure(size, ours.recv()) + directly(size)[1:], flush=True)
        finally:
            server.kill()
            server.join()


if __name__ == "__main__":
    main()
