"""Where this rank is: adds it to what it says of itself."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import replace

from ..facts import RankFacts
from . import stacks
from .kernel_call import waits_for_any_child
from .loader_workers import described, loader_workers
from .progress import Progress
from .training_notes import TrainingNotes


def with_place(
    facts: RankFacts, notes: TrainingNotes, progress: Progress, *, is_away: bool
) -> RankFacts:
    """is_away: whether its last step is so long ago that somebody may wait for it."""
    last = notes.last
    thread = stacks.training_thread(last.thread, last.native_thread)
    occupation = stacks.occupation(thread.ident, thread.native)
    facts = replace(
        facts,
        collective=facts.collective or occupation.collective,
        caller=occupation.caller,
        hook=occupation.hook,
        activity=occupation.activity,
    )
    if not is_away:
        return facts
    workers = loader_workers()
    return replace(
        facts,
        where=stacks.where(thread.ident),
        request=occupation.request,
        waits_for_child=waits_for_any_child(),
        workers=workers,
        worker_states=described(workers, progress.busy_processes),
        batch=notes.batch(),
    )
