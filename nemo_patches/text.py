"""Words for people: another process's text or an error in one line, lists of ranks. No torch."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterable

FEW_RANKS = 8  # each of them logs all; of more, one does for the others


def safe(text: str, longest: int = 600) -> str:
    """Text of another rank, of the store or of a file, as it may be printed: in one line.

    Without control characters and what reorders or hides others, and with at most so many
    characters.
    """
    characters = text[:longest]
    return "".join(one if one.isprintable() else "?" for one in characters)


def first_line(error: BaseException) -> str:
    """An error in one line: torch's go on with a C++ stack."""
    name = type(error).__name__
    text = str(error).strip()
    if not text:
        return name
    return f"{name}: {safe(text.splitlines()[0])}"


def ranges(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Ranks in rising order as (first, last) of each run."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def named(ranks: Iterable[int]) -> str:
    """Ranks, at least one: "rank 1", "ranks 2, 5-7"."""
    parts = []
    for first, last in ranges(sorted(ranks)):
        parts.append(f"{first}-{last}" if last > first else str(first))
    text = ", ".join(parts)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
