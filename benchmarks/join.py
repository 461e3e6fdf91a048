"""What rank 0 spends on a join, a question and a round, for thousands of ranks: no NeMo.

Rank 0 is a process with a store and its real exchange. All others are bare connections of one other
process: each registers, and those that are rank 0's children in the tree answer for all below them.
Hosts have eight ranks.

    PYTHONPATH=. python benchmarks/join.py [--ranks 256 1024 4096]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import queue
import random
import resource
import selectors
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_patches.channel import meeting
from nemo_patches.channel.answers import Answers, runs_of
from nemo_patches.channel.exchange import Exchange
from nemo_patches.channel.link import (
    ANSWER,
    DOWN,
    HERE,
    QUESTION,
    RANKS,
    REGISTER,
    UP,
    Link,
    Message,
)
from nemo_patches.channel.meeting import Member
from nemo_patches.channel.rounds import Rounds

PER_HOST = 8
REPEATS = 20  # questions, and rounds
GAP_S = 0.5  # questions that follow at once are held apart
LIMIT_S = 300.0
STATE = {"asks": True, "calls": 41, "caller": "train (train.py:88)", "still": 60.0}
ROUNDS = "encoder"


def host_of(rank: int) -> str:
    return f"node-{rank // PER_HOST:04}"


class Watch:
    """Rank 0's part in questions."""

    def __init__(self) -> None:
        self.verdicts = queue.SimpleQueue[Any]()

    def asked(self, id_: str, reply: Callable[[str, Any, float], None]) -> None:
        reply("0", STATE, 60.0)

    def judge(self, found: dict[str, Any], reply: Callable[[Any], None]) -> None:
        reply(found)

    def told(self, id_: str, verdict: Any) -> None:
        self.verdicts.put(verdict)


class Others:
    """All ranks but 0."""

    def __init__(self, port: int, size: int) -> None:
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False
        )
        parents = meeting.parents_of([host_of(rank) for rank in range(size)])
        self._below: dict[int, set[int]] = {rank: {rank} for rank in range(size)}
        for rank in range(size - 1, 0, -1):
            self._below[parents[rank]] |= self._below[rank]
        self._children = {rank for rank in range(size) if parents[rank] == 0}
        self._selector = selectors.EpollSelector()
        self._chance = random.Random(56)
        while (root := meeting.find_root(store)) is None:
            time.sleep(0.01)
        self._root, self._token = root
        self._links: set[Link] = set()
        for rank in range(1, size):
            self._register(rank)

    def _register(self, rank: int) -> None:
        link = Link.opened("127.0.0.1", self._root.port, rank, 0, self._token)
        link.rank = rank  # whose it is; the other end is rank 0
        address = f"10.{rank // PER_HOST >> 8}.{rank // PER_HOST & 255}.1"
        port, pid = (
            self._chance.randrange(32768, 61000),
            self._chance.randrange(1 << 22),
        )
        member = Member(host_of(rank), address, port, pid)
        link.tell(REGISTER, {"member": member.to_json()})
        link.is_ready = True  # whatever rank 0 proves
        self._links.add(link)
        events = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.register(link.socket, events, link)

    def serve(self, control: Connection) -> None:
        """Until rank 0 says so; it also says when all but its children may go."""
        self._selector.register(control, selectors.EVENT_READ, None)
        while True:
            for entry, events in self._selector.select():
                link = entry.data
                if link is None:
                    if control.recv() == "end":
                        return
                    self._leave()
                    continue
                if events & selectors.EVENT_WRITE:
                    link.flush()
                    if not link.waits:
                        self._selector.modify(link.socket, selectors.EVENT_READ, link)
                if events & selectors.EVENT_READ and not link.is_lost:
                    self._read(link)

    def _leave(self) -> None:
        for link in [one for one in self._links if one.rank not in self._children]:
            self._close(link)

    def _close(self, link: Link) -> None:
        self._links.discard(link)
        self._selector.unregister(link.socket)
        link.socket.close()

    def _read(self, link: Link) -> None:
        messages = link.receive()
        if messages is None:
            self._close(link)
        elif link.rank in self._children:
            for message in messages:
                self._answer(link, message)

    def _answer(self, link: Link, message: Any) -> None:
        if message.kind == RANKS:
            link.send(UP, KEY, 1, link.rank)
        elif message.kind == DOWN:
            link.send(UP, KEY, message.number + 1, link.rank)
        elif message.kind == QUESTION:
            id_ = message.content()["id"]
            link.tell(HERE, {"id": id_})
            group = ["0", runs_of(self._below[link.rank]), 60.0, STATE]
            link.tell(ANSWER, {"id": id_, "groups": [group], "silent": []})


