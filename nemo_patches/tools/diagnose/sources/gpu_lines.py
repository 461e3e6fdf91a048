"""Whose GPU the kernel says an error of: NCCL tells at its start which rank has which GPU.

Likewise of Ascend's devices: their table of ranks tells it.
"""

from __future__ import annotations

import re

from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.rank_facts import Condition
from nemo_patches.tools.diagnose.sources.lines import MOST_KEPT, Line, shown
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts

_IN_TABLE = re.compile(
    r"\b(rank_id|device_id|device_ip|server_id)\b['\"]?\s?[:=]\s?['\"]?([\d.]{1,15})\b"
)
_ADDRESS = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_MOST_ERRORS = 64
_Gpu = tuple[str, int]  # its host, and where it is on the bus, as NCCL writes that


class GpuLines:
    """Of one launch."""

    def __init__(self, found: LaunchFacts) -> None:
        self._found = found
        self._ranks: dict[_Gpu, tuple[int, int]] = {}  # and of how many ranks
        self._failed: dict[_Gpu, tuple[str, Line]] = {}
        self._entry: dict[str, str] = {}  # of the table of devices
        self._devices: list[tuple[set[str], str, int]] = []  # addresses, number, rank
        self._errors: list[tuple[str, Line]] = []  # of a device

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

    def take_device(self, found: re.Match[str], line: Line) -> None:
        """The server stands before its devices, and a device's rank behind it."""
        for key, value in _IN_TABLE.findall(line.text):
            self._entry[key] = value
            if not {"rank_id", "device_id"} <= self._entry.keys():
                continue
            if len(self._devices) < MOST_KEPT:
                at = {
                    self._entry.get("server_id", ""),
                    self._entry.pop("device_ip", ""),
                }
                rank = int(self._entry.pop("rank_id"))
                self._devices.append((at, self._entry.pop("device_id"), rank))

    def take_device_error(self, found: re.Match[str], line: Line) -> None:
        if len(self._errors) < _MOST_ERRORS:
            self._errors.append((found["device"], line))

    def finish(self) -> None:
        """Where others waited in vain, and the rank itself says nothing."""
        kinds = {fact.condition_kind for fact in self._found.facts.values()}
        if kinds.isdisjoint({conditions.WAITED, conditions.CUT}):
            return
        job = max((size for _, size in self._ranks.values()), default=0)
        for (host, bus), (text, line) in self._failed.items():
            ranks = {
                rank
                for (of, at), (rank, size) in self._ranks.items()
                if at == bus and of == (host or of) and size == job
            }
            self._tell(ranks, text, line)
        for number, line in self._errors:
            at = set(_ADDRESS.findall(line.text))
            ranks = {
                rank
                for addresses, device, rank in self._devices
                if device == number and (addresses & at or not at)
            }
            self._tell(ranks, shown(line.text), line)

    def _tell(self, ranks: set[int], text: str, line: Line) -> None:
        if len(ranks) == 1 and ranks.isdisjoint(self._found.ranks()):
            condition = Condition(conditions.TOLD_ABSENT, text)
            self._found.add(ranks.pop(), condition, line, own=False)


def _short(host: str) -> str:
    return host.partition(".")[0]
