"""The verdict of `nemo-patches diagnose` on the demo's stock ranks while they hang."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from nemo_patches.text import safe
from nemo_patches.tools.diagnose import running
from nemo_patches.tools.diagnose.collect.host_jobs import NothingToLookAtError, jobs_here


def verdict_on(pids: Sequence[int], waited: timedelta) -> tuple[str, ...]:
    """The verdict and the next step, as by `nemo-patches diagnose --pids`. waited: for how long they have hung."""
    try:
        (ranks,) = jobs_here(pids=pids)
    except NothingToLookAtError as error:
        return (safe(str(error)),)
    report = running.diagnose(ranks, stuck_after_s=waited.total_seconds() / 2)
    return tuple(safe(line) for line in (report.verdict, f"Next: {report.next_step}" * bool(report.next_step)) if line)
