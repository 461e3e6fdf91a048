"""Which ranks are further on, of ranks that all wait:
by counters of their loops, and by where their stacks part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import Account
from nemo_patches.tools.diagnose.collect.frame_source import NO_LOOP
from nemo_patches.tools.diagnose.rank_facts import Place
from nemo_patches.tools.diagnose.verdicts import by_party, capital, is_, names

_REQUEUES = "_slurm_sigusr_handler_fn"  # Lightning's


class ReasonApart(NamedTuple):
    """Why ranks are in different collectives. id: a finding's; both empty if not known. out: the
    ranks that are out of a loop in which the others are.
    """

    id: str = ""
    text: str = ""
    out: tuple[int, ...] = ()


class _Step(NamedTuple):
    function: str
    line: int


def further_on(few: Sequence[Account], many: Sequence[Account]) -> ReasonApart:
    """By a counter of a loop that both parties are in, else by their lines in the function where
    their stacks part.
    """
    for party in (few, many):
        if any(_REQUEUES in step for one in party for step in one.place.way):
            text = (
                f"{capital(names(party))} {is_(party)} in a handler of SIGUSR1"
                " (Lightning's requeue), which saves a checkpoint together with all ranks,"
                " and a rank that waits in C++ runs no handler:"
                " SLURMEnvironment(auto_requeue=False), and requeue in the job's script."
            )
            return ReasonApart(ids.OUT_OF_STEP, text)
    one = few[0].place
    other = many[0].place
    pairs = enumerate(zip(one.way, other.way, strict=False))
    level = next((number for number, (a, b) in pairs if a != b), None)
    if level is None:
        return ReasonApart()
    step = _step(one.way[level])
    their_step = _step(other.way[level])
    is_same = step.function == their_step.function
    around = {_step(way).function for way in one.way[:level]}
    for name, value in one.counters.items():
        # A counter of the function where the stacks part decides as well if both are in its loop,
        # or if no loop sets it: then they are in different calls of that function.
        begins = one.loops.get(name, 0)
        in_loop = begins != 0 and begins == other.loops.get(name)
        parts_there = is_same and in_loop and _of(name) == step.function
        there = other.counters.get(name, value)
        if there != value and (_of(name) in around or parts_there):
            ahead, behind = (few, many) if value > there else (many, few)
            why = " (a skipped backward, a swallowed exception, a call that only some make)"
            out: tuple[int, ...] = ()
            if loop := _inner_loop(behind[0].place, level, around):
                why = (
                    f", in a loop that {names(ahead)} left, or never came to, at {loop}:"
                    " fewer batches there, or a call that only some ranks make"
                )
                out = _ranks(ahead)
            text = (
                f"{capital(names(few))} {is_(few)} at {name} = {value},"
                f" {names(many)} at {there}: {names(ahead)} went on without a"
                f" collective that the other side waits in{why}."
            )
            return ReasonApart(ids.SKIPPED, text, out)
    if not is_same or step.line == their_step.line:
        return ReasonApart()
    first, last = (few, many) if step.line > their_step.line else (many, few)
    near, far = sorted((step.line, their_step.line))
    place = (
        f"{names(first)} {is_(first)} at line {far} of {step.function}, {names(last)} at"
        f" line {near}"
    )
    inner = {_step(way).function for way in last[0].place.way[level:]}
    return _by_loops(first, last, inner, place) or ReasonApart(
        ids.OUT_OF_STEP, f"{capital(place)}."
    )


def _inner_loop(behind: Place, level: int, around: set[str]) -> str:
    """ "j of evaluate (train.py) = 3": its outermost loop below the function where the stacks
    part.
    """
    inner = {_step(way).function for way in behind.way[level + 1 :]} - around
    loops = (
        f"{name} = {value}"
        for name, value in behind.counters.items()
        if behind.loops.get(name, 0) > 0 and _of(name) in inner
    )
    return next(loops, "")


def _by_loops(
    first: Sequence[Account], last: Sequence[Account], inner: set[str], place: str
) -> ReasonApart | None:
    """By the counters of the loops that `last` is in. first: further on in a function, by its
    lines.
    """
    ahead = names(first)
    behind = names(last)
    theirs = first[0].place
    mine = last[0].place
    same = ""
    for name, value in mine.counters.items():
        if _of(name) not in inner:
            continue
        came_to = theirs.counters.get(name, -1)
        begins = mine.loops.get(name, NO_LOOP)
        at_step = f"{capital(place)}, at the same step ({name} = {value})."
        # The innermost loop decides: batches within an epoch.
        if came_to == value and (begins > 0 or not same):
            same = at_step
        # An argument, or its source is not known: how far a loop is, it does not tell.
        if begins == NO_LOOP:
            continue
        if came_to == value and theirs.loops.get(name, begins) < begins:
            text = (
                f"{capital(ahead)} came to the loop's end, after as many steps, without"
                " this call: a step before has left one out, or"
                f" {behind} made one more. {at_step}"
            )
            return ReasonApart(ids.SKIPPED, text)
        # Which sets the same variable.
        is_in_later_loop = theirs.loops.get(name, 0) > max(begins, 0)
        if came_to < value and not is_in_later_loop:
            why = f"{capital(ahead)} had fewer batches"
            still = f"{behind} {is_(last)} still in the loop, at {name} = {value}"
            if name in theirs.counters:
                text = f"{why}: {still}, where {ahead} came to {came_to}. {capital(place)}."
                return ReasonApart(ids.FEWER_BATCHES, text, _ranks(first))
            # It has left that function, so how far it came there is not known.
            text = (
                f"{why}, or left this call out in one of them, or never came to this loop:"
                f" {still}. {capital(place)}."
            )
            kind = ids.FEWER_BATCHES if value else ids.SKIPPED
            return ReasonApart(kind, text, _ranks(first))
    if not same:
        return None
    text = (
        f"{capital(ahead)} passed that line without this call, or came from it. {same}"
    )
    return ReasonApart(ids.SKIPPED, text)


def apart(waiting: Sequence[Account]) -> str:
    """The first counter that differs between ranks at the same place, with its values; empty if
    none does.
    """
    names = {name for one in waiting for name in one.place.counters}
    for name in sorted(names):
        known = [one for one in waiting if name in one.place.counters]
        values = ((f"{name} = {one.place.counters[name]}", one.rank) for one in known)
        told = by_party(values, "{who} at {what}")
        if told and not name.startswith("rank "):
            return told
    return ""


def parting(waiting: Sequence[Account]) -> str:
    """The first frames that differ, from the outermost."""
    ranks = [one.rank for one in waiting]
    levels = zip(*(one.place.way for one in waiting), strict=False)
    told = (
        by_party(zip(frames, ranks, strict=True), "{who} by {what}")
        for frames in levels
    )
    return next(filter(None, told), "")


def _ranks(accounts: Sequence[Account]) -> tuple[int, ...]:
    return tuple(one.rank for one in accounts)


def _step(way: str) -> _Step:
    """Of "train (hang.py:105)": the function with its file, and the line."""
    function, _, line = way.rstrip(")").rpartition(":")
    return _Step(f"{function})", int(line) if line.isdecimal() else 0)


def _of(counter: str) -> str:
    return counter.partition(" of ")[2]
