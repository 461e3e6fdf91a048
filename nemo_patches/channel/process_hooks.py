"""What of ours runs when this process ends, and in a child that is forked from it:
in these orders.
"""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import atexit
import multiprocessing.util
import os
from collections.abc import Callable
from enum import Enum, auto
from functools import partial

import torch.distributed  # noqa: F401  # before ours are registered: then torch's hooks at exit run after them


class AtExit(Enum):
    """At the interpreter's end, the first of these first; what has not been imported is left out.
    `at_last` follows.

    None of them runs where os._exit ends the process, or a signal does.
    """

    # They report a last time, over the exchanges, for the trace.
    STALL_MONITORS = auto()
    EXCHANGES = auto()  # they tell the other ranks that this one leaves


class InForkedChild(Enum):
    """In the child, whose threads and connections are its parent's: the first of these first."""

    EXCHANGES = auto()
    # Who comes after it asks it for a process group of the child's own.
    LENGTH_SYNC = auto()
    STALL_MONITORS = auto()
    STALL_SUBSCRIBER = auto()
    TRACE = auto()


_steps: dict[AtExit | InForkedChild, Callable[[], object]] = {}


def run(place: AtExit | InForkedChild, step: Callable[[], object]) -> None:
    """Have this done at its place from now on."""
    _steps[place] = step


def at_last(step: Callable[[], object]) -> None:
    """Have this done after all of AtExit; also at the end of a process that multiprocessing has
    forked, if asked there.

    Such a process leaves without atexit. What is asked for before a fork is not done in the child.
    """
    multiprocessing.util.Finalize(None, step, exitpriority=0)


def _take(place: AtExit | InForkedChild) -> None:
    if (step := _steps.get(place)) is not None:
        step()


# Each is a hook of its own, so that an error in one, which Python prints, keeps none of the others
# from running. What is registered last runs first; multiprocessing has registered its end, which
# `at_last` is a part of, by its import.
for _place in reversed(AtExit):
    atexit.register(_take, _place)
for _step in InForkedChild:
    os.register_at_fork(after_in_child=partial(_take, _step))