KEY = Exchange(lambda: None, 0, 2, print).rounds(ROUNDS).key


def others(port: int, size: int, control: Connection) -> None:
    Others(port, size).serve(control)


def measured(size: int) -> list[str]:
    """A row of the table."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    socket.gethostname = lambda: host_of(0)
    exchange = Exchange(lambda: store, 0, size, print)
    exchange.watch = watch = Watch()
    rounds = exchange.rounds(ROUNDS)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=others, args=(store.port, size, theirs), daemon=True
    )
    exchange.start()
    process.start()
    wait_until(lambda: any(exchange.members[1:]))
    began = time.monotonic()
    cpu_s = thread_cpu_s(exchange)
    wait_until(
        lambda: (
            exchange.is_joined
            and not any(link.waits for link in list(exchange._all_links))
        )
    )
    joined_s = time.monotonic() - began
    row = [f"{joined_s:.2f}", f"{thread_cpu_s(exchange) - cpu_s:.2f}"]
    row += [f"{len(exchange._all_links):,}", f"{sent_mib(exchange):.1f}"]
    ours.send("leave")
    wait_until(lambda: len(exchange._all_links) <= meeting.FAN_OUT)
    row += [of_several(lambda: question(exchange, watch), GAP_S)]
    row += [of_several(lambda: one_round(rounds))]
    row += [pass_on_ms(exchange)]
    ours.send("end")
    process.join()
    exchange.close()
    return row


def question(exchange: Exchange, watch: Watch) -> None:
    exchange.ask()
    answers = Answers()
    answers.add_json(watch.verdicts.get(timeout=LIMIT_S))
    assert len(answers.heard) == exchange.size, answers.silent


def one_round(rounds: Rounds) -> None:
    rounds.issue(0)
    while rounds.poll() is None:
        pass


def of_several(what: Callable[[], None], pause_s: float = 0.0) -> str:
    """Median milliseconds, and the longest."""
    what()  # the first one
    times = []
    for _ in range(REPEATS):
        time.sleep(pause_s)
        began = time.monotonic()
        what()
        times.append(1e3 * (time.monotonic() - began))
    return f"{statistics.median(times):.2f} ({max(times):.2f})"


def pass_on_ms(exchange: Exchange) -> str:
    """What any rank does with the list: read it, and find the tree."""
    body = meeting.packed(filter(None, exchange.members))
    began = time.monotonic()
    columns = Message(RANKS, 0, 0, 0, body).content()["members"]
    members = [Member.from_json(one) for one in zip(*columns, strict=True)]
    hosts = [member.host for member in members]
    meeting.parents_of(hosts)
    meeting.succession_of(hosts)
    return f"{1e3 * (time.monotonic() - began):.0f} | {len(body) / 1024:.0f}"


def sent_mib(exchange: Exchange) -> float:
    """Over all connections, as the kernel counts (tcpi_bytes_acked)."""
    total = 0
    for link in list(exchange._all_links):
        with contextlib.suppress(OSError):
            information = link.socket.getsockopt(6, 11, 192)  # IPPROTO_TCP, TCP_INFO
            total += int.from_bytes(information[120:128], "little")
    return total / (1 << 20)


def thread_cpu_s(exchange: Exchange) -> float:
    thread = exchange._thread
    assert thread is not None
    stat = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
    return int(stat.split()[0]) / 1e9


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[256, 1024, 4096])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(
        "| ranks | join, s | of it rank 0's CPU, s | connections | MiB sent"
        " | question, ms | round, ms | list read, ms | its KiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for size in parser.parse_args().ranks:
        print(f"| {size:,} | {' | '.join(measured(size))} |", flush=True)


if __name__ == "__main__":
    main()
