"""A rank that is slow, by the reports of the job's own straggler detector."""

from __future__ import annotations

import re

from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.findings import Finding
from nemo_patches.tools.diagnose.sources.lines import Line
from nemo_patches.tools.diagnose.verdicts import finding

_LEAST_SHARE = (
    0.5  # of the best rank's throughput: ranks on one kind of GPU differ by some %
)


class StragglerLines:
    """One launch's lines; the last report counts."""

    def __init__(self) -> None:
        self._slow: Finding | None = None

    def take_throughput(self, found: re.Match[str], line: Line) -> None:
        """Megatron's: the least throughput and its rank, the most and its rank."""
        least, slow, most, best = found.groups()
        self._slow = None
        if float(least) < _LEAST_SHARE * float(most):
            text = (
                f"Rank {slow} is slow: {least} TFLOP/s, and rank {best} has {most}, by the"
                f" job's straggler report [{line.cite}]."
            )
            self._slow = finding(ids.STRAGGLER, text, [int(slow)])

    def finding(self) -> Finding | None:
        return self._slow
