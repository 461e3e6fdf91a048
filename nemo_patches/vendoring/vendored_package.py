"""nemo_patches inside a vendored NeMo: the length sync and, where stall/ is beside it, stall reports.

In nemo_patches this file is vendoring/vendored_package.py; the diffs carry it as the __init__.py beside sync/.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from .sync import __version__
from .sync.encoder_methods import make_bounded_update, private_setter
from .sync.length_sync import LengthSyncTimeout, counters
from .sync.own_syncs import watching
from .sync.rank_log import report
from .sync.settings import Settings, misspelt

__all__ = ["LengthSyncTimeout", "__version__", "bounded_length_sync", "counters", "stalls"]


def bounded_length_sync(method: str, setter: str = "") -> Callable[[type], type]:
    """Class decorator of a vendored NeMo whose `method` has lost its reduce: does what nemo_patches.apply() does.

    method: `update_max_seq_length` or its like. setter: the method that grows the buffers, where `method` does not.
    The diffs put it on the classes; torch's and NeMo's own decorators go around it.
    """

    def decorate(owner: Any) -> type:
        original = owner.__dict__[method]
        update = make_bounded_update(original, original, lambda: True)
        update.__nemo_patches__ = __version__  # for apply(), which leaves it alone then
        setattr(owner, method, update)
        if setter:
            setattr(owner, setter, private_setter(owner.__dict__[setter], lambda: True))
        owner.__init_subclass__ = watching(owner, method, lambda: True)
        return owner  # type: ignore[no-any-return]

    return decorate


def stalls() -> tuple[Any, ...]:
    """The recent stalls seen by this rank; empty without stall/."""
    return _stalls()


def _subscribe() -> tuple[Callable[[], tuple[Any, ...]], tuple[Any, ...]]:
    """Let stall/ watch the sync, if it is here. Returns the function for the stalls, and the reports' settings."""
    spec = importlib.util.find_spec(".stall", __name__)
    if spec is None or spec.origin is None:  # not here, or all that is left of it is Python's cache
        return tuple, ()
    try:
        from .stall import subscriber

        subscriber.subscribe()
    except Exception as error:  # nothing of ours may break NeMo's import
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        where = f"in importing {spec.origin}"
        report(logging.ERROR, f"no stall reports: {problem}, {where}; the length sync works without them")
        return tuple, ()
    return subscriber.stalls, subscriber.SETTINGS


def _say_misspelt() -> None:
    """Log our variables that have no effect here; if nemo_patches itself is in use, it does so."""
    if "nemo_patches" not in sys.modules and not multiprocessing.current_process().daemon:  # a loader's worker
        for sentence in misspelt(
            os.environ, [setting.variable for setting in (*Settings.settings(), *_stall_settings)]
        ):
            report(logging.WARNING, sentence)


_stalls, _stall_settings = _subscribe()
_say_misspelt()
