"""A rank's heartbeat: what it says of itself, again and again, to whoever waits for it."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Heartbeat:
    """One heartbeat. `number` rises from one to the next: where it stands still, the heart has stopped."""

    rank: int
    number: int
    host: str
    pid: int
    versions: str
    settings: str
    phase: str
    encoder: str  # of the last call; empty before the first
    calls: int  # of all encoders
    clock: tuple[int, ...]  # of the last call's encoder: training calls, evaluation calls since
    idle: float  # seconds since the last encoder call began; -1 before the first
    rounds: dict[str, int]  # by encoder: the rounds that this rank has come to, the open ones and the latest last
    address: str = ""  # where this rank listens for direct questions; empty: nowhere
    port: int = 0
    where: str = ""  # what its training thread does, where the last call is long ago
    workers: tuple[int, ...] = ()  # process ids of data loader workers, then
    worker_states: tuple[str, ...] = ()  # what there is to say of some of them
    collective: str = ""  # what its training thread waits in, then; empty: in none that is known
    activity: str = ""  # "a checkpoint", "a debugger", then
    batch: str = ""  # which one it is at, or was at last, then
    whole: bool = True  # false where `rounds` has no room for all encoders
    still: float = -1.0  # seconds since it has last been seen to move; -1: not known
    apart: dict[str, str] = field(default_factory=dict)  # by encoder: why its latest call took no part in a round
    training: bool = True  # whether the last call was one of training, and not of an evaluation

    def has_come(self, encoder_key: str, round_number: int) -> bool | None:
        """Whether its rank has come to this round of this encoder; None where it does not say."""
        if encoder_key not in self.rounds and not self.whole:
            return None
        return self.rounds.get(encoder_key, 0) >= round_number > 0

    def tells_that_all_sync(self) -> bool:
        """Whether a first round has come: then no rank is without nemo_patches, nor before its first encoder call."""
        return any(number > 1 for number in self.rounds.values())


def period_for_s(size: int) -> float:
    """Seconds from one heartbeat of a rank to the next, of so many ranks. Many beat less often, for the one store."""
    return max(_PERIOD_S, size * _PERIOD_PER_RANK_S)


_PERIOD_S, _PERIOD_PER_RANK_S = 1.0, 1 / 400
PERIOD_ON_A_FILE_S = 30.0  # a file store only grows
