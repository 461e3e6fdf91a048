"""Which ranks are further on, of ranks that all wait:
by counters of their loops, and by where their stacks part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nemo_patches.text import named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import Account
from nemo_patches.tools.diagnose.collect.source import NO_LOOP
from nemo_patches.tools.diagnose.facts import Place
from nemo_patches.tools.diagnose.verdicts import capital, parties

_REQUEUES = "_slurm_sigusr_handler_fn"  # Lightning's


class Reason(NamedTuple):
    """Why ranks are in different collectives. id: a finding's; both empty if not known."""

    id: str = ""
    text: str = ""


class _Step(NamedTuple):
    function: str
    line: int


def further_on(few: Sequence[Account], many: Sequence[Account]) -> Reason:
    """By a counter of a loop that both parties are in, else by their lines in the function where
    their stacks part.
    """
    for party in (few, many):
        if any(_REQUEUES in step for one in party for step in one.place.way):
            text = (
                f"{capital(_names(party))} {_is(party)} in a handler of SIGUSR1 (Lightning's"
                " requeue), which saves a checkpoint together with all ranks, and a"
                " rank that waits in C++ runs no handler: SLURMEnvironment("
                "auto_requeue=False), and requeue in the job's script"
            )
            return Reason(ids.OUT_OF_STEP, text)
    one, other = few[0].place, many[0].place
    level = next(
        (n for n, (a, b) in enumerate(zip(one.way, other.way, strict=False)) if a != b),
        None,
    )
    if level is None:
        return Reason()
    around = {_step(way).function for way in one.way[:level]}
    mine, theirs = _names(few), _names(many)
    for name, value in one.counters.items():
        # A counter of the function where the stacks part decides as well if both are in its loop,
        # or if no loop sets
        # it: then they are in different calls of that function.
        in_loop = one.loops.get(name, 0) != 0 and one.loops.get(
            name
        ) == other.loops.get(name)
        parts_there = (
            _of(name)
            == _step(one.way[level]).function
            == _step(other.way[level]).function
        )
        is_around = _of(name) in around or (parts_there and in_loop)
        if is_around and (there := other.counters.get(name, value)) != value:
            ahead, behind = (mine, many) if value > there else (theirs, few)
            text = (
                f"{capital(mine)} {_is(few)} at {name} = {value}, {theirs} at {there}:"
                f" {ahead} went on without a "
            )
            text += "collective that the other side waits in"
            if loop := _inner_loop(behind[0].place, level, around):
                text += (
                    f", in a loop that {ahead} left, or never came to, at {loop}: fewer"
                    " batches there, or a call "
                )
                text += "that only some ranks make."
                return Reason(ids.SKIPPED, text)
            return Reason(
                ids.SKIPPED,
                f"{text} (a skipped backward, a swallowed exception, a call that only"
                " some make).",
            )
    step, their_step = _step(one.way[level]), _step(other.way[level])
    if step.function != their_step.function or step.line == their_step.line:
        return Reason()
    is_ahead = step.line > their_step.line
    first, last = (few, many) if is_ahead else (many, few)
    near, far = sorted((step.line, their_step.line))
    place = (
        f"in {step.function} {_names(first)} {_is(first)} at line {far}, {_names(last)}"
        f" at line {near}"
    )
    inner = {_step(way).function for way in last[0].place.way[level:]}
    return _by_loops(first, last, inner, place) or Reason(
        ids.OUT_OF_STEP, f"Further on: {place}."
    )


def _inner_loop(behind: Place, level: int, around: set[str]) -> str:
    """ "j of evaluate (train.py) = 3": its outermost loop below the function where the stacks
    part.
    """
    inner = {_step(way).function for way in behind.way[level + 1 :]} - around
    known = (
        f"{name} = {value}"
        for name, value in behind.counters.items()
        if behind.loops.get(name, 0) > 0
    )
    return next((text for text in known if _of(text.partition(" = ")[0]) in inner), "")


def _by_loops(
    first: Sequence[Account], last: Sequence[Account], inner: set[str], place: str
) -> Reason | None:
    """By the counters of the loops that `last` is in. first: further on in a function, by its
    lines.
    """
    ahead, behind = _names(first), _names(last)
    theirs, mine = first[0].place, last[0].place
    counters = {
        name: value for name, value in mine.counters.items() if _of(name) in inner
    }
    for name, value in counters.items():
        came_to = theirs.counters.get(name, -1)
        begins = mine.loops.get(name, NO_LOOP)
        # An argument, or its source is not known: how far a loop is, it does not tell.
        if begins == NO_LOOP:
            continue
        if came_to == value and theirs.loops.get(name, begins) < begins:
            text = (
                f"At the same step ({name} = {value}) {place}: {ahead} came to the"
                " loop's end, after as many steps, "
            )
            text += (
                f"without this call: a step before has left one out, or {behind} made"
                " one more."
            )
            return Reason(ids.SKIPPED, text)
        # Which sets the same variable.
        is_in_later_loop = theirs.loops.get(name, 0) > max(begins, 0)
        if came_to < value and not is_in_later_loop:
            text = (
                f"Further on: {place}, {behind} still in the loop, at {name} = {value}"
            )
            if name in theirs.counters:
                return Reason(
                    ids.FEWER_BATCHES,
                    f"{text}, where {ahead} came to {came_to}: {ahead} had fewer"
                    " batches.",
                )
            # It has left that function, so how far it came there is not known.
            kind = ids.FEWER_BATCHES if value else ids.SKIPPED
            why = (
                f"{ahead} had fewer batches, or left this call out in one of them, or"
                " never came to this loop"
            )
            return Reason(kind, f"{text}: {why}.")
    # The innermost loop decides: batches within an epoch. A counter that no loop sets may be an
    # argument.
    same = [
        name for name, value in counters.items() if theirs.counters.get(name) == value
    ]
    if not same:
        return None
    name = next(
        (name for name in reversed(same) if mine.loops.get(name, 0) > 0), same[-1]
    )
    text = (
        f"At the same step ({name} = {counters[name]}) {place}: {ahead} passed that"
        " line without this call, or "
    )
    return Reason(ids.SKIPPED, text + "came from it.")


def apart(waiting: Sequence[Account]) -> str:
    """The first counter that differs between ranks at the same place, with its values; empty if
    none does.
    """
    for name in sorted(
        {
            name
            for one in waiting
            for name in one.place.counters
            if not name.startswith("rank ")
        }
    ):
        in_loop = (one for one in waiting if name in one.place.counters)
        values = parties((one.place.counters[name], one.rank) for one in in_loop)
        if len(values) > 1:
            return "; ".join(
                f"{named(ranks)} at {name} = {value}" for value, ranks in values.items()
            )
    return ""


def parting(waiting: Sequence[Account]) -> str:
    """The first frames that differ, from the outermost."""
    ways = [one.place.way for one in waiting]
    for level in range(min(map(len, ways), default=0)):
        there = parties((one.place.way[level], one.rank) for one in waiting)
        if len(there) > 1:
            return "; ".join(
                f"{named(ranks)} by {frame}" for frame, ranks in there.items()
            )
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
