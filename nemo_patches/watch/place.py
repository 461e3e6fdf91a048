"""Where this rank is: adds it to what it says of itself."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading
import time
from dataclasses import replace

from ..facts import RankFacts
from ..judging.kinds import PERHAPS
from . import stacks
from .kernel_call import waits_for_any_child
from .loader_workers import described, loader_workers
from .occupation import Occupation
from .progress import Progress
from .training_notes import TrainingNotes
from .training_thread import NumberedThread


def with_place(
    facts: RankFacts, notes: TrainingNotes, progress: Progress, *, is_away: bool
) -> RankFacts:
    """is_away: whether its last step is so long ago that somebody may wait for it."""
    progress.training_thread.look(time.monotonic(), progress.begun)
    thread = progress.training_thread.known()
    occupation = Occupation()
    if thread is not None:
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
        where=_where(thread),
        request=occupation.request,
        waits_for_child=waits_for_any_child(),
        workers=workers,
        worker_states=described(workers, progress.busy_processes),
        batch=notes.batch(),
    )


def _where(thread: NumberedThread | None) -> str:
    """Where it is not known which thread trains, the main one's place is a guess."""
    if thread is not None:
        return stacks.where(thread.ident)
    return PERHAPS + stacks.where(threading.main_thread().ident or 0)
