"""The verdict on gradients that ranks accumulate over unlike numbers of calls: their steps drift apart, one by one."""

from __future__ import annotations

import numpy as np

from nemo_patches.stall.rank_text import named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.case import Case
from nemo_patches.tools.diagnose.findings import CRITICAL, Finding
from nemo_patches.tools.diagnose.lateness import late_calls

_LEAST_STEPS = 3


def unlike_accumulation(case: Case) -> list[Finding]:
    """Ranks that wait for the others' gradients after every third call, say, where these make a fourth one first.

    Such a rank comes too late to the call after each of its steps, and at these moments the others have made a whole
    multiple of another number of calls.
    """
    for rank, late in sorted(late_calls(case).items()):
        made = np.array(sorted(late)) - 1  # calls by this rank at its steps' ends
        if len(made) < _LEAST_STEPS or rank not in case.sure or case.tracks[rank].calls.n[0] != 1:
            continue
        own = _per_step(made)
        calls = case.tracks[rank].calls
        moments = case.clocks.common(rank, np.array(calls.entered)[made[made < len(calls.n)]])
        if own < 2 or moments is None:
            continue
        theirs = {
            other: _per_step(np.searchsorted(common, moments))
            for other, track in case.tracks.items()
            if other != rank and (common := case.clocks.common(other, np.array(track.calls.entered))) is not None
        }
        others = [other for other, per_step in theirs.items() if per_step not in (0, own)]
        if others and len({theirs[other] for other in others}) == 1:
            per_step = theirs[others[0]]
            return [
                Finding(
                    id=ids.UNEVEN_CALLS,
                    severity=CRITICAL,
                    ranks=(rank,),
                    text=f"Rank {rank} waits for the others' gradients after every {own} calls of {case.name}, and "
                    f"{named(sorted(others))} after every {per_step}: they accumulate over unlike numbers of batches.",
                    next_step="Give every rank the same accumulate_grad_batches (a scheduler of it, or a condition on "
                    "the rank, too): each step waits until the length sync gives up, and the last one for ever.",
                    encoder=case.name,
                    call=own + 1,
                    evidence=(f"rank {rank} came late to its calls {', '.join(map(str, made[:4] + 1))}",),
                )
            ]
    return []


def _per_step(made: np.ndarray) -> int:
    """The number of calls in each step, if it is always the same; else 0."""
    steps = set(np.diff(made, prepend=0).tolist())
    return steps.pop() if len(made) >= _LEAST_STEPS - 1 and len(steps) == 1 else 0
