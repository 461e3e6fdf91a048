"""The length sync as a state machine:
which calls issue a round, which wait, and what length each gets. No torch.

A round is one all-reduce with MAX of one int64, `clock << LENGTH_BITS | length`. The number of a
round is not that of a call, so the clock says which call a rank's length belongs to. docs/design.md
gives the reasons.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

# 24 bits of length: every length that stock's float32 carries exactly. None ever wraps: a full
# count of evaluation calls carries into that of training calls; the others saturate.
LENGTH_BITS, EVALUATION_BITS, TRAINING_BITS = 24, 15, 24
MAX_LENGTH, MAX_EVALUATION, MAX_TRAINING = (
    (1 << bits) - 1 for bits in (LENGTH_BITS, EVALUATION_BITS, TRAINING_BITS)
)

SHORTEST_WAIT = timedelta(milliseconds=1)
# Outcomes of a call.
CAME = "came"  # it waited for its round, which completed: the wait ends when the last rank arrives
SERVED = "served"  # an earlier round served it: it waited for none
TIMEOUT = "timeout"  # it waited for its round, and gave up
UNWAITED = "unwaited"  # after timeouts: it did not wait for its round, or issued none
LOCAL = "local"  # this rank does not sync: sync="local", or the encoder's flag is false
ENDED = "ended"  # a round has failed, because a rank has died: there are no more
# Why an encoder of a rank takes no part in the length sync.
APART = FLAG_IS_OFF, IS_LOCAL = "sync_max_audio_length is false", "sync=local"

# Waited rounds in a row that came in time before the timeouts are forgotten.
CALM_ROUNDS = 100
# A wait lasts at least 4 healthy rounds, by the running mean of some 8.
HEALTHY_ROUNDS, _RECENT_ROUNDS = 4, 8
_MAX_TIMEOUTS = 40  # keeps 2**k small; nobody waits for 2**40 rounds


class Clock(NamedTuple):
    """Encoder calls of a rank, in lexicographic order: training calls, then evaluation calls since
    the last of them.
    """

    training: int = 0
    evaluation: int = 0

    def next(self, training: bool) -> Clock:
        if not training and self.evaluation < MAX_EVALUATION:
            return Clock(self.training, self.evaluation + 1)
        # Only a training call has 0.
        return Clock(min(self.training + 1, MAX_TRAINING), 0 if training else 1)


def pack(clock: Clock, length: int) -> int:
    """One int64 whose order is the order of (clock, length)."""
    return (clock.training << EVALUATION_BITS | clock.evaluation) << LENGTH_BITS | min(
        max(length, 0), MAX_LENGTH
    )


def unpack(value: int) -> tuple[Clock, int]:
    packed, length = value >> LENGTH_BITS, value & MAX_LENGTH
    return Clock(packed >> EVALUATION_BITS, packed & MAX_EVALUATION), length


class LengthProtocol:
    """This rank's side of the sync.

    For each encoder call: `begin`; where it says that the call is not served yet, issue a round
    with `value()`; where `wait_limit` gives a time, wait that long for it, and end with
    `came_in_time` or `timed_out`. A round that came in after its call is handed to the next
    `begin`.
    """

    def __init__(self) -> None:
        self.clock = Clock()  # of this rank's current call
        self.length = 0  # this rank's own, of its current call
        self.outstanding = False  # a round was issued and its result has not been seen
        self._agreed_clock, self._agreed_length = Clock(-1), 0
        self._completed = 0  # rounds whose result was seen
        self._breaker = 0  # timed-out waits that are not forgotten: k in docs/design.md
        self.healthy = timedelta(0)  # running mean of what a healthy round takes
        self._wait_after = 0  # no call waits until so many rounds have completed
        self._in_time = 0  # waited rounds in a row that came in time

    def begin(self, length: int, training: bool, completed: int | None) -> bool:
        """Start a call; `completed` is the outstanding round's result, if it has one. True: issue a
        round now.
        """
        self.length = length
        self.clock = self.clock.next(training)
        if completed is not None:
            self._learn(completed, training)
        return not self.outstanding and not self.served

    def value(self) -> int:
        """The value to reduce in the round that is being issued."""
        self.outstanding = True
        return pack(self.clock, self.length)

    def withdraw(self) -> None:
        """The round was not issued after all: a signal handler has raised before."""
        self.outstanding = False

    def wait_limit(self, timeout: timedelta) -> timedelta | None:
        """How long this call may wait for the round that it issued; None: not at all."""
        if self._completed < self._wait_after:
            return None
        shrunken = timeout / (1, 8, 64)[min(self._breaker, 2)]
        return min(max(shrunken, HEALTHY_ROUNDS * self.healthy, SHORTEST_WAIT), timeout)

    def took(self, seconds: float) -> None:
        """Note how long a healthy round took, from its issue until it completed: one that waited
        for no straggler.
        """
        self.healthy += (timedelta(seconds=seconds) - self.healthy) / _RECENT_ROUNDS

    def came_in_time(self, completed: int, training: bool) -> None:
        self._learn(completed, training)
        self._in_time += 1
        if self._in_time >= CALM_ROUNDS:
            self._breaker = self._wait_after = 0

    def timed_out(self) -> None:
        self._in_time = 0
        self._breaker = min(self._breaker + 1, _MAX_TIMEOUTS)
        self._wait_after = self._completed + 2**self._breaker - 2

    @property
    def served(self) -> bool:
        """Whether a round at this call's clock, or at a later one, has come in."""
        return self._agreed_clock >= self.clock

    def agreed(self) -> int:
        """For a call that is served: the latest round's length."""
        return max(self.length, self._agreed_length)

    def _learn(self, completed: int, training: bool) -> None:
        self.outstanding = False
        self._completed += 1
        clock, self._agreed_length = unpack(completed)
        self._agreed_clock = clock
        if not training and clock.evaluation == 0:
            # For an evaluation call that learns of a training call, that training call is still to
            # come.
            clock = Clock(clock.training - 1, self.clock.evaluation)
        self.clock = max(self.clock, clock)
