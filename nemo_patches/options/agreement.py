"""One data loader's rounds: each rank says, one batch ahead, whether it has another batch."""

from __future__ import annotations

import time
from typing import NamedTuple

from nemo_patches.channel.extremes import VALUES, Extremes
from nemo_patches.channel.rounds import RoundFailed
from nemo_patches.options.patient_rounds import PatientRounds
from nemo_patches.sync.length_sync import GroupSyncs, process

_BATCHES = 1 << 26  # a pass with more has the same numbers again
_LATE = (
    "not every rank has said within {waited:.2f} s whether it has another batch; all"
    " wait for that"
)
_NO_LENGTH = 0  # otherwise the length plus one
_SET_UP = 0  # instead of a batch


class StopTogetherError(RuntimeError):
    """The ranks cannot end a pass together: a rank has died, is at another batch, or has no batch
    at all.
    """


class Position(NamedTuple):
    """A rank's batch in its passes over a loader. ended: it has no such batch."""

    pass_number: int  # from 1
    batch: int  # from 1; _SET_UP
    ended: bool

    def value(self) -> int:
        """A number that rises with the position.

        It wraps: only whether ranks are at the same one matters.
        """
        place = self.pass_number * _BATCHES + self.batch % _BATCHES
        return (place * 2 + self.ended) % VALUES

    @classmethod
    def of(cls, value: int) -> Position:
        return cls(value // 2 // _BATCHES, value // 2 % _BATCHES, bool(value % 2))

    def __str__(self) -> str:
        if not self.pass_number:
            return "the set-up"
        return f"batch {self.batch} of pass {self.pass_number}"


class Agreement:
    """All ranks make one for each loader, in the same order. Only the training thread calls it."""

    def __init__(
        self, group_syncs: GroupSyncs, kind: str, number: int, contents: str
    ) -> None:
        """contents: what is in the loader, for messages."""
        self.title = f"{kind} loader {number} ({contents})"
        self._position = Position(0, _SET_UP, ended=False)
        self._rounds = PatientRounds(
            owner=self,
            group_syncs=group_syncs,
            title=self.title,
            key=f"loader {kind} {number}",
            late_text=_LATE,
            place=lambda batch: f"batch {batch}" if batch else "set-up",
        )

    def least_length(self, length: int | None) -> tuple[int | None, int, bool]:
        """The smallest length of any rank (None: some rank has none), a rank that has it, and
        whether all have it.
        """
        self._issue(_NO_LENGTH if length is None else length + 1)
        highest, lowest = self._result()
        least = None if lowest.value == _NO_LENGTH else lowest.value - 1
        return least, lowest.rank, highest.value == lowest.value

    def say(self, position: Position) -> None:
        """Tell the others whether this rank has the batch at this position. Does not wait."""
        self._position = position
        self._issue(position.value())

    def ended_by(self) -> tuple[int | None, bool]:
        """A rank that has no such batch (None: every rank has it), and whether none has. Waits as
        long as it takes.

        Raises StopTogetherError where a rank is at another position than this one, or has gone.
        """
        extremes = self._result()
        highest = Position.of(extremes.highest.value)
        lowest = Position.of(extremes.lowest.value)
        if highest[:2] != lowest[:2]:
            one = f"rank {extremes.lowest.rank} is at {lowest}"
            other = f"rank {extremes.highest.rank} is at {highest}"
            text = (
                f"the ranks are out of step: {one}, {other}; some rank has left a pass"
                " early"
            )
            raise self._error(text)
        return (extremes.highest.rank if highest.ended else None), lowest.ended

    def settle(self) -> None:
        """Wait for what is outstanding from a pass that was left early."""
        if self._rounds.is_outstanding:
            self.ended_by()

    def _issue(self, value: int) -> None:
        try:
            self._rounds.issue(value, self._position.batch)
        except RoundFailed as error:
            raise self._gone(error) from None

    def _result(self) -> Extremes:
        try:
            return self._rounds.result()
        except RoundFailed as error:
            raise self._gone(error) from None

    def _gone(self, error: RoundFailed) -> StopTogetherError:
        lost = f"{error}; seen at {self._position}, {time.strftime('%H:%M:%S')}"
        to_do = "No batch was left out for it; go on from the last checkpoint"
        return self._error(f"the ranks cannot end together any more: {lost}. {to_do}")

    def _error(self, text: str) -> StopTogetherError:
        self._rounds.leave(text)
        return StopTogetherError(f"{self.title}: {text}")


def agreement_of(kind: str, contents: str) -> Agreement | None:
    """For one loader more of this kind, under the current process group; None without other ranks.

    contents: as in Agreement.
    """
    group_syncs = process.present_group()
    if group_syncs is None:
        return None
    number = group_syncs.number(f"{kind} loader")
    return Agreement(group_syncs, kind, number, contents)
