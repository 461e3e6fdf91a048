"""Format rank lists, kinds of missing ranks and errors for log lines; needs no torch, so tools use it too."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from ..channel.safe_text import safe
from ..sync.protocol import APART

ELSEWHERE = "elsewhere"  # its heart beats: it is alive, and not in the call that the others are in
SILENT = "no heartbeat"
LEFT = "left"  # it has ended, or destroyed its process group
UNANNOUNCED = "unannounced"  # no sign of nemo_patches
LATE = "late"  # it has not come, or came after the others gave up; not known more exactly
EVALUATED = "evaluation ended"  # it has had fewer batches of it than the others; nobody is to wait for it
KINDS = (ELSEWHERE, SILENT, LEFT, UNANNOUNCED, LATE, EVALUATED, *APART)


def first_line(error: BaseException) -> str:
    """An error in one line: torch's go on with a C++ stack."""
    text = str(error).strip()
    return f"{type(error).__name__}: {safe(text.splitlines()[0])}" if text else type(error).__name__


def ranges(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Ranks in rising order as (first, last) of each run."""
    runs = []
    for _, pairs in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in pairs]
        runs.append((run[0], run[-1]))
    return runs


def named(ranks: Iterable[int]) -> str:
    """Ranks in rising order, at least one, as a person reads them: "rank 1", "ranks 2, 5-7"."""
    text = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges(ranks))
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
