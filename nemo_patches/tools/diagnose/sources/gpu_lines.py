"""Whose GPU the kernel says an error of: NCCL tells at its start which rank has which GPU."""

from __future__ import annotations

import re

from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.rank_facts import Condition
from nemo_patches.tools.diagnose.sources.lines import MOST_KEPT, Line, shown
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts

_Gpu = tuple[str, int]  # its host, and where it is on the bus, as NCCL writes that


class GpuLines:
    """Of one launch."""

    def __init__(self, found: LaunchFacts) -> None:
        self._found = found
        self._ranks: dict[_Gpu, tuple[int, int]] = {}  # and of how many ranks
        self._failed: dict[_Gpu, tuple[str, Line]] = {}

    def take_gpu(self, both: re.Match[str], line: Line) -> None:
        if len(self._ranks) + len(self._failed) >= MOST_KEPT:
            return
        if both["rank"]:
            gpu = _short(both["of"]), int(both["bus"], 16)
            size = int(both["size"])
            if size > self._ranks.get(gpu, (0, 0))[1]:  # others are of its groups
                self._ranks[gpu] = int(both["rank"]), size
            return
        domain, bus, device = (int(part, 16) for part in both["pci"].split(":")[:3])
        gpu = _short(both["on"] or ""), domain << 20 | bus << 12 | device << 4
        self._failed.setdefault(gpu, (f"the kernel: {shown(both['what'])}", line))

    def finish(self) -> None:
        """Where others waited in vain, and the rank itself says nothing."""
        kinds = {fact.condition_kind for fact in self._found.facts.values()}
        if kinds.isdisjoint({conditions.WAITED, conditions.CUT}):
            return
        job = max((size for _, size in self._ranks.values()), default=0)
        silent = set(range(job)) - self._found.ranks()
        for (host, bus), (text, line) in self._failed.items():
            ranks = {
                rank
                for (of, at), (rank, size) in self._ranks.items()
                if at == bus and of == (host or of) and size == job
            }
            if len(ranks) == 1 and ranks <= silent:
                condition = Condition(conditions.TOLD_ABSENT, text)
                self._found.add(ranks.pop(), condition, line, own=False)


def _short(host: str) -> str:
    return host.partition(".")[0]
