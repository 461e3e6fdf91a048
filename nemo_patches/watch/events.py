"""What the stall reports publish on the sync's event bus: a trace records it."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..judging.missing_rank import MissingRank

EXIT_CODE = 83  # of a process that stall_exit has ended


class StallReported(NamedTuple):
    """This rank has logged the missing ranks of a round.

    call: 0 if the length sync has ended. unknown: as in Stall.
    """

    encoder: str
    call: int
    missing: tuple[MissingRank, ...]
    unknown: str


class JobStalled(NamedTuple):
    """This rank has logged where all ranks are.

    since: time.monotonic() of the last encoder call's begin, or of the last collective's: the same
    for all reports of a stall. level: logging.WARNING where somebody waits for what is not known to
    end by itself, else logging.INFO. missing: the ranks that others wait for, as far as known.
    """

    since: float
    level: int
    text: str
    missing: tuple[MissingRank, ...]


class StallExits(NamedTuple):
    """The setting stall_exit ends this process as soon as this is handled."""
