"""One data loader's agreement among the ranks: in rounds, each rank says one batch ahead if it has another."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from nemo_patches.channel.extremes import VALUES, Extremes
from nemo_patches.channel.side_channel import RoundFailed
from nemo_patches.sync.length_sync import GroupSyncs, process
from nemo_patches.sync.patient_rounds import PatientRounds

_BATCHES = 1 << 26
_LATE = "not every rank has said within {waited:.2f} s whether it has another batch; all wait for that"
_NO_LENGTH = 0  # otherwise the length plus one
_SET_UP = -1  # instead of a batch


class StopTogetherError(RuntimeError):
    """The ranks cannot end a pass together: a rank has died, is at another batch, or has no batch at all."""


@dataclass(frozen=True)
class LoaderCounters:
    """What one loader has yielded on this rank, and what was dropped so that all ranks end together."""

    loader: str
    passes: int
    batches: int
    passes_cut: int  # passes that ended while this rank still had a batch
    left_out: int  # batches; if a loader cannot tell how many it has left, one for each pass that was cut
    waited: timedelta

    def __str__(self) -> str:
        return (
            f"{self.loader}: {self.passes} passes, {self.batches} batches; {self.passes_cut} passes cut, "
            f"{self.left_out} or more batches left out; waited {self.waited.total_seconds():.3f} s"
        )


class Position(NamedTuple):
    """A rank's batch in its passes over a loader. ended: it has no such batch."""

    pass_number: int  # from 1
    batch: int  # from 1
    ended: bool

    def value(self) -> int:
        """A number that rises with the position. It wraps: only whether ranks are at the same one matters."""
        return ((self.pass_number * _BATCHES + self.batch % _BATCHES) * 2 + self.ended) % VALUES

    @classmethod
    def of(cls, value: int) -> Position:
        return cls(value // 2 // _BATCHES, value // 2 % _BATCHES, bool(value % 2))


class Agreement:
    """All ranks make one for each loader, in the same order. Only the training thread calls it."""

    def __init__(self, group_syncs: GroupSyncs, kind: str, number: int, contents: str) -> None:
        """contents: what is in the loader, for messages."""
        self.title = f"{kind} loader {number} ({contents})"
        self._rounds = PatientRounds(self, group_syncs, self.title, f"loader {kind} {number}", _LATE, _text_of)
        self._place: Position | None = None  # of the latest round; None at the set-up

    @property
    def waited(self) -> timedelta:
        return self._rounds.waited

    def least_length(self, length: int | None) -> tuple[int | None, int, bool]:
        """The smallest length of any rank (None: some rank has none), a rank that has it, and whether all have it."""
        self._issue(_NO_LENGTH if length is None else length + 1, None)
        highest, lowest = self._result()
        least = None if lowest.value == _NO_LENGTH else lowest.value - 1
        return least, lowest.rank, highest.value == lowest.value

    def say(self, place: Position) -> None:
        """Tell the others whether this rank has the batch at this place. Does not wait."""
        self._issue(place.value(), place)

    def ended_by(self) -> tuple[int | None, bool]:
        """A rank that has no such batch (None: every rank has it), and whether none has. Waits as long as it takes.

        Raises StopTogetherError where a rank is at another place than this one, or has gone.
        """
        extremes = self._result()
        highest, lowest = Position.of(extremes.highest.value), Position.of(extremes.lowest.value)
        if highest[:2] != lowest[:2]:
            places = (
                f"rank {extreme.rank} is at batch {place.batch} of pass {place.pass_number}"
                for extreme, place in ((extremes.lowest, lowest), (extremes.highest, highest))
            )
            raise self._error(f"the ranks are out of step: {', '.join(places)}; some rank has left a pass early")
        return extremes.highest.rank if highest.ended else None, lowest.ended

    def settle(self) -> bool:
        """Collect what is outstanding from a pass that was left early; whether a rank had nothing left of it."""
        return self._rounds.is_outstanding and self.ended_by()[0] is not None

    def _issue(self, value: int, place: Position | None) -> None:
        self._place = place
        try:
            self._rounds.issue(value, place.batch if place is not None else _SET_UP)
        except RoundFailed as error:
            raise self._gone(error) from None

    def _result(self) -> Extremes:
        try:
            return self._rounds.result()
        except RoundFailed as error:
            raise self._gone(error) from None

    def _gone(self, error: RoundFailed) -> StopTogetherError:
        place = self._place
        where = "at the set-up" if place is None else f"at batch {place.batch} of pass {place.pass_number}"
        lost = f"the ranks cannot end together any more: {error}; seen {where}, {time.strftime('%H:%M:%S')}"
        return self._error(f"{lost}. No batch was left out for it; go on from the last checkpoint")

    def _error(self, text: str) -> StopTogetherError:
        self._rounds.end(text)
        return StopTogetherError(f"{self.title}: {text}")


def _text_of(batch: int) -> str:
    return "set-up" if batch == _SET_UP else f"batch {batch}"


class Agreements:
    """Makes agreements under the current process group; numbers loaders of a kind in their order."""

    def __init__(self) -> None:
        self._group_syncs: weakref.ref[GroupSyncs] | None = None
        self._numbers: Counter[str] = Counter()

    def make(self, kind: str, contents: str) -> Agreement | None:
        """None without other ranks."""
        group_syncs = process.present_group()
        if group_syncs is None:
            return None
        if self._group_syncs is None or self._group_syncs() is not group_syncs:
            self._group_syncs, self._numbers = weakref.ref(group_syncs), Counter()
        self._numbers[kind] += 1
        return Agreement(group_syncs, kind, self._numbers[kind], contents)
