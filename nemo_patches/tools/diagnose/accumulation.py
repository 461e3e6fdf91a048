"""The verdict on gradients that ranks accumulate over unlike numbers of calls: the calls drift apart, step by step."""

from __future__ import annotations

import numpy as np

from nemo_patches.stall.rank_text import named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.alignment import Floats
from nemo_patches.tools.diagnose.case import Case
from nemo_patches.tools.diagnose.findings import CRITICAL, Finding
from nemo_patches.tools.diagnose.rank_trace import BACKWARD, BACKWARD_ENDED

_LEAST_DRIFT = 2  # calls; under DDP, ranks that reduce the gradients of every call are never so far apart
_LEAST_STEPS = 3
_MOST_PER_STEP = 64


def unlike_accumulation(case: Case) -> list[Finding]:
    """Ranks under DDP that made more and more training calls than others, each call with its backward.

    Only gradients that are not reduced at every backward let them. How many calls the others have made when a rank
    begins each of its steps tells over how many calls each accumulates.
    """
    entered = {rank: times for rank in case.tracks if (times := _training_calls(case, rank)) is not None}
    if len(entered) < max(2, len(case.tracks)):
        return []
    until = min(float(times[-1]) for times in entered.values())
    slow = min(entered, key=lambda rank: int(np.searchsorted(entered[rank], until)))
    found = {rank: per_step for rank, times in entered.items() if (per_step := _per_step(entered[slow], times))}
    if len(set(found.values())) != 1:
        return []
    fewer, more = next(iter(found.values()))
    fast = sorted(found)
    rest = sorted(entered.keys() - found.keys())
    odd = min(rest, fast, key=len)
    return [
        Finding(
            id=ids.UNEVEN_CALLS,
            severity=CRITICAL,
            ranks=tuple(odd) if len(rest) != len(fast) else (),
            text=f"{named(rest)} {_reduces(rest)} gradients after every {_calls(fewer)} of {case.name}, "
            f"{named(fast)} after every {_calls(more)}: they accumulate them over unlike numbers of batches.",
            next_step="Give every rank the same accumulate_grad_batches, a scheduler of it and what leaves `no_sync` "
            "included: at each step ranks wait until the length sync gives up, and at the last one for ever.",
            encoder=case.name,
            call=fewer + 1,
        )
    ]


def _training_calls(case: Case, rank: int) -> Floats | None:
    """When a rank entered each training call, on the common scale; None where the drift of its calls tells nothing."""
    track = case.tracks[rank]
    calls = track.calls
    if not calls.n or calls.n[0] != 1 or track.damaged_at >= 0 or not track.info.ddp:
        return None
    training = np.array(calls.training, dtype=np.int8) == 1
    backward = np.array(calls.backward, dtype=np.int8)[training]
    if not len(backward) or not np.isin(backward[:-1], (BACKWARD, BACKWARD_ENDED)).all():
        return None
    times: Floats | None = case.clocks.common(rank, np.array(calls.entered)[training])
    return times


def _per_step(own: Floats, theirs: Floats) -> tuple[int, int] | None:
    """Over how many calls this and the other rank accumulate, if these are not the same; None where that is not so."""
    for size in range(1, _MOST_PER_STEP + 1):
        begins = own[size::size]  # of each of its steps but the first
        begins = begins[begins <= theirs[-1]]
        if len(begins) < _LEAST_STEPS:
            return None
        made = np.searchsorted(theirs, begins)
        steps = np.arange(1, len(begins) + 1)
        other_size = round(int(made[-1]) / len(steps))
        if (other_size - size) * len(steps) >= _LEAST_DRIFT and np.isin(made - other_size * steps, (0, 1)).all():
            return size, other_size
    return None


def _reduces(ranks: list[int]) -> str:
    return "reduces its" if len(ranks) == 1 else "reduce their"


def _calls(number: int) -> str:
    return "call" if number == 1 else f"{number} calls"
