"""NeMo's evaluation epochs while metrics are deferred."""

from __future__ import annotations

import sys

from nemo_patches.options.deferred_metrics import deferred_metrics, replacement
from nemo_patches.patching.metric_targets import METRIC_SUMS, METRIC_TARGETS
from nemo_patches.patching.parts import InForce, Part
from nemo_patches.patching.replacements import Replacements


def _begin(replacements: Replacements, in_force: InForce) -> None:
    """Put the deferred metrics around the beginning and the end of each."""
    for target in METRIC_TARGETS:
        owner = target.find_owner(sys.modules[target.module])
        if owner is not None and not replacements.has(owner, target.method):
            original = vars(owner)[target.method]
            ours = replacement(target.method, original, in_force)
            replacements.put(owner, target.method, ours)


def _end(_: Replacements) -> None:
    deferred_metrics.stop()


PART = Part(
    setting="metrics",
    targets=METRIC_TARGETS,
    others=METRIC_SUMS,
    refusal="metrics cannot be deferred",
    begin=_begin,
    end=_end,
)
