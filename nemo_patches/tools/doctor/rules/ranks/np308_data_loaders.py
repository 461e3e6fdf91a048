"""Data loaders that differ between ranks:
their settings, their sampler, or a rank's number of batches.

A rank with a different number of batches leaves the others waiting in their next collective; with a
different batch size, all wait for the slowest in every step. Each rank reads its own copy of the
config, and its own manifests.
Link: docs/doctor.md
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import ERROR, Findings, error, warning
from nemo_patches.tools.doctor.ranks import Ranks, differing

WORST = ERROR


def check(ranks: Ranks) -> Findings:
    """Where the command was given a config."""
    instead = "the same config and the same manifests on every host"
    for name, values in differing(ranks, lambda facts: facts.loaders):
        make = error if name.endswith(", batches") else warning
        yield make(f"{name} differs: {values}", (), instead)
