"""Who had not come, as NCCL's RAS and Horovod list ranks: in several lines."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from nemo_patches.text import named
from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.findings import NOT_ENOUGH, Finding
from nemo_patches.tools.diagnose.rank_facts import NOT_TOLD, Condition, Motion
from nemo_patches.tools.diagnose.sources.lines import MOST_KEPT, Line, ranks_in, shown
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts
from nemo_patches.tools.diagnose.verdicts import finding, out_of_step, parties

_BY_HOROVOD = ", by Horovod"
_SILENT = -1  # count of those whose processes give RAS no answer


@dataclass
class _Communicator:
    """RAS lists the ranks of a state where they are few. last: operation that any rank has
    launched. most: ranks of one state; usual: their operation. state: of the next ranks, with its
    operation and count.
    """

    last: int = NOT_TOLD
    most: int = 0
    usual: int = NOT_TOLD
    state: tuple[str, int, int] = ("", NOT_TOLD, 0)
    ranks: dict[int, tuple[tuple[str, int, int], str, Line]] = field(
        default_factory=dict
    )


class RasLines:
    """One launch's lines."""

    def __init__(self, found: LaunchFacts) -> None:
        self._found = found
        self._communicators: dict[str, _Communicator] = defaultdict(_Communicator)
        # Of the answer before, by communicator: its listed ranks' operations
        self._before: dict[str, dict[int, int]] = {}
        self._name = ""
        self.findings: list[Finding] = []
        # Of Horovod's last report: by rank, the tensors that it had not given
        self._lacks: dict[int, list[str]] = {}
        self._ready: set[int] = set()  # by Horovod's reports
        self._ready_at: Line | None = None
        self._tensor_at = 0  # number of the last line that names who lacks a tensor
        self._horovod_at = 0  # number of the line that may list a missing rank

    def take_horovod(self, found: re.Match[str], line: Line) -> None:
        self._horovod_at = line.number + 1
        self._lacks.clear()

    def take_horovod_rank(self, told: re.Match[str], line: Line) -> None:
        if line.number == self._horovod_at:
            rank, tensors = int(told[1]), told[2].split(", ")
            self._missing(rank, f"to {tensors[0]}{_BY_HOROVOD}", line)
            self._lacks[rank] = tensors
            self._horovod_at += 1

    def take_horovod_tensor(self, told: re.Match[str], line: Line) -> None:
        """Its first form: who had not given each tensor."""
        if self._tensor_at != line.number - 1:
            self._lacks.clear()
        self._tensor_at = line.number
        for rank in ranks_in(told["ranks"]):
            self._missing(rank, f"to {told['tensor']}{_BY_HOROVOD}", line)
            self._lacks.setdefault(rank, []).append(told["tensor"])

    def take_ready(self, found: re.Match[str], line: Line) -> None:
        """Horovod's older report names only those that have come."""
        for one in re.findall(r"\[ready ranks: ([\d, ]{1,2000})\]", line.text):
            self._ready.update(ranks_in(one))
        self._ready_at = line

    def take_ras_answer(self, found: re.Match[str], line: Line) -> None:
        """The last one counts."""
        for name in [*self._communicators]:
            self._end_answer(name)
        self._name = ""

    def take_ras(self, group: re.Match[str], line: Line) -> None:
        self._name = group[1]
        if self._name in self._communicators:  # of an answer without its head
            self._end_answer(self._name)

    def _end_answer(self, name: str) -> None:
        ranks = self._communicators.pop(name).ranks
        self._before[name] = {
            rank: number for rank, ((_, number, _), *_) in ranks.items()
        }

    def take_ras_state(self, told: re.Match[str], line: Line) -> None:
        if self._name and len(self._communicators) < MOST_KEPT:
            one = self._communicators[self._name]
            number, count = int(told["number"] or NOT_TOLD), int(told["count"])
            one.last = max(one.last, number)
            one.most, one.usual = max((one.most, one.usual), (count, number))
            one.state = told["what"], number, count

    def take_ras_silent(self, told: re.Match[str], line: Line) -> None:
        if self._name:
            self._communicators[self._name].state = told[1], NOT_TOLD, _SILENT

    def take_ras_silent_ranks(self, told: re.Match[str], line: Line) -> None:
        one = self._communicators[self._name]
        if one.state[2] == _SILENT:
            for rank in ranks_in(told["ranks"]):
                one.ranks[rank] = one.state, line.text.strip(), line

    def take_ras_rank(self, told: re.Match[str], line: Line) -> None:
        one = self._communicators[self._name]
        state = one.state
        if told["what"]:  # of this rank alone
            number = int(told["number"] or NOT_TOLD)
            one.last = max(one.last, number)
            state = told["what"], number, 1
        if state[0] and len(one.ranks) < MOST_KEPT:
            process = f"process {told['pid']} on {told['node']}"
            one.ranks[int(told["rank"])] = state, process, line

    def _missing(self, rank: int, text: str, line: Line) -> None:
        self._found.add(rank, Condition(conditions.MISSING, text), line, own=False)

    def finish(self) -> None:
        if (line := self._ready_at) is not None:
            for rank in sorted(set(range(self._found.world_size)) - self._ready):
                self._missing(rank, "to a tensor that others gave, by Horovod", line)
        self._finish_horovod()
        for name, one in self._communicators.items():
            self._note_ahead(one)
            counts = one.last < 0
            before = self._before.get(name, {})
            for rank, ((what, number, count), process, line) in one.ranks.items():
                if count == _SILENT:
                    text = f"{what}: {shown(process)}"
                    told = Condition(conditions.TOLD_ABSENT, text)
                    self._found.add(rank, told, line, own=False)
                elif number > before.get(rank, number):
                    by = f"by NCCL's RAS from operation {before[rank]} to {number}"
                    self._found.add(rank, Motion(moved=True, by=by), line)
                elif count < one.most if counts else number < one.last:
                    title = (
                        f"as others: {what}" if counts else f"to operation {one.last}"
                    )
                    twice = ", twice the same" if rank in before else ""
                    by = f"{title}, by NCCL's RAS{twice}; {process}"
                    self._missing(rank, by, line)

    def _finish_horovod(self) -> None:
        """Two parties that lack each other's tensors: both wait, and the fewer are apart."""
        lacks = self._lacks
        by_first = parties((tensors[0], rank) for rank, tensors in lacks.items())
        if len(by_first) != 2:
            return
        (theirs, few), (own, many) = by_first.items()
        size = max(self._found.world_size, 1 + max(lacks))
        of_few, of_many = (
            {one for rank in ranks for one in lacks[rank]} for ranks in (few, many)
        )
        is_whole = not any(one.endswith("...") for one in of_few | of_many)
        if len(lacks) < size and not (is_whole and of_few.isdisjoint(of_many)):
            return
        told = [(rank, conditions.MISSING) for rank in lacks]
        told = [one for one in told if self._found.has(*one)]
        is_odd = len(few) < len(many)
        for rank in {rank for rank, _ in told} - {*(few if is_odd else ())}:
            self._found.facts.pop((rank, Condition, conditions.MISSING, ""))
        if told and is_odd:
            text = (
                f"to {theirs}{_BY_HOROVOD}, and alone in {own}: different collectives"
            )
            for rank in few:
                self._found.explain(rank, conditions.MISSING, text)
        elif told:
            self.findings.append(out_of_step({own: few, theirs: many}, {}))

    def _note_ahead(self, one: _Communicator) -> None:
        """RAS lists the few, whether they are behind or ahead."""
        ahead = {
            rank: line
            for rank, ((_, number, count), _, line) in one.ranks.items()
            if number > one.usual >= 0 and count < one.most
        }
        if ahead:
            text = (
                f"{named(ahead)} have launched operation {one.last}, and {one.most} others"
                f" {one.usual}: those few are ahead, and which of the others they wait for,"
                f" NCCL's RAS does not tell [{next(iter(ahead.values())).cite}]."
            )
            self.findings.append(finding(NOT_ENOUGH, text))
