"""What a question about where all ranks are costs, and how soon every rank has the answer: real processes, no NeMo.

Each rank is a process with a real store and both trees of the side channel, and answers with stall/'s own states.
Prints, for each size, the seconds until the last rank had the verdicts of both trees: where one rank asks, where all
ask at once, and where one asks of a job in which a rank is stopped; and what goes over all connections
while nobody asks.

    PYTHONPATH=tests python benchmarks/surveys.py [--ranks 64 1024]
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from light_ranks import LONG, Rank, run  # of tests/

from nemo_patches.channel.side_channel import SideChannel
from nemo_patches.channel.store import JobStore
from nemo_patches.channel.survey import Verdict, combined
from nemo_patches.stall.rank_state import RankState, answer_of, merged

REPEATS = 3
QUIET_S = 3.0
PAUSE_S = 3.0
FAN_OUT = 16  # as in jobs
STATE = RankState(
    *(0, "node1", 4711, "nemo_patches 0, nemo 3.0.0", "sync=bounded, timeout=10 s", "between encoder calls"),
    *("ConformerEncoder", 41, (41, 0), 60.0, {"ConformerEncoder #1": 41}),
    collective="DDP's buffer broadcast",
    caller="train (train.py:88)",
    still=60.0,
)


class States:
    """One rank's part in surveys: one of three places, by host, and a few ranks that have come to fewer rounds."""

    def __init__(self, rank: int) -> None:
        caller = f"train (train.py:{88 + rank // 32 % 3})"
        rounds = {"ConformerEncoder #1": 40 if rank % 100 == 7 else 41}
        self.answer = answer_of(replace(STATE, rank=rank, caller=caller, rounds=rounds))
        self.verdicts = queue.SimpleQueue[Verdict]()

    def asked(self, id_: str, reply: Callable[[Any], None]) -> None:
        reply(self.answer)

    def merge(self, answers: list[Any]) -> Any:
        return merged(answers)

    def told(self, verdict: Verdict) -> None:
        self.verdicts.put(verdict)


def measured(rank: Rank) -> dict[str, list[tuple[float, float]]]:
    """By what was tried: when this rank asked (0: it did not) and when it knew, by the clock of all processes."""
    states = States(rank.number)
    rank.channel = SideChannel(JobStore(rank.store, rank.number), rank.number, rank.size, rank.said.append)  # type: ignore[misc]
    assert rank.channel.take_surveys(states)
    while not rank.channel.is_whole:
        time.sleep(0.01)
    rank.meet("whole")
    sent_before = sent_bytes(rank)
    time.sleep(QUIET_S)
    found = {"bytes while nobody asks": [(0.0, sent_bytes(rank) - sent_before)]}
    asker = 3 * rank.size // 4
    for way, askers in (("one asks", {asker}), ("all ask", set(range(rank.size)))):
        found[way] = []
        for repeat in range(REPEATS):
            rank.meet(f"{way} {repeat}")
            found[way].append(ask_and_wait(rank, states, askers, set()))
    victim = min(1, rank.size - 2)  # an inner rank of the first tree
    if rank.number == victim:
        rank.store.set("victim", str(os.getpid()))
        rank.meet("one is stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
        rank.meet("the end")
        return found
    rank.meet("one is stopped")
    pid = int(rank.store.get("victim"))
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    while not states.verdicts.empty():
        states.verdicts.get()
    rank.meet("it is stopped", rank.size - 1)
    found["one asks, one is stopped"] = [ask_and_wait(rank, states, {asker}, {victim})]
    rank.meet("all know", rank.size - 1)
    if rank.number == 0:
        os.kill(pid, signal.SIGCONT)
    rank.meet("the end")
    return found


def ask_and_wait(rank: Rank, states: States, askers: set[int], silent: set[int]) -> tuple[float, float]:
    asked = 0.0
    if rank.number in askers:
        time.sleep(PAUSE_S)  # the others have come to their waits, and surveys that follow at once are held apart
        asked = time.monotonic()
        rank.channel.ask()
    wait_for_all(rank, states, silent)
    return asked, time.monotonic()


def wait_for_all(rank: Rank, states: States, but: set[int]) -> None:
    """Until all others are heard: by both trees, or in place of whom a stopped rank hides by the other one."""
    latest: dict[bool, Verdict] = {}
    trees = 1 if but else 2
    while len(latest) < trees or combined(latest.values(), rank.size, merged).heard != set(range(rank.size)) - but:
        verdict = states.verdicts.get(timeout=LONG.total_seconds())
        latest[verdict.is_mirrored] = verdict


def sent_bytes(rank: Rank) -> float:
    """Over this rank's connections in both trees, as the kernel counts (tcpi_bytes_acked)."""
    total = 0
    for links in rank.channel._trees:
        for connection in links.connections.values():
            information = connection.socket.getsockopt(6, 11, 192)  # IPPROTO_TCP, TCP_INFO
            total += int.from_bytes(information[120:128], "little")
    return float(total)


def main() -> None:
    import surveys  # under its name, by which the ranks' processes find it

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 1024], metavar="RANKS")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    print("| ranks | one asks, s | all ask, s | one asks, an inner rank stopped, s | bytes while nobody asks |")
    print("|---|---|---|---|---|")
    for size in parser.parse_args().ranks:
        ranks = [one.value for one in run(surveys.measured, size, fan_out=FAN_OUT)]

        def last(way: str, ranks: list[dict[str, list[tuple[float, float]]]] = ranks) -> str:
            """From the first question to the last rank's answer; of several times the median, and the longest."""
            times = []
            for each in zip(*(rank[way] for rank in ranks if way in rank), strict=True):
                times.append(max(knew for _, knew in each) - min(asked for asked, _ in each if asked))
            return f"{statistics.median(times):.3f}" + (f" ({max(times):.3f})" if len(times) > 1 else "")

        quiet = sum(rank["bytes while nobody asks"][0][1] for rank in ranks)
        ways = ("one asks", "all ask", "one asks, one is stopped")
        print(f"| {size} | {' | '.join(map(last, ways))} | {quiet:g} |", flush=True)


if __name__ == "__main__":
    main()
