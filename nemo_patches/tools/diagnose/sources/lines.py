"""What launchers and people put before a log's lines: taken off, and the rank in it learned."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from nemo_patches.tools.diagnose.facts import NOT_TOLD
from nemo_patches.tools.diagnose.sources.c10d_lines import rank_in
from nemo_patches.tools.diagnose.sources.log_facts import said

_MOST_PREFIXES = 4  # before one line
_MOST_LOOKED_AT = 20_000  # lines, for a label
# May stand before what has the rank, or has the rank itself.
_PREFIXES = tuple(
    map(
        re.compile,
        (
            # A logger's time, and what follows is a rank's
            r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]? "
            r"(?=\[(?:rank\d|default\d|\d{1,9},)|\(\w{1,80} pid=)",
            r"[\w.-]{1,80}/\d{1,6} (?=\[default\d)",  # NeMo-Run
            r"\[\d{1,7}\] (?=\[rank\d)",
            # What people write: "[time] [rank=3] ", "(worker2, rank=2, ip=..) "
            r"(?!.{0,120}(?:Aborting process|\[name=))(?:\[[^\[\]]{1,60}\] ?){0,2}"
            r"[\[(][^\[\]()]{0,60}?\b[Rr]ank= ?(?P<rank>\d{1,6})\b[^\[\]()]{0,80}[\])]"
            r":? ?(?!pid=)(?:\|{1,2} )?",
            # HCCL
            r"\[(?:ERROR|WARNING|INFO)\] [\d:-]{10,24} \(PID:\d{1,9}, Device:\d{1,4},"
            r" RankID:(?P<rank>\d{1,7})\) ?",
            # vLLM
            r"\((?:\w{1,40}_)?(?:TP|DP|PP)(?P<rank>\d{1,6}) pid=\d{1,9}\) "
            r"(?:(?:ERROR|WARNING|INFO) [\d-]{5} [\d:]{8} \[[^\]]{1,80}\] )?",
        ),
    )
)
_LABEL = re.compile(
    r"(?P<before>[\[(<{|#*]{0,3}\s?(?:[A-Za-z][\w./-]{0,60}?)?[ =:#_-]{0,2})(?P<number>\d{1,5})"
    r"(?P<after>(?:/[\w-]{1,40})?(?:\s{0,4}[\])|:>}]{1,3}){1,2}(?:\s|$)|\s+)"
)
_OF_RANKS = re.compile(
    r"(?<![A-Za-z])(?:global_?|world_?|mpi_?|dist_?)?rank|worker|proc|task|replica|trainer|learner",
    re.IGNORECASE,
)
# Labels that take numbers and are of time, of data, or of more than one rank.
_OF_OTHERS = re.compile(
    r"(?i)epoch|step|iter|batch|layer|stage|bucket|shard|file|trial|fold|line|attempt|block|"
    r"stream|node|host|local|loader|version|chunk|group|page|part|thread|frame|sample|utt|phase|"
    r"count|level|round|call|seq|size|run_?$|job|day|v$|t$|^\W*$(?<!\[)(?<!<)(?<!\()"
)
_SIZE = re.compile(
    rb"Starting with (\d{1,7}) processes|world_?[ -]?size\W{1,3}(\d{1,7})\b|\[rank(\d{1,7})\]"
)


class Prefixes:
    """Of one file. head: its first bytes, by which a label is learned."""

    def __init__(self, head: bytes) -> None:
        self._label = _learned(head)

    def strip(self, text: str) -> tuple[str, int]:
        """The line without them, and the rank that they tell, or NOT_TOLD."""
        rank = NOT_TOLD
        for _ in range(_MOST_PREFIXES):
            found = next((one for p in _PREFIXES if (one := p.match(text))), None)
            if found is None:
                break
            rank = int(found.groupdict().get("rank") or rank)
            text = text[found.end() :]
        if self._label is not None and (found := self._label.match(text)):
            return text[found.end() :], int(found["number"]) if rank < 0 else rank
        return text, rank


def _learned(head: bytes) -> re.Pattern[str] | None:
    """The label that begins lines and takes the numbers of ranks."""
    numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
    lines = head.split(b"\n", _MOST_LOOKED_AT)[:_MOST_LOOKED_AT]
    for raw in lines:
        text = said(raw[:2000].decode("utf-8", "replace").rstrip("\r"))
        if (found := _LABEL.match(text)) is None:
            continue
        own, number = rank_in(text[found.end() :]), int(found["number"])
        key = found["before"], found["after"].strip()
        numbers[key].append(number if own in (None, number) else NOT_TOLD)
    sizes = [0]
    for processes, world, rank in _SIZE.findall(head):
        sizes += [int(processes or world or 0), int(rank) + 1 if rank else 0]
    size = max(sizes)
    known = [
        (len(seen), before, after)
        for (before, after), seen in numbers.items()
        if _is_of_ranks(before, after, seen, size)
    ]
    if not known:
        return None
    _, before, after = max(known)
    end = rf"\s{{0,4}}{re.escape(after)}(?:\s{{1,2}}|$)" if after else r"\s+"
    return re.compile(rf"{re.escape(before)}(?P<number>\d{{1,5}}){end}")


def _is_of_ranks(before: str, after: str, seen: Sequence[int], size: int) -> bool:
    """size: of the job, as far as lines tell; 0: not known."""
    ranks = set(seen)
    count = max(ranks) + 1
    if min(ranks) < 0 or len(ranks) < 2 or not before + after:
        return False
    is_named = _OF_RANKS.search(before) is not None
    if is_named and (after or "=" in before):
        return size == 0 or count <= size
    if _OF_OTHERS.search(before) or not after:
        return False
    return (
        ranks == set(range(count))
        and len(seen) >= 2 * count
        and _turns_back(seen) >= 2
        and size in (0, count)
    )


def _turns_back(seen: Sequence[int]) -> int:
    """How often a smaller number follows: ranks' lines mix, an epoch's rise."""
    return sum(second < first for first, second in pairwise(seen))
