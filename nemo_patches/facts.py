"""What one rank says of itself when it is asked, and its JSON (judging/read_facts.py reads that).
Needs no torch.
"""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

# No `from __future__ import annotations`: read_facts.py reads the fields' types.

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .channel.answers import LONGEST_STATE

LENGTH_SYNC = "length sync"  # what a rank may wait in, as any collective
ROUNDS_OF = "the rounds of "  # how the name of other rounds begins
CALLING = "calling"  # it goes on with encoder calls
MOVING = "moving"  # it goes on with collectives
# It takes no step, and its training thread, or what this waits for, takes a core
COMPUTING = "computing"
# Whether a rank runs on_stall: it has none, or reports no stalls; it can; it has told this stall
# as a warning, and can; it has run it in this stall.
NO_PAGE = ""
CAN_PAGE = "can"
HAS_WARNED = "warned"
HAS_PAGED = "paged"
# Fields that may differ between ranks of one kind.
_OWN = "rank host pid idle goes_on_for where caller hook workers worker_states batch"
# Fields that are dropped where a state is too long, in this order.
_FIRST_DROPPED = (
    "worker_states",
    "workers",
    "where batch settings flag",
    "rounds apart given_up late whole encoder caller hook",
)
MOST_ENCODERS = 64
MOST_WORKERS = 32


@dataclass(frozen=True, kw_only=True)
class Doing:
    """Since when a rank stands, and what its training thread does, if its last call is long ago."""

    goes_on_for: float = 0.0  # for this long from now, unless it is seen to move again
    still: float = -1.0  # seconds since it has last been seen to move; -1: not known
    sleeps: bool = False  # its training thread has not run at all for long
    where: str = ""
    collective: str = ""  # what it waits in; empty: in none that is known
    caller: str = ""  # from where
    hook: str = ""  # of Lightning's, "saving a checkpoint", "in a handler .."
    activity: str = ""  # "a checkpoint", "a debugger"
    # What it waits in for a person or a request: "input()", "perhaps queue.get()"
    request: str = ""
    worker_states: tuple[str, ...] = ()  # texts about some workers of its data loader
    batch: str = ""  # its current or last one


@dataclass(frozen=True)
class RankFacts(Doing):
    """The state of one rank. Times are ages in seconds, when it was asked; -1: never, or not
    known.
    """

    rank: int
    host: str
    pid: int
    versions: str
    settings: str
    encoder: str  # of the last call; empty before the first
    calls: int  # of all encoders
    # Of the last call's encoder: training calls, evaluation calls since.
    clock: tuple[int, ...]
    idle: float  # since the last encoder call began
    # By encoder: the rounds that this rank has come to, the open ones and the latest last.
    rounds: dict[str, int]
    flag: str = ""  # of the first encoder that was called, behind its name
    whole: bool = True  # false if `rounds` has no room for all encoders
    # By encoder: since it waits no more for its open round.
    given_up: dict[str, float] = field(default_factory=dict)
    # By encoder: the round that is late here, and before its call: the training calls, the
    # evaluation calls since (-1: not known), and, in an evaluation of which ranks may have fewer
    # batches, the training calls once more (else -1).
    late: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    # Whether something is wrong here: then a verdict is judged.
    asks: bool = False
    # By encoder: why its latest call took no part in a round.
    apart: dict[str, str] = field(default_factory=dict)
    # Whether the last call was one of training, and not of an evaluation.
    training: bool = True
    goes_on: str = ""  # CALLING, MOVING, COMPUTING or empty
    waits_for_child: bool = False  # a thread of its process is in os.wait()
    page: str = CAN_PAGE
    workers: tuple[int, ...] = ()  # process ids of data loader workers

    def has_come(self, encoder_key: str, round_number: int) -> bool | None:
        """Whether its rank has come to this round of this encoder; None if it does not say."""
        if encoder_key not in self.rounds and not self.whole:
            return None
        return self.rounds.get(encoder_key, 0) >= round_number > 0

    def key(self) -> str:
        """Equal for ranks that the exchange merges: that of the kind, a space, that of the
        place.
        """
        own = _OWN.split()
        kind = {name: one for name, one in asdict(self).items() if name not in own}
        kind.update(
            given_up=sorted(self.given_up), calls=self.calls > 0, still=self.still < 0
        )
        where = "" if self.collective else self.where
        # Ranks that move are elsewhere at every look.
        place = [] if self.goes_on else [self.caller, self.hook, where]
        return f"{_digest(kind)} {_digest([kind, place])}"

    def to_json(self) -> dict[str, Any]:
        """Of at most LONGEST_STATE bytes: the least important parts are dropped first."""
        return asdict(_bounded(self))


def _bounded(state: RankFacts) -> RankFacts:
    rounds = dict(list(state.rounds.items())[-MOST_ENCODERS:])
    short = replace(
        state,
        rounds=rounds,
        apart=dict(list(state.apart.items())[-MOST_ENCODERS:]),
        given_up={key: one for key, one in state.given_up.items() if key in rounds},
        whole=state.whole and len(rounds) == len(state.rounds),
        workers=state.workers[:MOST_WORKERS],
    )
    for names in _FIRST_DROPPED:
        if len(json.dumps(asdict(short))) <= LONGEST_STATE:
            return short
        empty: dict[str, Any] = {
            name: type(getattr(short, name))() for name in names.split()
        }
        short = replace(short, **empty)
    return short


def _digest(content: Any) -> str:
    return hashlib.blake2b(
        json.dumps(content, sort_keys=True).encode(), digest_size=8
    ).hexdigest()
