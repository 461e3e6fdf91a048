"""A rank's state, as its answer to a survey, and how the answers of many ranks are merged; JSON of bounded size.

What another rank has sent is data: its types are checked, its size is bounded, it is printed without control
characters, and nothing of it is evaluated. Needs no torch.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from ..channel.survey import ranks_of, runs_of
from ..text import safe

CALLING = "calling"  # it goes on with encoder calls
MOVING = "moving"  # it goes on with collectives
COMPUTING = "computing"  # it takes no step, and its training thread, or what this waits for, takes a core
LONGEST_STATE = 8192  # bytes
_MOST_ENCODERS = 64
_MOST_WORKERS = 32
_MOST_PLACES, _MOST_KINDS = 40, 64  # in an answer: groups by place; beyond that, groups by rounds


@dataclass(frozen=True)
class RankState:
    """The state of one rank. Times are ages in seconds, when it was asked; -1: never, or not known."""

    rank: int
    host: str
    pid: int
    versions: str
    settings: str
    encoder: str  # of the last call; empty before the first
    calls: int  # of all encoders
    clock: tuple[int, ...]  # of the last call's encoder: training calls, evaluation calls since
    idle: float  # since the last encoder call began
    rounds: dict[str, int]  # by encoder: the rounds that this rank has come to, the open ones and the latest last
    whole: bool = True  # false if `rounds` has no room for all encoders
    given_up: dict[str, float] = field(default_factory=dict)  # by encoder: since it waits no more for its open round
    apart: dict[str, str] = field(default_factory=dict)  # by encoder: why its latest call took no part in a round
    training: bool = True  # whether the last call was one of training, and not of an evaluation
    goes_on: str = ""  # CALLING, MOVING, COMPUTING or empty
    goes_on_for: float = 0.0  # for this long from now, unless it is seen to move again
    still: float = -1.0  # since it has last been seen to move
    sleeps: bool = False  # its training thread has not run at all for long
    # What its training thread does, if the last call is long ago:
    where: str = ""
    collective: str = ""  # what it waits in; empty: in none that is known
    caller: str = ""  # from where
    hook: str = ""  # of Lightning's, or "saving a checkpoint"
    activity: str = ""  # "a checkpoint", "a debugger"
    request: str = ""  # what it waits in for a person or a request: "input()", "perhaps queue.get()"
    waits_for_child: bool = False  # a thread of its process is in os.wait()
    workers: tuple[int, ...] = ()  # process ids of data loader workers
    worker_states: tuple[str, ...] = ()  # texts about some of them
    batch: str = ""  # its current or last one

    def has_come(self, encoder_key: str, round_number: int) -> bool | None:
        """Whether its rank has come to this round of this encoder; None if it does not say."""
        if encoder_key not in self.rounds and not self.whole:
            return None
        return self.rounds.get(encoder_key, 0) >= round_number > 0

    def _kind(self) -> list[Any]:
        """The key by which ranks are grouped, without their place."""
        what = (self.versions, self.settings, self.encoder, self.clock, self.training, self.rounds, self.whole)
        does = (self.goes_on, self.collective, self.activity, self.request, self.waits_for_child, self.sleeps)
        return [*what, sorted(self.given_up), self.apart, *does, self.calls > 0]

    def _place(self) -> list[str]:
        """The place; not for ranks that move, which are elsewhere at every look."""
        return [] if self.goes_on else [self.caller, self.hook, "" if self.collective else self.where]


class StateGroup(NamedTuple):
    """Ranks, in rising order, at one place, that have come to the same rounds; and the state of the first one."""

    ranks: tuple[int, ...]
    state: RankState

    def of(self, rank: int) -> RankState:
        """The state of one of them, as far as the first one's applies to all."""
        if rank == self.state.rank:
            return self.state
        return replace(self.state, rank=rank, host="", pid=0, workers=(), worker_states=(), batch="")


def answer_of(state: RankState) -> list[dict[str, Any]]:
    """One rank's answer to a survey, or its note in the store."""
    short = _bounded(state)
    kind = short._kind()
    ids = {"id": _digest([*kind, *short._place()]), "kind": _digest(kind)}
    return [{**ids, "ranks": [[state.rank, state.rank]], "still": state.still, "state": asdict(short)}]


def merged(answers: Iterable[Any]) -> list[dict[str, Any]]:
    """Merge answers, in any order. Malformed ones are left out. A rank may be in two of them."""
    found: dict[str, _Entry] = {}
    for entry in _entries(answers):
        entry.join(found, entry.id)
    if len(found) <= _MOST_PLACES:
        return [entry.told() for entry in found.values()]
    # Ranks that are alone at a place come first.
    by_size = sorted(found.values(), key=lambda one: (len(one.ranks), min(one.ranks)))
    kept, kinds = by_size[: _MOST_PLACES - 1], dict[str, _Entry]()
    for entry in by_size[_MOST_PLACES - 1 :]:
        kind = entry.kind if entry.kind in kinds or len(kinds) < _MOST_KINDS else ""
        entry.without_place(kind).join(kinds, kind)
    return [entry.told() for entry in (*kept, *kinds.values())]


