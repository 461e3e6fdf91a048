"""What one rank says of itself when it is asked: one dataclass, JSON both ways.

What another rank has sent is data: its types are checked, its size is bounded, it is printed without control
characters, and nothing of it is evaluated. Needs no torch.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from .channel.answers import LONGEST_STATE
from .text import safe

LENGTH_SYNC = "length sync"  # what a rank may wait in, as any collective
ROUNDS_OF = "the rounds of "  # how the name of other rounds begins
CALLING = "calling"  # it goes on with encoder calls
MOVING = "moving"  # it goes on with collectives
COMPUTING = "computing"  # it takes no step, and its training thread, or what this waits for, takes a core
_MOST_ENCODERS = 64
_MOST_WORKERS = 32


@dataclass(frozen=True)
class RankFacts:
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

    def key(self) -> str:
        """Equal for ranks that the exchange merges: that of the kind, a space, that of the place."""
        what = [self.versions, self.settings, self.encoder, self.clock, self.training, self.rounds, self.whole]
        does = [self.goes_on, self.collective, self.activity, self.request, self.waits_for_child, self.sleeps]
        kind = [*what, sorted(self.given_up), self.apart, *does, self.calls > 0]
        place: list[str] = []
        if not self.goes_on:  # ranks that move are elsewhere at every look
            place = [self.caller, self.hook, "" if self.collective else self.where]
        return f"{_digest(kind)} {_digest([*kind, *place])}"

    def of_another(self, rank: int) -> RankFacts:
        """This state as far as it applies to another rank with the same key."""
        return replace(self, rank=rank, host="", pid=0, workers=(), worker_states=(), batch="")

    def to_json(self) -> dict[str, Any]:
        """Of at most LONGEST_STATE bytes: the least important parts are dropped first."""
        return asdict(_bounded(self))

    @classmethod
    def from_json(cls, content: Any, has_place: bool = True) -> RankFacts | None:
        """Parse a state in which every field has the right type; None if one has not.

        has_place: whether its rank's place is that of all ranks whose states were merged with it.
        What a rank with an older nemo_patches does not say is as by default; what a newer one says is passed over.
        """
        checks = {one.name: _CHECKS[str(one.type)] for one in fields(cls)}
        try:
            state = cls(**{name: checks[name](value) for name, value in content.items() if name in checks})
        except (TypeError, ValueError, AttributeError, OverflowError):
            return None
        if has_place:
            return state
        return replace(state, where="", caller="", hook="", workers=(), worker_states=(), batch="")


def _bounded(state: RankFacts) -> RankFacts:
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
