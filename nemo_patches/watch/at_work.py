"""Whether this rank works, where its training thread is in no collective.

Its process may, what it has started, or a data loader's worker.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Collection

from ..judging.kinds import is_guess
from . import stacks
from .descendants import Descendants
from .kernel_call import kernel_call
from .loader_workers import WorkerMotion, loader_workers
from .motion import RankMotion, thread_ran_s
from .occupation import occupation
from .torch_knows import has_gpu
from .training_thread import NumberedThread

_BETWEEN_LOOKS_S = 1.0  # at processes: some hundred small files


class AtWork:
    """One thread calls `look`; the other fields are of the last one.

    works: since the look before. has_run: the training thread has since then, however briefly; true
    where that is not known.
    """

    def __init__(
        self, window_s: float, ranks_here: Callable[[], Collection[int]]
    ) -> None:
        """window_s: in which it is measured. ranks_here: the processes of this host's other
        ranks.
        """
        self.works = False
        self.has_run = True
        self._window_s = window_s
        self._ranks_here = ranks_here
        self._between_looks_s = min(_BETWEEN_LOOKS_S, window_s / 2)
        self._looked_at = -math.inf
        # When the training thread was last seen in no wait for others, nor in what may be one.
        self._outside_at = -math.inf
        self._thread: NumberedThread | None = None
        self._ran_s = -1.0
        self._descendants = Descendants()
        self._motion = RankMotion(window_s)
        self._workers = WorkerMotion()

    @property
    def busy_processes(self) -> frozenset[int]:
        return self._workers.busy

    def look(self, now: float, thread: NumberedThread | None) -> None:
        """thread: the training thread, if it is known."""
        self._look_at_thread(thread)
        waits_in, waits_for_process = _waits(thread)
        if not waits_in:
            self._outside_at = now
        self.works = False
        if now - self._looked_at < self._between_looks_s:
            return
        self._looked_at = now
        if waits_in and not is_guess(waits_in):
            # Threads of torch's, Gloo's and NCCL's may take a core there, and a worker that reads
            # ahead is not what others wait for.
            self._motion = RankMotion(self._window_s)
            self._workers = WorkerMotion()
            return
        # Where it is a guess, as "perhaps the GPU": a rank that decodes is seen there often, one
        # that hangs is at each look.
        is_outside = now - self._outside_at <= self._window_s
        descendants = self._descendants.look(self._ranks_here())
        self._motion.look(descendants, with_own_threads=is_outside)
        awaited = set(loader_workers())
        if waits_for_process:
            awaited.update(descendants)
        has_busy_workers = self._workers.moved(now, awaited) and is_outside
        self.works = self._motion.works or has_busy_workers

    def _look_at_thread(self, thread: NumberedThread | None) -> None:
        ran_s = thread_ran_s(thread.native) if thread is not None else -1.0
        is_same = thread == self._thread
        self.has_run = not is_same or ran_s < 0 or ran_s > self._ran_s
        self._thread = thread
        self._ran_s = ran_s


def _waits(thread: NumberedThread | None) -> tuple[str, bool]:
    """The collective in which it waits, and whether it waits for a process."""
    if thread is None:
        return "", False
    frames = stacks.seen(thread.ident)
    call = kernel_call(thread.native)
    waits_in = occupation(frames, call).collective
    if is_guess(waits_in) and not has_gpu():
        waits_in = ""  # such a call computes there
    is_command = any(frame.code.co_filename == subprocess.__file__ for frame in frames)
    return waits_in, is_command or call.waits_for_child