def groups_of(answer: Any, size: int) -> tuple[StateGroup, ...]:
    """The groups in an answer, of `size` ranks in all; malformed ones are left out."""
    found = []
    for entry in _entries([answer]):
        state = _checked(entry.state)
        ranks = tuple(sorted(rank for rank in entry.ranks if rank < size))
        if state is not None and ranks:
            found.append(StateGroup(ranks, replace(state, still=entry.still)))
    return tuple(found)


def encoded(answer: list[dict[str, Any]]) -> str:
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace").decode()


def decoded(data: bytes) -> Any:
    """None if it is not JSON, or too long."""
    try:
        return json.loads(data) if len(data) <= 2 * LONGEST_STATE else None
    except (ValueError, RecursionError):
        return None


@dataclass
class _Entry:
    """A group in an answer. state: the first rank's, not parsed."""

    id: str
    kind: str
    ranks: set[int]
    still: float
    state: dict[str, Any]

    def join(self, others: dict[str, _Entry], key: str) -> None:
        if (before := others.get(key)) is None:
            others[key] = self
            return
        if min(self.ranks) < min(before.ranks):
            before.state = self.state
        before.ranks |= self.ranks
        before.still = min((one for one in (before.still, self.still) if one >= 0), default=-1.0)

    def without_place(self, kind: str) -> _Entry:
        blank = {"where": "", "caller": "", "hook": "", "workers": [], "worker_states": [], "batch": ""}
        unlike = {"rounds": {}, "whole": False, "given_up": {}, "apart": {}, "collective": "", "request": ""}
        if kind:
            unlike = {}
        return _Entry(f"many {kind}", kind, self.ranks, self.still, {**self.state, **blank, **unlike})

    def told(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind,
            "ranks": runs_of(self.ranks),
            "still": self.still,
            "state": self.state,
        }


def _entries(answers: Iterable[Any]) -> list[_Entry]:
    found = []
    for answer in answers:
        for one in answer if isinstance(answer, list) else ():
            try:
                ranks, state = ranks_of(one["ranks"]), one["state"]
                if ranks and isinstance(state, dict):
                    found.append(_Entry(_text(one["id"]), _text(one["kind"]), ranks, _seconds(one["still"]), state))
            except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
                continue
    return found


def _bounded(state: RankState) -> RankState:
    """Shorten to LONGEST_STATE bytes: the least important parts are dropped first."""
    rounds = dict(list(state.rounds.items())[-_MOST_ENCODERS:])
    apart = dict(list(state.apart.items())[-_MOST_ENCODERS:])
    given_up = {key: seconds for key, seconds in state.given_up.items() if key in rounds}
    whole = state.whole and len(rounds) == len(state.rounds)
    workers = state.workers[:_MOST_WORKERS]
    short = replace(state, rounds=rounds, apart=apart, given_up=given_up, whole=whole, workers=workers)
    without_workers = replace(short, workers=(), worker_states=())
    nowhere = replace(without_workers, where="", batch="", settings="")
    for candidate in (short, replace(short, worker_states=()), without_workers, nowhere):
        if len(json.dumps(asdict(candidate))) <= LONGEST_STATE:
            return candidate
    return replace(nowhere, rounds={}, apart={}, given_up={}, whole=False, encoder="", caller="", hook="")


def _digest(content: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def _checked(content: Any) -> RankState | None:
    """Parse a state in which every field has the right type; None if one has not.

    What a rank with an older nemo_patches does not say is as by default; what a newer one says is passed over.
    """
    checks = {one.name: _CHECKS[str(one.type)] for one in fields(RankState)}
    try:
        return RankState(**{name: checks[name](value) for name, value in content.items() if name in checks})
    except (TypeError, ValueError, AttributeError, OverflowError):
        return None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return safe(value)


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise TypeError
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not -1 <= value < 1e12:
        raise TypeError
    return float(value)


def _yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _by_encoder(check: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {_text(key): check(each) for key, each in list(value.items())[:_MOST_ENCODERS]}


_CHECKS: dict[str, Callable[[Any], Any]] = {  # by a field's annotation
    "bool": _yes_or_no,
    "int": _whole,
    "str": _text,
    "float": _seconds,
    "tuple[int, ...]": lambda value: tuple(map(_whole, list(value)[:_MOST_WORKERS])),
    "tuple[str, ...]": lambda value: tuple(map(_text, list(value)[:_MOST_WORKERS])),
    "dict[str, str]": _by_encoder(_text),
    "dict[str, int]": _by_encoder(_whole),
    "dict[str, float]": _by_encoder(_seconds),
}
