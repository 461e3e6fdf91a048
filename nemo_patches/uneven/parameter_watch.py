"""Watches optimizers' steps through torch's own hooks, and has the parameters compared every N steps on all ranks.

On the training thread: a count in each step and, where one is due, sums and a copy that are enqueued, not waited for.
All healthy ranks share their number of optimizer steps: ranks that synchronize gradients step equally often.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from nemo_patches.channel import process_hooks
from nemo_patches.channel.process_hooks import AtExit, InForkedChild
from nemo_patches.sync.length_sync import GroupSyncs, process
from nemo_patches.sync.rank_log import is_distributed, raised_by_signal_handler, report
from nemo_patches.uneven.checksums import Checksums
from nemo_patches.uneven.comparison import Comparison, ComparisonCounters, Snapshot
from nemo_patches.uneven.parted import UNKNOWN
from nemo_patches.uneven.replicas import Replicas, Wrappers, parameters_of

_MOST_OPTIMIZERS = 16  # a thread each; an optimizer for every parameter, in the backward, has hundreds
_NOT_SYNCED = "a step came after a forward under no_sync, as in local SGD, or without gradients"
_EXIT = timedelta(seconds=0.6)


class _Stepped:
    """An optimizer on this rank. Only the training thread writes it."""

    def __init__(self, title: str, comparison: Comparison) -> None:
        self.title, self.comparison = title, comparison
        self.steps = 0
        self.replicas = Replicas()
        self.parameters: list[int] = []  # the ids of those that `replicas` is of
        self.is_unsynced = False  # a step was made on gradients of this rank alone
        self.enqueued = deque[tuple[int, int, Checksums]]()  # of which steps and batches

    def counters(self) -> ComparisonCounters:
        one = self.comparison
        return ComparisonCounters(self.title, self.steps, one.compared, one.equal_at, one.left_out, one.found)


class ParameterWatch:
    """Of this process. Only the training thread writes it, but for `use`, which apply() calls."""

    def __init__(self) -> None:
        self.every = 0
        self._batches = UNKNOWN
        self._wrappers = Wrappers()
        self._handles: list[RemovableHandle] = []
        self._world: Callable[[], object] = lambda: None
        self._group_syncs: GroupSyncs | None = None
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Stepped] = weakref.WeakKeyDictionary()
        self._seen = 0  # optimizers, under the present process group
        self._is_compiled = self._said_unseen = self._said_most = False

    def use(self, every: int) -> None:
        """From now on, compare after every `every` steps of each optimizer; 0: never."""
        if every == self.every:
            return
        self._forget()
        self.every = every
        if every and not self._handles:
            self._handles = [
                register_optimizer_step_post_hook(self._has_stepped),
                register_module_module_registration_hook(self._wrappers.noted),
            ]
        elif not every:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def training_began(self) -> None:
        """Lightning's, with new optimizers."""
        self._batches = UNKNOWN + 1

    def training_ended(self) -> None:
        self._batches = UNKNOWN

    def batch_began(self) -> None:
        """Lightning begins another training batch."""
        self._batches += 1
        if self._is_compiled:
            self._say_unseen("compiled (torch.compile of the optimizer's step)")

    def _say_unseen(self, how: str) -> None:
        if not self._said_unseen:
            self._said_unseen = True
            report(
                logging.WARNING, f"parameters are not compared after an optimizer's steps that are {how}: none is seen"
            )

    def counters(self) -> tuple[ComparisonCounters, ...]:
        """Of the optimizers that live."""
        return tuple(stepped.counters() for stepped in list(self._stepped.values()))

    def in_forked_child(self) -> None:
        """The threads are the parent's."""
        self._stepped = weakref.WeakKeyDictionary()
        self._world, self._group_syncs, self._seen = lambda: None, None, 0

    def stop(self) -> None:
        """At exit: wait for the threads' ends, for a short while."""
        comparisons = [stepped.comparison for stepped in list(self._stepped.values())]
        self._forget()
        end = time.monotonic() + _EXIT.total_seconds()
        for comparison in comparisons:
            comparison.join(timedelta(seconds=max(end - time.monotonic(), 0.0)))

    def _forget(self) -> None:
        for stepped in list(self._stepped.values()):
            stepped.comparison.stop()
        self._stepped = weakref.WeakKeyDictionary()

    def _has_stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            self._is_compiled = True  # all that may be traced: a step that is compiled as a whole does this and no more
            return
        if not self.every:
            return
        try:
            self._after_step(optimizer)
        except Exception as error:  # an error of ours must not reach training
            if raised_by_signal_handler(error):
                raise
            self._forget()
            self.every = 0  # the hook stays: torch goes through its hooks just now
            text = f"the comparison of parameters has ended by an error of its own, please report it: {error!r}"
            report(logging.ERROR, text)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if is_on_gpu and torch.cuda.is_current_stream_capturing():
            self._say_unseen("captured as a CUDA graph")
            return
        if not self._is_present_group():
            return
        stepped = self._stepped.get(optimizer) or self._began(optimizer)
        if stepped is None or stepped.comparison.is_over:
            return
        stepped.steps += 1
        if stepped.steps == 1 or stepped.steps % self.every == 0:
            self._find_replicas(optimizer, stepped)
        stepped.is_unsynced = stepped.is_unsynced or stepped.replicas.were_not_synced()
        if stepped.steps % self.every == 0:
            self._take(stepped)
        while stepped.enqueued and stepped.enqueued[0][2].are_done():
            step, batches, checksums = stepped.enqueued.popleft()
            found, numbers = stepped.replicas, tuple(checksums.numbers())
            stepped.comparison.offer(Snapshot(step, batches, found.layout, found.names, numbers))

    def _is_present_group(self) -> bool:
        """Whether there are other ranks. Under another process group all begins anew."""
        world = torch.distributed.group.WORLD if is_distributed() else None
        if world is None:
            return False
        if self._world() is not world:
            self._forget()
            self._world, self._seen = weakref.ref(world), 0
            self._group_syncs = process.present_group()
        return self._group_syncs is not None

    def _began(self, optimizer: torch.optim.Optimizer) -> _Stepped | None:
        assert self._group_syncs is not None
        if len(self._stepped) >= _MOST_OPTIMIZERS:
            if not self._said_most:
                self._said_most = True
                report(logging.WARNING, f"parameters of no more than {_MOST_OPTIMIZERS} optimizers are compared")
            return None
        self._seen += 1  # also over a change of settings: no two comparisons may have the same rounds
        number, name = self._seen, type(optimizer).__name__
        title = name if number == 1 else f"{name}, optimizer {number}"
        comparison = Comparison(self._group_syncs, title, f"parameters {number} every {self.every}")
        weakref.finalize(optimizer, comparison.stop).atexit = False
        stepped = self._stepped[optimizer] = _Stepped(title, comparison)
        return stepped

    def _find_replicas(self, optimizer: torch.optim.Optimizer, stepped: _Stepped) -> None:
        assert self._group_syncs is not None
        parameters = list(map(id, parameters_of(optimizer)))
        if parameters != stepped.parameters or stepped.replicas.reason:
            stepped.parameters, stepped.enqueued = parameters, deque()
            stepped.replicas = replicas = self._wrappers.replicas(optimizer, self._group_syncs.group.size)
            if replicas.others and self._group_syncs.group.rank == 0:
                text = f"{stepped.title}: {replicas.others} of its {len(parameters)} parameters are in no DDP module"
                report(logging.INFO, f"{text}, and not compared; the others are")

    def _take(self, stepped: _Stepped) -> None:
        reason = stepped.replicas.reason or (_NOT_SYNCED if stepped.is_unsynced else "")
        if reason:
            stepped.comparison.offer(Snapshot(stepped.steps, self._batches, reason=reason))
        else:
            with torch.no_grad():
                checksums = Checksums(stepped.replicas.tensors)
            stepped.enqueued.append((stepped.steps, self._batches, checksums))


parameter_watch = ParameterWatch()
process_hooks.run(AtExit.COMPARISONS, parameter_watch.stop)
process_hooks.run(InForkedChild.COMPARISONS, parameter_watch.in_forked_child)
