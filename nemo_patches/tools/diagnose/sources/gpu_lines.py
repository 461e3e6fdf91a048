"""Whose GPU the kernel says an error of: NCCL tells at its start which rank has which GPU.

Likewise of Ascend's devices: their table of ranks tells it.
"""

from __future__ import annotations

import re
from itertools import pairwise

from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.rank_facts import NOT_TOLD, Condition
from nemo_patches.tools.diagnose.sources.lines import MOST_KEPT, Line, shown
from nemo_patches.tools.diagnose.sources.log_facts import LaunchFacts

_IN_TABLE = re.compile(
    r"\b(?:(?P<id>rank_id|device_id)|(?P<address>device_ip|server_id))['\"]?\s?[:=]\s?['\"]?"
    r"(?P<value>(?(id)\d{1,6}\b(?!\.)|[\d.]{1,15}\b))"
)
_ADDRESS = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")


_GONE = "fallen off the bus"


class GpuLines:
    """Of one launch. A GPU's number is where it is on the bus, as NCCL writes that."""

    def __init__(self, found: LaunchFacts) -> None:
        self._found = found
        # By host or address, and number: the rank, and of how many ranks, 0 if not told
        self._ranks: dict[tuple[str, int], tuple[int, int]] = {}
        self._processes: list[tuple[int, int, int]] = []  # ids, ranks, of how many
        # Numbers, their hosts or addresses if told, and what is told
        self._failed: list[tuple[int, set[str], str, Line]] = []
        self._gone: set[int] = set()  # numbers of GPUs that are there no more
        self._entry: dict[str, str] = {}  # of the table of devices
        self._lost: dict[tuple[str, int], Line] = {}
        # Of HCCL's processes by id: its rank and device in the largest group; its address
        self._entered: dict[int, tuple[int, int]] = {}
        self._addresses: dict[int, str] = {}
        self._size = 0  # of that group
        self._root = ""  # the address of its first rank

    def take_gpu(self, both: re.Match[str], line: Line) -> None:
        if both["rank"]:
            rank, size = int(both["rank"]), int(both["size"])
            self._note(both["of"], int(both["bus"], 16), rank, size)
            if len(self._processes) < MOST_KEPT:
                self._processes.append((int(both["pid"]), rank, size))
            return
        at = both["pci"] or both["handle"]
        domain, bus, device = (int(part, 16) for part in at.split(":")[:3])
        text = f"the kernel: {shown(both['what'] or '')}"
        if both["smis"]:
            text = f"nvidia-smi: {shown(both['smis'])}"
        hosts = {_short(both["on"])} if both["on"] else set()
        number = domain << 20 | bus << 12 | device << 4
        self._fail(number, hosts, text, line)
        # Until the host starts anew; a log with hosts' names may go back behind that.
        if both["smis"] or (_GONE in text and not hosts):
            self._gone.add(number)

    def take_device(self, found: re.Match[str], line: Line) -> None:
        """The server stands before its devices, and a device's rank behind it."""
        entry = self._entry
        for told in _IN_TABLE.finditer(line.text):
            entry[told["id"] or told["address"]] = told["value"]
            if {"rank_id", "device_id"} <= entry.keys():
                rank, number = int(entry.pop("rank_id")), int(entry.pop("device_id"))
                self._note(entry.get("server_id", ""), number, rank)
                self._note(entry.pop("device_ip", ""), number, rank)

    def take_device_error(self, found: re.Match[str], line: Line) -> None:
        addresses = {_short(one) for one in _ADDRESS.findall(line.text)}
        self._fail(int(found["device"]), addresses, shown(line.text), line)

    def take_lost(self, found: re.Match[str], line: Line) -> None:
        """Whom HCCL's heartbeats lost: an address, and a device's number."""
        text = line.text[found.start() :].partition(", Possible")[0]
        told = line._replace(text=text)
        self._lost.setdefault((found["at"], int(found["number"])), told)

    def take_entered(self, found: re.Match[str], line: Line) -> None:
        """HCCL's process begins to make a group: with its rank, and its device's number."""
        size, rank, device = (int(found[name]) for name in ("size", "rank", "device"))
        if size > self._size:
            self._entered.clear()
            self._size, self._root = size, found["root"]
        if size == self._size and len(self._entered) < MOST_KEPT:
            self._entered[int(found["pid"])] = rank, device

    def take_own_address(self, found: re.Match[str], line: Line) -> None:
        if len(self._addresses) < MOST_KEPT:
            self._addresses[int(found[1])] = found[2]

    def _name_lost(self) -> None:
        """A host's ranks follow one another as its devices do, if all that is told agrees: the
        first rank is the root's, others are by their processes' own addresses, and the only host
        left is at the only address left.
        """
        first_of = {pid: rank - device for pid, (rank, device) in self._entered.items()}
        per_host = 1 + max((device for _, device in self._entered.values()), default=0)
        hosts = set(range(0, self._size, per_host))
        firsts = sorted({0, *first_of.values()})
        apart = {second - first for first, second in pairwise(firsts)}
        if min(apart, default=0) != per_host or not hosts.issuperset(firsts):
            return
        first_at = {self._root: 0}
        for pid, address in self._addresses.items():
            if pid in first_of:
                first_at.setdefault(address, first_of[pid])
        left = hosts - {*first_at.values()}
        unknown = {at for at, _ in self._lost} - first_at.keys()
        if len(left) == len(unknown) == 1:
            first_at |= zip(unknown, left, strict=True)
        for at, number in self._lost:
            if at in first_at and number < per_host:
                self._note(at, number, first_at[at] + number)

    def _note(self, at: str, number: int, rank: int, size: int = 0) -> None:
        """size: of the group, of which the largest is the job."""
        gpu = _short(at), number
        if len(self._ranks) < 2 * MOST_KEPT and size >= self._ranks.get(gpu, (0, 0))[1]:
            self._ranks[gpu] = rank, size

    def _fail(self, number: int, at: set[str], text: str, line: Line) -> None:
        if len(self._failed) < MOST_KEPT:
            self._failed.append((number, at, text, line))

    def name_hosts(self) -> None:
        """Call before anything is told of a host or a pod by its name."""
        for host, _, rank in self._of_job():
            self._found.note_names({host: {rank}})

    def name_processes(self) -> None:
        """Call before anything is told of a process by its id."""
        job = max((size for *_, size in self._processes), default=0)
        of_job = {(pid, rank) for pid, rank, size in self._processes if size == job}
        ranks = [rank for _, rank in of_job]
        is_more = (
            max(self._found.ranks(), default=0) >= job or self._found.world_size > job
        )
        # Else it is a group's, and several groups have such a rank.
        if len(set(ranks)) == len(ranks) and not is_more:
            for pid, rank in of_job:
                self._found.note_pid(pid, rank)

    def _of_job(self) -> list[tuple[str, int, int]]:
        """Hosts, their GPUs' numbers, and the ranks."""
        job = max((size for _, size in self._ranks.values()), default=0)
        return [
            (host, number, rank)
            for (host, number), (rank, size) in self._ranks.items()
            if size == job
        ]

    def finish(self, is_finished: bool) -> None:
        """A rank whose CUDA error the kernel explains; or one that says nothing itself, where
        others waited in vain, or the job has not finished and that GPU is there no more.
        """
        self._name_lost()
        of_job = self._of_job()
        waited = not self._found.kinds.isdisjoint({conditions.WAITED, conditions.CUT})
        why: dict[int, str] = {}
        for lost, line in self._lost.items():
            rank, _ = self._ranks.get(lost, (NOT_TOLD, 0))
            if rank == NOT_TOLD or rank not in self._found.ranks():
                told = Condition(conditions.TOLD_ABSENT, shown(line.text))
                self._found.add(rank, told, line, own=False)
        for number, told_at, text, line in self._failed:
            at = told_at or {host for host, *_ in of_job if _is_named(host, line.file)}
            ranks = {
                rank
                for host, its, rank in of_job
                if its == number and (not at or host in at)
            }
            if len(ranks) != 1:
                continue
            [rank] = ranks
            if self._found.has_cuda_error(rank):
                # The last one: a kernel's log goes back for months.
                why[rank] = f"a consequence of its GPU's error, by {text} [{line.cite}]"
                continue
            is_gone = number in self._gone and not is_finished
            if (waited or is_gone) and rank not in self._found.ranks():
                condition = Condition(conditions.TOLD_ABSENT, text)
                self._found.add(rank, condition, line, own=False)
        for rank, text in why.items():
            self._found.explain_exception(rank, text)


def _is_named(host: str, file: str) -> bool:
    return (
        re.search(rf"(?<![A-Za-z0-9]){re.escape(host)}(?![A-Za-z0-9])", file)
        is not None
    )


def _short(host: str) -> str:
    """A host's name without its domain; an address as it is."""
    return host if host[:1].isdecimal() else host.partition(".")[0]
