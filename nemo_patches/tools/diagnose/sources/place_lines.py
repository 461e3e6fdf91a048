"""Reports of where ranks are, as a hang's watchers write them: "in all_reduce: ranks 0-5, 7".

Such a report is hearsay: it counts where it speaks of a hang, and its groups share no rank.
"""

from __future__ import annotations

import re

from nemo_patches.tools.diagnose.rank_facts import Place
from nemo_patches.tools.diagnose.sources.hearsay_lines import Steps, is_no_log_line
from nemo_patches.tools.diagnose.sources.lines import (
    MOST_KEPT,
    RANK_LIST,
    Line,
    ranks_in,
)
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts
from nemo_patches.tools.diagnose.sources.table_lines import TableLines

_RANKS = rf"[Rr]anks?[ :=]{{1,2}}\[?(?P<ranks>{RANK_LIST})\b(?![.\d])\]?"
_PLACE = (
    r"(?P<place>[A-Za-z_][\w.]{2,80}(?:\(\))?(?: \([\w./ -]{1,80}(?::\d{1,7})?\))?)"
)
_FORMS = (
    re.compile(rf"\b(?:in|at|inside) {_PLACE}: {_RANKS}"),
    re.compile(
        rf"{_RANKS}(?: (?:is|are|waits?|waiting|stuck|blocked|still|sits?))*"
        rf"(?: (?:in|at|inside) |: (?:in |at )?|\s*->\s*){_PLACE}"
    ),
)
_COLLECTIVE = re.compile(
    r"(?i)all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|all_?to_?all|\bnccl\w|backward"
)
_NEAR = 8  # lines: a report says in its first one what it is of


class PlaceLines:
    """One launch's lines."""

    def __init__(self, found: LaunchFacts, tables: TableLines) -> None:
        self._found = found
        self._is_of_a_hang = tables.is_of_a_hang
        self._steps = Steps()  # since the report
        self._told: dict[int, tuple[str, Line]] = {}  # by rank, in the last report
        self._at = -_NEAR  # number of its last line

    def take(self, line: Line) -> None:
        text = line.text
        if self._told and self._steps.go_on(text):
            self._told.clear()
        if "ank" not in text or line.has_prefix or not self._is_of_a_hang(line):
            return
        found = [one for form in _FORMS for one in form.finditer(text)]
        if not found or "?" in text or is_no_log_line(text.lstrip()):
            return
        if line.number - self._at >= _NEAR:
            self._told.clear()
            self._steps.begin()
        self._at = line.number
        for one in found:
            for rank in ranks_in(one["ranks"]):
                if len(self._told) < MOST_KEPT:
                    self._told[rank] = one["place"], line

    def finish(self) -> None:
        places = {place for place, _ in self._told.values()}
        are_collectives = {_COLLECTIVE.search(place) is not None for place in places}
        if are_collectives != {True, False}:
            return
        for rank, (place, line) in self._told.items():
            is_collective = _COLLECTIVE.search(place) is not None
            value = Place(collective=place) if is_collective else Place(where=place)
            self._found.add(rank, value, line._replace(has_prefix=True), own=False)
