"""Format rank lists, kinds of missing ranks and other words for log lines; needs no torch, so tools use it too."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from ..sync.protocol import APART

ELSEWHERE = "elsewhere"  # it is alive, and not in the others' call
SILENT = "no heartbeat"  # it does not answer
GONE = "its process has gone"  # why it does not answer, if that is known
LEFT = "left"  # it has ended, or destroyed its process group
UNANNOUNCED = "unannounced"  # no sign of nemo_patches
LATE = "late"  # it has not come, or came after the others gave up; not known more exactly
EVALUATED = "evaluation ended"  # it had fewer batches than the others, which need not wait for it
# Activities that end by themselves, or may:
CHECKPOINT, DEBUGGER, COMPILATION, EXPORT = "a checkpoint", "a debugger", "a compilation", "an export"
PERHAPS = "perhaps "  # how a guess begins
LENGTH_SYNC = "length sync"  # what a rank may wait in, as any collective
ROUNDS_OF = "the rounds of "  # how the name of other rounds begins
KINDS = (ELSEWHERE, SILENT, LEFT, UNANNOUNCED, LATE, EVALUATED, *APART)


def is_guess(collective: str) -> bool:
    """Whether this is only a guess, from a method's name."""
    return collective.startswith(PERHAPS)


def ranges(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Ranks in rising order as (first, last) of each run."""
    runs = []
    for _, pairs in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in pairs]
        runs.append((run[0], run[-1]))
    return runs


def named(ranks: Iterable[int]) -> str:
    """Format ranks in rising order, at least one: "rank 1", "ranks 2, 5-7"."""
    text = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges(ranks))
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
