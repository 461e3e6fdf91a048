"""What a question has found: the ranks' states, equal ones merged, and why some ranks have none."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..text import ranges, safe

LONGEST_STATE = 8192  # bytes of JSON
_LONGEST_TEXT = 200  # characters
_MOST_GROUPS = 64
_MOST_ALONE = 32  # of these: those with the fewest ranks; the others are merged by kind
_MOST_RANKS = 1 << 20
OTHERS = "others"  # the key of the states that do not fit

# Why nothing is heard of a rank.
NOT_COME = "not come"  # it has not registered: not started yet, or without nemo_patches
LEFT = "left"  # it has said so: it ends, or has destroyed its process group
ENDED = "ended"  # its port refuses: its process has ended, or a firewall is in the way
LOST = "lost"  # its connection was lost, and no other can be made
NO_ANSWER = "no answer"  # its connection stands, and it says nothing
# It says that it is there, and what it says more does not come.
NOT_THROUGH = "not through"
HELD_UP = "held up"  # its exchange answers, its watch does not
NO_WATCH = "no watch"  # its exchange answers, and there is no watch
UNREACHED = "unreached"  # it has not registered, and its note in the store says why
NOT_HEARD = "not heard"  # a rank between has said nothing, or there is no way to it yet
# Of a rank that was never connected to this one.
NEVER_HEARD = frozenset({NOT_COME, NOT_HEARD, UNREACHED})
SILENCES = (
    NOT_COME,
    LEFT,
    ENDED,
    LOST,
    NO_ANSWER,
    NOT_THROUGH,
    HELD_UP,
    NO_WATCH,
    NOT_HEARD,
    UNREACHED,
)


@dataclass(frozen=True)
class Silence:
    """Why nothing is heard of a rank. note: what it has left, if it is unreached."""

    how: str  # one of SILENCES
    note: str = ""


def silent_by(silent: Mapping[int, Silence], *how: str) -> dict[int, str]:
    """Of these, the ranks that are silent in one of these ways, and what is known of them."""
    return {rank: one.note for rank, one in silent.items() if one.how in how}


@dataclass
class RanksAlike:
    """Ranks whose states have the same key, and the state of the lowest of them.

    still: seconds since the one that has moved last has moved; -1: not known.
    """

    ranks: set[int]
    state: Any
    still: float = -1.0

    def join(self, other: RanksAlike) -> None:
        if min(other.ranks) < min(self.ranks):
            self.state = other.state
        self.ranks |= other.ranks
        self.still = min(
            (one for one in (self.still, other.still) if one >= 0), default=-1.0
        )


class Answers:
    """The answers of one question at this rank."""

    def __init__(self) -> None:
        self.groups: dict[str, RanksAlike] = {}
        self.silent: dict[int, Silence] = {}
        self.heard: set[int] = set()

    def add(self, key: str, ranks: set[int], state: Any, still: float = -1.0) -> None:
        """Ranks that give this state. What a rank has said first counts.

        key: that of the kind of state, and after a space that of the place, if there is one.
        """
        ranks = ranks - self.heard
        if not ranks:
            return
        self.heard |= ranks
        for rank in ranks & self.silent.keys():
            del self.silent[rank]
        _join(self.groups, key, RanksAlike(ranks, state, still))

    def add_silent(self, ranks: Iterable[int], silence: Silence) -> None:
        """Ranks of which nothing is heard, unless something is. The first reason counts."""
        for rank in set(ranks) - self.heard:
            self.silent.setdefault(rank, silence)

    def to_json(self) -> dict[str, Any]:
        """Of bounded size."""
        groups = [
            [key, runs_of(group.ranks), group.still, group.state]
            for key, group in self._kept()
        ]
        by_silence: dict[Silence, list[int]] = {}
        for rank, silence in self.silent.items():
            by_silence.setdefault(silence, []).append(rank)
        silent = [
            [silence.how, runs_of(ranks), *filter(None, [silence.note])]
            for silence, ranks in by_silence.items()
        ]
        return {"groups": groups, "silent": silent}

    def _kept(self) -> list[tuple[str, RanksAlike]]:
        """Ranks that are nearly alone in their state as they are, the others without their place.

        A state of more kinds than fit is of OTHERS.
        """
        by_size = sorted(
            self.groups.items(),
            key=lambda item: (len(item[1].ranks), min(item[1].ranks)),
        )
        if len(by_size) <= _MOST_GROUPS:
            return by_size
        kinds: dict[str, RanksAlike] = {}
        for key, group in by_size[_MOST_ALONE:]:
            kind = key.partition(" ")[0]
            if kind not in kinds and len(kinds) >= _MOST_GROUPS - _MOST_ALONE - 1:
                kind = OTHERS
            _join(kinds, kind, RanksAlike(set(group.ranks), group.state, group.still))
        return [*by_size[:_MOST_ALONE], *kinds.items()]

    def add_json(self, told: dict[str, Any]) -> None:
        """Another rank's. Raises ValueError, TypeError or KeyError if it is not of this format.

        What a later version says more is passed over: a silence that is not known is NOT_HEARD.
        """
        for key, runs, still, state, *_ in told["groups"]:
            self.add(text_of(key), ranks_of(runs), state_of(state), float(still))
        for how, runs, *note in told["silent"]:
            known = how if how in SILENCES else NOT_HEARD
            said = safe(text_of("".join(note[:1])))
            self.add_silent(ranks_of(runs), Silence(known, said))


def _join(groups: dict[str, RanksAlike], key: str, group: RanksAlike) -> None:
    if key in groups:
        groups[key].join(group)
    else:
        groups[key] = group


def text_of(value: Any) -> str:
    """At most so many characters of a text. Raises TypeError if it is none."""
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value[:_LONGEST_TEXT]


def state_of(state: Any) -> Any:
    """The state, or that it is too long to be sent. Raises TypeError or ValueError if not JSON."""
    length = len(json.dumps(state))
    if length > LONGEST_STATE:
        return {"too_long": length}
    return state


def runs_of(ranks: Iterable[int]) -> list[list[int]]:
    """Ranks as [first, last] of each run."""
    return [list(run) for run in ranges(sorted(ranks))]


def ranks_of(runs: Any) -> set[int]:
    """Raises ValueError or TypeError if these cannot be ranks of a job."""
    found = set[int]()
    for first, last in runs:
        if (
            type(first) is not int
            or type(last) is not int
            or not 0 <= first <= last < _MOST_RANKS
        ):
            raise ValueError("no ranks")
        found.update(range(first, last + 1))
    return found
