"""Ranks on which NeMo would not be patched.

A rank of stock NeMo waits in the default process group, where the patched ranks' next collective meets its reduce: the
job then hangs, dies or reduces wrong numbers. Patch all ranks, or none.
Link: docs/design.md
"""

from __future__ import annotations

from nemo_patches.text import named
from nemo_patches.tools.doctor.finding import ERROR, WARNING, Finding, Findings, note, warning
from nemo_patches.tools.doctor.ranks import Ranks

WORST = ERROR


def check(ranks: Ranks) -> Findings:
    """By what `nemo-patches status` finds on each."""
    instead = "`nemo-patches status` on that host, in the job's environment"
    for reasons, which in ranks.grouped(lambda facts: "; ".join(facts.unpatched)).items():
        if reasons:
            some = len(which) < len(ranks.facts)
            what = f"NeMo would not be patched on {named(which) if some else 'any rank'}: {reasons}"
            yield Finding(ERROR if some else WARNING, what, (), instead)
    by_itself = ranks.grouped(lambda facts: "" if facts.unpatched else facts.auto_apply.partition(" ")[0])
    off = by_itself.get("off", [])
    if off and "on" in by_itself:
        what = (
            f"{named(off)}: NeMo is not patched there by itself, as on the others; then the training script must do it"
        )
        yield warning(what, (), "`nemo-patches run --`, or PYTHONPATH, on every host")
    elif off:
        what = "no rank patches NeMo by itself: the training script must call nemo_patches.apply()"
        yield note(what)
