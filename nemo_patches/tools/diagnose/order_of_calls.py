"""The verdict on swapped order: ranks that call their encoders in different orders wait for each other in vain."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from nemo_patches.stall.rank_text import named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.alignment import Whole
from nemo_patches.tools.diagnose.case import Case
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding
from nemo_patches.tools.diagnose.rank_trace import TIMEOUT


def swapped_order(cases: list[Case]) -> list[Finding]:
    """The first place where two calls that follow each other are the other way round on some ranks.

    Of ranks whose traces are whole from the start. A rank that makes one call more is no such case.
    """
    if len(cases) < 2:
        return []
    orders = {rank: order for rank in cases[0].job.traces if (order := _order(cases, rank)) is not None}
    shortest = min(map(len, orders.values()), default=0)
    if len(orders) < 2 or shortest < 2:
        return []
    table = np.stack([order[:shortest] for order in orders.values()])
    unlike = np.flatnonzero((table != table[0]).any(axis=0))
    if not len(unlike) or unlike[0] + 1 >= shortest:
        return []
    at = int(unlike[0])
    by_pair: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, order in orders.items():
        by_pair[int(order[at]), int(order[at + 1])].append(rank)
    if len(by_pair) != 2 or len({frozenset(pair) for pair in by_pair}) != 1:
        return []
    # Where one rank calls an encoder once more, the calls after it are the other way round as well, but more.
    counts = {tuple(np.bincount(order, minlength=len(cases)).tolist()) for order in orders.values()}
    if len(counts) > 1 and not (at + 2 < shortest and (table[:, at + 2] == table[0, at + 2]).all()):
        return []
    (fewer, odd), (more, usual) = sorted(by_pair.items(), key=lambda item: (len(item[1]), item[1]))
    first, second = cases[more[0]], cases[more[1]]
    equal = len(odd) == len(usual)
    theirs = f"{named(sorted(odd))} called {cases[fewer[0]].name} before {cases[fewer[1]].name}"
    in_vain = any(TIMEOUT in track.calls.outcome for case in cases for track in case.tracks.values())
    return [
        Finding(
            id=ids.DIFFERENT_ORDER,
            severity=CRITICAL if in_vain else WARNING,
            ranks=tuple(sorted(odd + usual if equal else odd)),
            text=f"the ranks call their encoders in different orders: {theirs}, {named(sorted(usual))} {first.name} "
            f"before {second.name}, from encoder call {at + 1} of all on; then each waits in another length sync.",
            next_step="Look for what makes the order depend on the rank or its batch; every rank must call its "
            "encoders in one order.",
            encoder=first.name,
            call=at + 1,
        )
    ]


def _order(cases: list[Case], rank: int) -> Whole | None:
    """The number of the case of each call of a rank, in the order of the calls; None if its trace is not whole."""
    tracks = [(number, case.tracks[rank]) for number, case in enumerate(cases) if rank in case.tracks]
    if any(track.calls.n and (track.calls.n[0] != 1 or track.damaged_at >= 0) for _, track in tracks):
        return None
    entered = np.concatenate([np.array(track.calls.entered) for _, track in tracks] or [np.zeros(0)])
    numbers = np.concatenate([np.full(len(track.calls.n), number) for number, track in tracks] or [np.zeros(0, int)])
    order: Whole = numbers[np.argsort(entered, kind="stable")]
    return order
