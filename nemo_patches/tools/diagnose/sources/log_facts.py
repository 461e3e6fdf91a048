"""A line of a log with where it stands, and the facts of one launch that a log tells."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nemo_patches.channel.safe_text import safe
from nemo_patches.stall.judge import Seat
from nemo_patches.tools.diagnose.facts import Fact, Fate, Member, Motion, Place, Value

MOST_RANKS = 1 << 20
MOST_KEPT = 4096  # ranks of which a launch's facts are kept
NOT_TOLD = -1  # the rank of a fact where the log does not tell whose it is; a Seat's number likewise
_MOST_FACTS = 8 * MOST_KEPT
_MOST_NOT_TOLD = 8  # facts of one kind whose rank is not told
_LONGEST_TEXT = 300
_PID_AND_RANK = re.compile(r"\bpid=(\d{1,9})\b[^)]{0,80}\)\s.{0,200}?\[rank(\d{1,7})\]|\[rank=(\d{1,7})\] pid=(\d{1,9})")


class Line(NamedTuple):
    """rank: by the line's prefix, or else by the file's folder; NOT_TOLD otherwise. cite: "train.log:4711"."""

    text: str
    cite: str
    rank: int = NOT_TOLD
    host: str = ""


def shown(text: str) -> str:
    """A piece of a log, fit for printing."""
    return safe(text.strip())[:_LONGEST_TEXT]


@dataclass
class LaunchFacts:
    """The facts of one launch, bounded whatever the log holds.

    Of a rank's fates of one kind the first is kept; of its places, and whether it moved, the last. world_size: 0 where
    no line tells it. is_over: a line of the present file has told of a time-out, or of an end: what ranks raise after
    that may follow from it. rank_of_pid: where lines tell both.
    """

    facts: dict[tuple[object, ...], Fact] = field(default_factory=dict)
    world_size: int = 0
    is_over: bool = False
    rank_of_pid: dict[int, int] = field(default_factory=dict)

    def add(self, rank: int, value: Value, line: Line, own: bool = True, host: str = "") -> None:
        if not NOT_TOLD <= rank < MOST_RANKS:
            return
        key = _key(rank, value)
        if isinstance(value, (Place, Motion)):
            self.facts.pop(key, None)
        elif key in self.facts:
            return
        same = sum(1 for one in self.facts if one[:3] == key[:3]) if rank == NOT_TOLD else 0
        if len(self.facts) < _MOST_FACTS and same < _MOST_NOT_TOLD:
            self.facts[key] = Fact(rank, value, line.cite, host=host or line.host, own=own)

    def member(self, world_size: int, line: Line, rank: int = NOT_TOLD, pid: int = 0, host: str = "") -> None:
        """A line tells the number of ranks."""
        self.world_size = max(self.world_size, min(world_size, MOST_RANKS))
        if rank >= 0:
            self.add(rank, Member(min(world_size, MOST_RANKS), pid), line, own=False, host=host)

    def note_pid(self, line: Line) -> None:
        """Ray writes the process id before each line of a worker."""
        if "pid=" in line.text and len(self.rank_of_pid) < MOST_KEPT and (both := _PID_AND_RANK.search(line.text)):
            self.rank_of_pid[int(both[1] or both[4])] = int(both[2] or both[3])

    def has(self, rank: int, kind: str) -> bool:
        return (rank, Fate, kind) in self.facts

    def ranks(self) -> set[int]:
        """Those of which a line tells more than that they belong to the job."""
        return {fact.rank for fact in self.facts.values() if not isinstance(fact.value, Member)}



def _key(rank: int, value: Value) -> tuple[object, ...]:
    if isinstance(value, Fate):
        return (rank, Fate, value.kind, value.text) if rank == NOT_TOLD else (rank, Fate, value.kind)
    if isinstance(value, Seat):
        return (rank, Seat, value.group, value.number)
    return (rank, type(value))
