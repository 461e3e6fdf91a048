"""NeMo's checkpoint callback while it takes rank 0's decisions.

It is on by default: options/ is imported when several ranks first use the callback.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from nemo_patches.patching.parts import LEFT, InForce, Part
from nemo_patches.patching.replacements import Replacements
from nemo_patches.patching.targets import CHECKPOINT_BASES, CHECKPOINT_TARGETS
from nemo_patches.sync.rank_log import raised_by_signal_handler, rank_and_size, report

# Its own and inherited ones; the functions in their place are options/checkpoints.py's.
_METHODS = ("setup", "_monitor_candidates", "on_save_checkpoint", "on_train_end")
_Method = Callable[..., Any]


class _FirstUse:
    """Has the callback ask options/checkpoints.py, which is imported then."""

    def __init__(self) -> None:
        self._cannot = False  # a rank that has missed the first question must ask none

    def wrapper(self, original: _Method, in_force: InForce) -> _Method:
        @functools.wraps(original)
        def method(callback: Any, *args: Any, **more: Any) -> Any:
            ours = None
            if in_force() and rank_and_size()[1] > 1:
                ours = self._method(original.__name__)
            if ours is None:
                return original(callback, *args, **more)
            return ours(original, callback, *args, **more)

        return method

    def _method(self, name: str) -> _Method | None:
        if self._cannot:
            return None
        try:
            from nemo_patches.options import checkpoints
        except Exception as error:
            if raised_by_signal_handler(error):
                raise
            self._cannot = True
            text = "nemo_patches cannot import its part for them"
            report(logging.ERROR, f"{LEFT[PART.setting]}: {text}: {error!r}")
            return None
        return checkpoints.METHODS[name]


def _begin(replacements: Replacements, in_force: InForce) -> None:
    target = CHECKPOINT_TARGETS[0]
    owner = target.find_owner(sys.modules[target.module])
    if owner is not None and not replacements.has(owner):
        first_use = _FirstUse()
        for name in _METHODS:
            ours = first_use.wrapper(getattr(owner, name), in_force)
            replacements.put(owner, name, ours)


PART = Part(
    setting="checkpoints",
    targets=CHECKPOINT_TARGETS,
    others=CHECKPOINT_BASES,
    refusal="the ranks cannot agree on checkpoints (checkpoints=stock leaves NeMo's)",
    begin=_begin,
)
