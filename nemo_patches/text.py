"""Words for people: another process's text in one line, an error in one line, lists of ranks. Needs no torch."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def safe(text: str, longest: int = 600) -> str:
    """Text of another rank, of the store or of a file, as it may be printed: in one line.

    Without control characters and what reorders or hides others, and with at most so many characters.
    """
    return "".join(character if character.isprintable() else "?" for character in text[:longest])


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
    """Format ranks in rising order, at least one: "rank 1", "ranks 2, 5-7"."""
    text = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges(ranks))
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
