"""Write the traces of the job that the README shows: eight simulated ranks, one late once and then
stuck.

    python docs/programs/stalled_job.py DIR

`make pictures` shows them in a browser. The ranks run the real protocol in simulated time
(tests/simulated_job.py).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from simulated_job import Call, Event, Gradients, steps
from simulated_traces import write

RANKS, STUCK_RANK = 8, 5
LATE_AT, STUCK_AT = 38, 71  # numbers of the training call
LATE_S = 26.0


def schedule(rank: int, draw: random.Random) -> list[Event]:
    if rank != STUCK_RANK:
        return [
            event
            for _ in range(STUCK_AT)
            for event in steps(1, pause=draw.uniform(0.1, 0.16))
        ]
    usual = [
        event
        for _ in range(STUCK_AT - 2)
        for event in steps(1, pause=draw.uniform(0.1, 0.35))
    ]
    return [
        *usual[: 2 * (LATE_AT - 1)],
        Call(pause=LATE_S),
        Gradients(),
        *usual[2 * (LATE_AT - 1) :],
    ]


def schedules() -> list[list[Event]]:
    draw = random.Random(0)
    return [schedule(rank, draw) for rank in range(RANKS)]


if __name__ == "__main__":
    write(Path(sys.argv[1]), schedules())
