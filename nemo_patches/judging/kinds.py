"""The kinds of missing ranks, and what a rank may wait in: words of log lines.

Needs no torch, so tools use it too.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

ELSEWHERE = "elsewhere"  # it is alive, and not in the others' call
SILENT = "no heartbeat"  # it does not answer, or has ended without a word
# What shows why it does not answer:
GONE = "its process has gone"
ANSWERS_NOTHING = (
    "answers nothing, its connection stands: stopped, or Python's lock (GIL) is held,"
    " or it has no core"
)
ALL_RANKS_OF = "all ranks of "  # how it begins where a host is lost with all its ranks
LEFT = "left"  # it has ended, or destroyed its process group
UNANNOUNCED = "unannounced"  # it has not registered
# It has not registered: it cannot reach rank 0, as it says itself.
UNREACHED = "unreached"
# It has not come, or came after the others gave up; not known more exactly.
LATE = "late"
EVALUATED = "evaluation ended"  # it had fewer batches than the others, which need not wait for it
# Activities that end by themselves, or may:
CHECKPOINT = "a checkpoint"
DEBUGGER = "a debugger"
COMPILATION = "a compilation"
EXPORT = "an export"
PERHAPS = "perhaps "  # how a guess begins
# Why an encoder takes no part in the length sync, in the words of sync/protocol.py.
FLAG_IS_OFF = "sync_max_audio_length is false"
IS_LOCAL = "sync=local"
APART = (FLAG_IS_OFF, IS_LOCAL)
KINDS = (ELSEWHERE, SILENT, LEFT, UNANNOUNCED, UNREACHED, LATE, EVALUATED, *APART)


# What to switch on where batches are uneven.
OF_TRAINING = "`NEMO_PATCHES_STOP_TOGETHER=training`"
OF_EVALUATION = "uneven evaluation: `NEMO_PATCHES_METRICS=deferred`"
IF_UNEVEN = f"if it is uneven training: {OF_TRAINING}; if it is {OF_EVALUATION}"


def is_guess(collective: str) -> bool:
    """Whether this is only a guess, from a method's name."""
    return collective.startswith(PERHAPS)
