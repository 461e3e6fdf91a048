"""People's own prints before and after the encoder's call: a guess, that accuses nobody."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from nemo_patches.text import named
from nemo_patches.tools.diagnose.findings import (
    NEXT_STEPS,
    NOT_ENOUGH,
    SEVERITIES,
    Finding,
)
from nemo_patches.tools.diagnose.sources.lines import MOST_KEPT, Line, shown

_RANK = re.compile(r"\b(?:global_?)?[Rr]ank[ =:_#-]{0,2}(\d{1,6})\b")
_CALLED = r"about to (?:call|enter|run)|before|calling|entering|starting|enters?"
_RETURNED = r"after|completed|finished|done|returned|returns|left|exited|passed"
_BEFORE = re.compile(
    rf"(?i)\b(?:{_CALLED})\b\W{{1,3}}(?:\w+\W{{1,3}}){{0,3}}?(?:\w+[._])?encoder\b"
)
_AFTER = re.compile(
    rf"(?i)\b(?:{_RETURNED})\b\W{{1,3}}(?:\w+\W{{1,3}}){{0,3}}?(?:\w+[._])?encoder\b|"
    rf"\bencoder\b(?:\W{{1,3}}\w+){{0,3}}?\W{{1,3}}(?:{_RETURNED})\b"
)
_AFTER_ALONE = re.compile(
    rf"(?i)^\W{{0,3}}(?:step \d+\W{{1,3}})?(?:{_RETURNED})\W{{0,3}}$"
)
# Such a line measures, or is of the encoder's weights.
_OTHER = re.compile(
    r"(?i)\b(?:time|took|elapsed|mem(?:ory)?|shape|weights?|frozen?|freez\w+|param\w*|config|"
    r"pre-?train\w*|loading)\b"
)
_BEGIN = "A guess, by the job's own prints: "


class EncoderPrints:
    """One launch's lines."""

    def __init__(self) -> None:
        self._called: Counter[int] = Counter()
        self._returned: Counter[int] = Counter()
        self._last: dict[int, Line] = {}  # of each rank's prints
        self._names_calls = False  # "about to call": no other words for a start

    def take(self, line: Line) -> None:
        rank, text = line.rank, line.text
        if "ncoder" not in text and not self._last:
            return
        if not line.has_prefix and (told := _RANK.search(text)):
            rank, text = int(told[1]), text[told.end() :]
        if rank < 0 or len(self._last) >= MOST_KEPT or _OTHER.search(text):
            return
        is_inside = self._called[rank] > self._returned[rank]
        if _BEFORE.search(text):
            self._called[rank] += 1
            self._names_calls |= "about to" in text.lower()
        elif is_inside and (_AFTER.search(text) or _AFTER_ALONE.search(text)):
            self._returned[rank] = self._called[rank]
        else:
            return
        self._last[rank] = line

    def finding(self) -> Finding | None:
        """None where all have come out, or where the prints may be of something else."""
        called, returned = self._called, self._returned
        inside = [rank for rank in self._last if called[rank] > returned[rank]]
        if not inside or len(self._last) < 2:
            return None
        if not returned.total() and not self._names_calls:
            return None
        last = max(called[rank] for rank in inside)
        first = min(called[rank] for rank in inside)
        came_out = [rank for rank in self._last if returned[rank] >= first]
        behind = [rank for rank in self._last if returned[rank] == called[rank] < last]
        if came_out:
            stuck = [rank for rank in inside if called[rank] == first]
            text = (
                f"{self._who(stuck)} called the encoder and did not come out of it, as"
                f" {self._who(came_out)} did: stuck in it, or only slow."
            )
        elif behind:
            text = (
                f"{self._who(inside)} called the encoder, and {self._who(behind)} did not"
                " call it again: held up before it, by data or preprocessing, or only slow."
            )
        else:
            text = (
                f"{self._who(inside)}, all that print, called the encoder, and none came"
                " out of it."
            )
        step = NEXT_STEPS[NOT_ENOUGH]
        return Finding(NOT_ENOUGH, SEVERITIES[NOT_ENOUGH], (), _BEGIN + text, step)

    def _who(self, ranks: Iterable[int]) -> str:
        """With the last print of the first."""
        line = self._last[min(ranks)]
        return f'{named(sorted(ranks))} ("{shown(line.text)}" [{line.cite}])'
