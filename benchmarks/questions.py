"""What a question about where all ranks are costs, and how soon every rank has the answer: real
processes, no NeMo.

Each rank is a process with a real store and an exchange, and answers with watch/'s own states.
Hosts have eight ranks. Prints, for each size, the seconds until the last living rank had the
verdict: where one rank asks, where all ask at once, and where one asks of a job in which ranks are
stopped; and what goes over all connections at rest.

    PYTHONPATH=tests python benchmarks/questions.py [--ranks 64 1024]
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from light_ranks import LONG, Rank, run  # of tests/

from nemo_patches.channel.answers import Answers
from nemo_patches.facts import RankFacts

REPEATS = 3
QUIET_S = 6.0  # the first connections close after 5 s
PAUSE_S = 1.0
PER_HOST = 8
FAN_OUT = 16  # as in jobs
STATE = RankFacts(
    *(0, "node1", 4711, "nemo_patches 0, nemo 3.0.0", "sync=bounded, timeout=10 s"),
    *("ConformerEncoder", 41, (41, 0), 60.0, {"lengths": 41}),
    collective="DDP's buffer broadcast",
    caller="train (train.py:88)",
    still=60.0,
)
STOPPED: dict[str, Callable[[int], list[int]]] = {
    "a leaf": lambda size: [size - 1],
    "an inner rank": lambda size: [PER_HOST if size > PER_HOST else 1],
    "the root": lambda size: [0],
    "the root's host": lambda size: list(range(PER_HOST)) if size > PER_HOST else [],
}


class States:
    """One rank's part in questions: one of three places, by host, and a few ranks that have come to
    fewer rounds.
    """

    def __init__(self, rank: int) -> None:
        caller = f"train (train.py:{88 + rank // 32 % 3})"
        rounds = {"lengths": 40 if rank % 100 == 7 else 41}
        self._state = replace(STATE, rank=rank, caller=caller, rounds=rounds)
        self.verdicts = queue.SimpleQueue[Any]()

    def asked(self, id_: str, reply: Callable[[str, Any, float], None]) -> None:
        reply(self._state.key(), self._state.to_json(), 60.0)

    def judge(self, found: dict[str, Any], reply: Callable[[Any], None]) -> None:
        reply(found)

    def told(self, id_: str, verdict: Any) -> None:
        self.verdicts.put(verdict)


def measured(rank: Rank) -> dict[str, list[tuple[float, float]]]:
    """By what was tried: when this rank asked (0: it did not) and when it knew, by the clock of all
    processes.
    """
    socket.gethostname = lambda: f"node{rank.number // PER_HOST}"
    states = States(rank.number)
    rank.exchange.watch = states
    rank.exchange.start()
    while not rank.exchange.is_whole:
        time.sleep(0.01)
    rank.store.set(f"pid {rank.number}", str(os.getpid()))
    rank.meet("whole")
    time.sleep(QUIET_S)
    sent_before = sent_bytes(rank)
    time.sleep(QUIET_S)
    found = {"bytes while nobody asks": [(0.0, sent_bytes(rank) - sent_before)]}
    asker = 3 * rank.size // 4
    for way, askers in (("one asks", {asker}), ("all ask", set(range(rank.size)))):
        found[way] = []
        for repeat in range(REPEATS):
            rank.meet(f"{way} {repeat}")
            found[way].append(ask_and_wait(rank, states, askers, set()))
    for way, stopped_of in STOPPED.items():
        stopped = stopped_of(rank.size)
        if not stopped:
            continue
        rank.meet(f"{way} is about to be stopped")
        living = rank.size - len(stopped)
        if rank.number in stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            pids = [int(rank.store.get(f"pid {one}")) for one in stopped]
            for pid in pids:
                while (
                    Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                    != "T"
                ):
                    time.sleep(0.01)
            while not states.verdicts.empty():
                states.verdicts.get()
            rank.meet(f"{way} is stopped", living)
            found[way] = [ask_and_wait(rank, states, {asker}, set(stopped))]
            rank.meet(f"all know of {way}", living)
            if rank.number == asker:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
        rank.meet(f"{way} goes on")
        # The stopped ranks' answers come late, and are taken for what they are.
        time.sleep(PAUSE_S)
        rank.meet(f"{way} has gone on")
    return found


def ask_and_wait(
    rank: Rank, states: States, askers: set[int], silent: set[int]
) -> tuple[float, float]:
    asked = 0.0
    if rank.number in askers:
        # The others have come to their waits, and questions that follow at once are held apart.
        time.sleep(PAUSE_S)
        asked = time.monotonic()
        rank.exchange.ask()
    while (
        heard(states.verdicts.get(timeout=LONG.total_seconds()))
        != set(range(rank.size)) - silent
    ):
        pass
    return asked, time.monotonic()


def heard(verdict: Any) -> set[int]:
    answers = Answers()
    answers.add_json(verdict)
    return answers.heard


def sent_bytes(rank: Rank) -> float:
    """Over this rank's connections, as the kernel counts (tcpi_bytes_acked)."""
    total = 0
    for link in list(rank.exchange._all_links):
        information = link.socket.getsockopt(6, 11, 192)  # IPPROTO_TCP, TCP_INFO
        total += int.from_bytes(information[120:128], "little")
    return float(total)


def main() -> None:
    import questions  # under its name, by which the ranks' processes find it

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[8, 64, 1024], metavar="RANKS"
    )
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    ways = ("one asks", "all ask", *STOPPED)
    print(
        "| ranks |"
        f" {' | '.join(f'{way} stopped' if way in STOPPED else way for way in ways)} |"
        " bytes at rest |"
    )
    print("|---|" + "---|" * (len(ways) + 1))
    for size in parser.parse_args().ranks:
        ranks = [one.value for one in run(questions.measured, size, fan_out=FAN_OUT)]

        def last(
            way: str, ranks: list[dict[str, list[tuple[float, float]]]] = ranks
        ) -> str:
            """From the first question to the last rank's answer; of several times the median, and
            the longest.
            """
            times = []
            for each in zip(*(rank[way] for rank in ranks if way in rank), strict=True):
                times.append(
                    max(knew for _, knew in each)
                    - min(asked for asked, _ in each if asked)
                )
            if not times:
                return "-"
            return f"{statistics.median(times):.3f}" + (
                f" ({max(times):.3f})" if len(times) > 1 else ""
            )

        quiet = sum(rank["bytes while nobody asks"][0][1] for rank in ranks)
        print(f"| {size} | {' | '.join(map(last, ways))} | {quiet:g} |", flush=True)


if __name__ == "__main__":
    main()
