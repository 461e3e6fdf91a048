"""Gradients that ranks accumulate over different numbers of calls: the calls drift apart, step by step."""

from __future__ import annotations

import numpy as np

from nemo_patches.text import named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.alignment import Floats, Whole
from nemo_patches.tools.diagnose.case import Case
from nemo_patches.tools.diagnose.findings import CRITICAL, Finding
from nemo_patches.tools.diagnose.rank_trace import BACKWARD, BACKWARD_ENDED

_LEAST_DRIFT = 2  # calls; ranks that reduce gradients at every call are never so far apart
_LEAST_STEPS = 3
_MOST_PER_STEP = 32


def unlike_accumulation(case: Case) -> list[Finding]:
    """Ranks under DDP that got more and more training calls ahead of others, each call with its backward.

    That is possible only if gradients are not reduced at every backward. The calls that the others had made at the
    beginning of each of a rank's steps show over how many calls each accumulates.
    """
    entered = {rank: times for rank in case.tracks if (times := _training_calls(case, rank)) is not None}
    if len(entered) < max(2, len(case.tracks)):
        return []
    until = min(float(times[-1]) for times in entered.values())
    slow = min(entered, key=lambda rank: int(np.searchsorted(entered[rank], until)))
    found = {rank: per_step for rank, times in entered.items() if (per_step := _per_step(entered[slow], times))}
    alike = set.intersection(*map(set, found.values())) if found else set()
    if not alike:
        return []
    begin, (fewer, more) = min((max(per_step[pair] for per_step in found.values()), pair) for pair in alike)
    fast = sorted(found)
    rest = sorted(entered.keys() - found.keys())
    if any(len(_drifted(entered[slow], entered[rank])[1]) for rank in rest):
        return []
    odd = min(rest, fast, key=len)
    reduce = "reduces its" if len(rest) == 1 else "reduce their"
    ranks = tuple(odd) if len(rest) != len(fast) else ()
    text = f"{named(rest)} {reduce} gradients after every {_calls(fewer)} of {case.name}, {named(fast)} after every "
    text += f"{_calls(more)}: they accumulate them over unlike numbers of batches."
    next_step = "Give every rank the same accumulate_grad_batches, a scheduler of it and what leaves `no_sync` "
    next_step += "included: at each step ranks wait until the length sync gives up, and at the last one for ever."
    return [Finding(ids.UNEVEN_CALLS, CRITICAL, ranks, text, next_step, case.name, begin + fewer + 1)]


def _training_calls(case: Case, rank: int) -> Floats | None:
    """When a rank entered each training call, by a common clock; None if its calls cannot be compared."""
    track = case.tracks[rank]
    calls = track.calls
    if not calls.n or calls.n[0] != 1 or track.damaged_at >= 0 or not track.info.ddp:
        return None
    training = np.array(calls.training) == 1
    backward = np.array(calls.backward)[training]
    if not len(backward) or not np.isin(backward[:-1], (BACKWARD, BACKWARD_ENDED)).all():
        return None
    entered: Floats = np.array(calls.entered)[training]
    if case.tracks.keys() <= case.clocks.knots.keys():
        return case.clocks.all_common(rank, entered)
    headers = {other: case.job.traces[other].header for other in case.tracks}
    is_one_host = len({header.host for header in headers.values()}) == 1
    return entered + headers[rank].started if is_one_host else None


def _per_step(own: Floats, theirs: Floats) -> dict[tuple[int, int], int]:
    """Over how many calls this and the other rank may accumulate, with the call from which on; empty if alike.

    If several fit, the smallest of those that fit the longest is meant: its multiples fit as well.
    """
    made, drifted = _drifted(own, theirs)
    found: dict[tuple[int, int], int] = {}
    if not len(drifted):
        return found
    for begin in range(max(0, int(drifted[0]) - 2 * _MOST_PER_STEP), int(drifted[0]) + 1):
        for size in range(1, _MOST_PER_STEP + 1):
            at_steps = made[begin + size :: size] - begin
            steps = np.arange(1, len(at_steps) + 1)
            if len(steps) < _LEAST_STEPS:
                break
            other_size = round(int(at_steps[-1]) / len(steps))
            if (other_size - size) * len(steps) >= _LEAST_DRIFT and np.isin(
                at_steps - other_size * steps, (0, 1)
            ).all():
                found.setdefault((size, other_size), begin)
    return found


def _drifted(own: Floats, theirs: Floats) -> tuple[Whole, Whole]:
    """How many calls the other rank had made when this one entered each of its own; where it was ahead."""
    made: Whole = np.searchsorted(theirs, own[own <= theirs[-1]])
    return made, np.flatnonzero(made - np.arange(len(made)) >= _LEAST_DRIFT)


def _calls(number: int) -> str:
    return "call" if number == 1 else f"{number} calls"
