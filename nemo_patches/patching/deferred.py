"""NeMo's evaluation epochs while metrics are deferred. Imported with that setting."""

from __future__ import annotations

import sys
from collections.abc import Callable

from nemo_patches.options.deferred_metrics import replacement
from nemo_patches.patching.metric_targets import METRIC_TARGETS
from nemo_patches.patching.replacements import Replacements


def defer(replacements: Replacements, in_force: Callable[[], bool]) -> None:
    """Put the deferred metrics around the beginning and the end of each, unless they are there."""
    for target in METRIC_TARGETS:
        owner = target.find_owner(sys.modules[target.module])
        if owner is not None and not replacements.has(owner, target.method):
            original = vars(owner)[target.method]
            ours = replacement(target.method, original, in_force)
            replacements.put(owner, target.method, ours)
