"""Who is further on, of ranks that all wait: by the counters of their loops, and by where their ways part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from nemo_patches.stall.rank_text import named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import Account
from nemo_patches.tools.diagnose.verdicts import capital


class Reason(NamedTuple):
    """Why ranks are in different collectives. id: a finding's; both empty where nothing tells."""

    id: str = ""
    text: str = ""


class _Step(NamedTuple):
    function: str
    line: int


def further_on(few: Sequence[Account], many: Sequence[Account]) -> Reason:
    """By a counter of a loop that both parties are in, else by the line of the function in which their ways part."""
    one, other = few[0].place_value, many[0].place_value
    level = next((n for n, (a, b) in enumerate(zip(one.way, other.way, strict=False)) if a != b), None)
    if level is None:
        return Reason()
    around = {_step(way).function for way in one.way[:level]}
    mine, theirs = _names(few), _names(many)
    for name, value in one.counters.items():
        # Where the ways part within a loop, its counter tells as well: a loop that both are in.
        in_loop = one.loops.get(name, 0) > 0 and one.loops.get(name) == other.loops.get(name)
        parts_there = _of(name) == _step(one.way[level]).function == _step(other.way[level]).function
        is_around = _of(name) in around or (parts_there and in_loop)
        if is_around and (there := other.counters.get(name, value)) != value:
            ahead = mine if value > there else theirs
            text = f"{capital(mine)} {_is(few)} at {name} = {value}, {theirs} at {there}: {ahead} went on without a "
            return Reason(
                ids.SKIPPED,
                text + "collective that the other side waits in (a skipped backward, a swallowed exception).",
            )
    step, their_step = _step(one.way[level]), _step(other.way[level])
    if step.function != their_step.function or step.line == their_step.line:
        return Reason()
    is_ahead = step.line > their_step.line
    first, last = (few, many) if is_ahead else (many, few)
    ahead, behind = _names(first), _names(last)
    near, far = sorted((step.line, their_step.line))
    place = f"in {step.function} {ahead} {_is(first)} at line {far}, {behind} at line {near}"
    inner = {_step(way).function for way in last[0].place_value.way[level:]}
    came_to = first[0].place_value.counters
    for name, value in last[0].place_value.counters.items():
        if _of(name) not in inner:
            continue
        if came_to.get(name) == value:
            text = f"At the same step ({name} = {value}) {place}: {ahead} passed that line without this call, or has "
            return Reason(ids.SKIPPED, text + "come from it.")
        if came_to.get(name, -1) < value:
            only = f", where {ahead} came to {came_to[name]}" if name in came_to else ""
            text = f"Further on: {place}, {behind} still in the loop, at {name} = {value}{only}: "
            return Reason(ids.FEWER_BATCHES, f"{text}{ahead} had fewer batches.")
    return Reason(ids.OUT_OF_STEP, f"Further on: {place}.")


def apart(waiting: Sequence[Account]) -> str:
    """The counter, if there is one, in which ranks that stand at alike places differ."""
    for name in sorted({name for one in waiting for name in one.place_value.counters if not name.startswith("rank ")}):
        values: dict[int, list[int]] = defaultdict(list)
        for one in waiting:
            if name in one.place_value.counters:
                values[one.place_value.counters[name]].append(one.rank)
        if len(values) > 1:
            ordered = sorted(values.items(), key=lambda item: len(item[1]))
            return "; ".join(f"{named(ranks)} at {name} = {value}" for value, ranks in ordered)
    return ""


def parting(waiting: Sequence[Account]) -> str:
    """The first frames that differ, from the outermost."""
    ways = [one.place_value.way for one in waiting]
    for level in range(min(map(len, ways), default=0)):
        there: dict[str, list[int]] = defaultdict(list)
        for one in waiting:
            there[one.place_value.way[level]].append(one.rank)
        if len(there) > 1:
            ordered = sorted(there.items(), key=lambda item: len(item[1]))
            return "; ".join(f"{named(ranks)} by {frame}" for frame, ranks in ordered)
    return ""


def _step(way: str) -> _Step:
    """Of "train (hang.py:105)": the function with its file, and the line."""
    function, _, line = way.rstrip(")").rpartition(":")
    return _Step(f"{function})", int(line) if line.isdecimal() else 0)


def _of(counter: str) -> str:
    return counter.partition(" of ")[2]


def _names(accounts: Sequence[Account]) -> str:
    return named(sorted(one.rank for one in accounts))


def _is(accounts: Sequence[Account]) -> str:
    return "is" if len(accounts) == 1 else "are"
