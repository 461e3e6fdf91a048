"""The exchange among hundreds of light ranks: not beside tests that wait, which so many processes
hold up.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from light_ranks import LONG, Rank, open_files, run
from ranks import wait_until

from nemo_patches.channel.rounds import RoundFailed

pytestmark = pytest.mark.one_nemo

SHORT = timedelta(seconds=0.4)
INNER, ROOT = 1, 0
MOST_FILES = 19  # the listener, one that wakes the thread, 16 children and the parent


@dataclass(frozen=True)
class Figures:
    """Of one of many ranks."""

    files: int  # that the exchange keeps open
    told_s: float  # from the last round until it knew of the death


def many_ranks(rank: Rank, late: int, victim: int) -> Figures:
    files = open_files()
    rank.meet("all are here")
    rank.hold_rounds(10)
    # Connections for joining close after 5 s.
    wait_until(lambda: open_files() - files <= MOST_FILES)
    if rank.number == late:
        rank.meet("the others gave up")
        rank.rounds.issue(rank.number)
    else:
        rank.rounds.issue(rank.number)
        assert rank.rounds.wait(SHORT) is None
        rank.meet("the others gave up")
    assert rank.rounds.wait(LONG) == rank.size - 1
    joined_files = open_files() - files
    rank.meet("in step")
    if rank.number == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RoundFailed, match=f"rank {victim} has ended"):
        rank.rounds.issue(rank.number)
        rank.rounds.wait(LONG)
    return Figures(joined_files, time.monotonic() - began)


MANY, MIB_PER_RANK = 128, 12  # benchmarks/rounds.py measures 1,024


@pytest.mark.parametrize("victim", [INNER, ROOT])
def test_many_ranks_connect_wait_for_a_late_one_and_are_told_of_a_death(
    victim: int,
) -> None:
    available = next(
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    if (mib := int(available.split()[1]) // 1024) < MANY * MIB_PER_RANK:
        pytest.skip(
            f"{MANY} ranks need {MANY * MIB_PER_RANK} MiB of memory, {mib} are free"
        )
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if 0 <= processes < 8 * MANY:
        pytest.skip(f"{MANY} ranks need more processes and threads than {processes}")
    ended = run(many_ranks, MANY, MANY - 1, victim, dies=(victim,), fan_out=16)
    figures = [rank.value for rank in ended if rank.value is not None]
    assert len(figures) == MANY - 1
    assert max(rank.files for rank in figures) <= MOST_FILES
    assert max(rank.told_s for rank in figures) < LONG.total_seconds() / 2
