"""The order of calls of several encoders: it differs between ranks, or one call of one encoder was left out."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from nemo_patches.text import named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.alignment import Whole
from nemo_patches.tools.diagnose.case import Case, outcomes_of
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding
from nemo_patches.tools.diagnose.rank_trace import TIMEOUT

_ALIKE_AFTER = 16  # calls


def swapped_order(cases: list[Case]) -> list[Finding]:
    """The first place where two successive calls are the other way round on some ranks.

    Only for ranks whose traces are complete from the start. A rank that makes one call more is no such case.
    """
    orders, at = _orders(cases)
    if at < 0:
        return []
    shortest = min(map(len, orders.values()))
    table = np.stack([order[:shortest] for order in orders.values()])
    by_pair: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, order in orders.items():
        by_pair[int(order[at]), int(order[at + 1])].append(rank)
    if len(by_pair) != 2 or len({frozenset(pair) for pair in by_pair}) != 1:
        return []
    # Where one rank calls an encoder once more, all calls after it are the other way round.
    counts = {tuple(np.bincount(order, minlength=len(cases)).tolist()) for order in orders.values()}
    if len(counts) > 1 and not (at + 2 < shortest and (table[:, at + 2] == table[0, at + 2]).all()):
        return []
    (fewer, odd), (more, usual) = sorted(by_pair.items(), key=lambda item: (len(item[1]), item[1]))
    first, second = cases[more[0]], cases[more[1]]
    equal = len(odd) == len(usual)
    theirs = f"{named(sorted(odd))} called {cases[fewer[0]].name} before {cases[fewer[1]].name}"
    severity = CRITICAL if TIMEOUT in outcomes_of(cases) else WARNING
    ranks = tuple(sorted(odd + usual if equal else odd))
    text = f"the ranks call their encoders in different orders: {theirs}, {named(sorted(usual))} {first.name} before "
    text += f"{second.name}, from encoder call {at + 1} of all on; then each waits in another length sync."
    next_step = "Look for what makes the order depend on the rank or its batch; every rank must call its encoders in "
    next_step += "one order."
    return [Finding(ids.DIFFERENT_ORDER, severity, ranks, text, next_step, first.name, at + 1)]


def skipped_call(cases: list[Case]) -> list[Finding]:
    """The first call of one of several encoders that some ranks left out, by its place among the other calls.

    None where it may as well be an extra call of another encoder.
    """
    orders, at = _orders(cases)
    if at < 0:
        return []
    by_encoder: dict[int, list[int]] = defaultdict(list)
    for rank, order in orders.items():
        by_encoder[int(order[at])].append(rank)
    if len(by_encoder) != 2:
        return []
    counts = {rank: np.bincount(order, minlength=len(cases)) for rank, order in orders.items()}
    groups = list(by_encoder.items())
    for (fewer, odd), (left_out, usual) in (groups, groups[::-1]):
        has_fewer = max(counts[rank][left_out] for rank in odd) < min(counts[rank][left_out] for rank in usual)
        has_more = max(counts[rank][fewer] for rank in odd) > min(counts[rank][fewer] for rank in usual)
        goes_on = all(_goes_on(orders[rank][at:], orders[usual[0]][at + 1 :]) for rank in odd)
        if has_fewer and not has_more and goes_on:
            return [_left_out(cases[left_out], int((orders[usual[0]][:at] == left_out).sum()) + 1, odd, usual)]
    return []


def _goes_on(order: Whole, usual: Whole) -> bool:
    """Whether both are the same for the next calls."""
    length = min(len(order), len(usual), _ALIKE_AFTER)
    return length > 0 and bool((order[:length] == usual[:length]).all())


def _left_out(case: Case, call: int, odd: list[int], usual: list[int]) -> Finding:
    text = f"{named(sorted(odd))} left out call {call} of {case.name}, which {named(sorted(usual))} made."
    next_step = "Look for what decides on this rank whether that encoder is called (a condition on the batch, a sample "
    next_step += "that could not be read): every rank must call it, or none."
    return Finding(ids.UNEVEN_CALLS, CRITICAL, tuple(sorted(odd)), text, next_step, case.name, call)


def _orders(cases: list[Case]) -> tuple[dict[int, Whole], int]:
    """By rank its _order(), and the first call in which the orders differ; -1 if none."""
    if len(cases) < 2:
        return {}, -1
    orders = {rank: order for rank in cases[0].job.traces if (order := _order(cases, rank)) is not None}
    shortest = min(map(len, orders.values()), default=0)
    if len(orders) < 2 or shortest < 2:
        return orders, -1
    table = np.stack([order[:shortest] for order in orders.values()])
    unlike = np.flatnonzero((table != table[0]).any(axis=0))
    return orders, int(unlike[0]) if len(unlike) and unlike[0] + 1 < shortest else -1


def _order(cases: list[Case], rank: int) -> Whole | None:
    """For each call of a rank, in order, the number of its case; None if its trace is incomplete."""
    tracks = [(number, case.tracks[rank]) for number, case in enumerate(cases) if rank in case.tracks]
    if any(track.calls.n and (track.calls.n[0] != 1 or track.damaged_at >= 0) for _, track in tracks):
        return None
    entered = np.concatenate([np.array(track.calls.entered) for _, track in tracks] or [np.zeros(0)])
    numbers = np.concatenate([np.full(len(track.calls.n), number) for number, track in tracks] or [np.zeros(0, int)])
    order: Whole = numbers[np.argsort(entered, kind="stable")]
    return order
