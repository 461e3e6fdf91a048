"""One data loader's agreement among the ranks: in rounds, each says one batch ahead whether it has another."""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

from nemo_patches.channel.side_channel import RoundFailed
from nemo_patches.stall.training_notes import RoundsBegan
from nemo_patches.sync.events import Round, SyncHandle, WaitTimedOut, bus
from nemo_patches.sync.length_sync import GroupSyncs, current, process
from nemo_patches.sync.rank_log import report
from nemo_patches.uneven.extremes import Extremes, ExtremesRounds, Place

_LATE = "not every rank has said within {waited:.2f} s whether it has another batch; all wait for that"
_NO_LENGTH = 0  # else the length and one
_SET_UP = -1  # in place of a batch


class StopTogetherError(RuntimeError):
    """The ranks cannot end a pass together: a rank has gone, is at another batch, or has no batch at all."""


@dataclass(frozen=True)
class LoaderCounters:
    """What one loader has given on this rank, and what was left out for the others' sake."""

    loader: str
    passes: int
    batches: int
    passes_cut: int  # that ended while this rank still had a batch
    left_out: int  # batches; where a loader cannot tell how many it has left, one for each pass that was cut
    waited: timedelta

    def __str__(self) -> str:
        return (
            f"{self.loader}: {self.passes} passes, {self.batches} batches; {self.passes_cut} passes cut, "
            f"{self.left_out} or more batches left out; waited {self.waited.total_seconds():.3f} s"
        )


class Agreement:
    """All ranks make one for each loader, in the same order. Only the training thread calls it."""

    def __init__(self, group_syncs: GroupSyncs, kind: str, number: int, contents: str) -> None:
        """contents: for people, what is in the loader."""
        self._rounds = ExtremesRounds(group_syncs.channel, key := f"loader {kind} {number}")
        self.title = f"{kind} loader {number} ({contents})"
        self.handle = _LoaderHandle(self.title, key, group_syncs.group, self._rounds.last, _LATE)
        self.waited = timedelta(0)
        self._issued: tuple[Round, Place | None] | None = None  # the outstanding round; no place at the set-up
        weakref.finalize(self, self._rounds.close).atexit = False
        bus.publish(RoundsBegan(self.handle))

    def least_length(self, length: int | None) -> tuple[int | None, int, bool]:
        """The least length on any rank (None: one cannot tell its own), a rank that has it, and whether all have it."""
        self._issue(_NO_LENGTH if length is None else length + 1, None)
        highest, lowest = self._result()
        least = None if lowest.value == _NO_LENGTH else lowest.value - 1
        return least, lowest.rank, highest.value == lowest.value

    def say(self, place: Place) -> None:
        """Tell the others whether this rank has the batch at this place. Waits for nobody."""
        self._issue(place.value(), place)

    def ended_by(self) -> tuple[int | None, bool]:
        """A rank that has no such batch (None: every rank has it), and whether none has. Waits as long as it takes.

        Raises StopTogetherError where a rank is at another place than this one, or has gone.
        """
        extremes = self._result()
        highest, lowest = Place.of(extremes.highest.value), Place.of(extremes.lowest.value)
        if highest[:2] != lowest[:2]:
            places = (
                f"rank {extreme.rank} is at batch {place.batch} of pass {place.pass_number}"
                for extreme, place in ((extremes.lowest, lowest), (extremes.highest, highest))
            )
            raise self._error(f"the ranks are out of step: {', '.join(places)}; some rank has left a pass early")
        return extremes.highest.rank if highest.ended else None, lowest.ended

    def settle(self) -> bool:
        """Collect what is outstanding from a pass that was left early; whether a rank had nothing left of it."""
        return self._issued is not None and self.ended_by()[0] is not None

    def _issue(self, value: int, place: Place | None) -> None:
        number, batch = self._rounds.last.done + 1, place.batch if place is not None else _SET_UP
        round_ = Round(number, batch, training=True, length=0, in_time_at=self.handle.in_time_at)
        try:
            self._rounds.issue(value)
        except RoundFailed as error:
            raise self._gone(error, place) from None
        self.handle.round, self._issued = round_, (round_, place)  # after issue(), as EncoderSync does

    def _result(self) -> Extremes:
        assert self._issued is not None
        (round_, place), began_at, self.handle.in_call, said = self._issued, time.monotonic(), True, False
        try:
            while (extremes := self._rounds.wait(current().timeout)) is None:
                if not round_.gave_up_at:
                    round_.gave_up_at = time.monotonic()
                    late = self.handle.late(round_, round_.gave_up_at - round_.issued_at)
                    if not bus.publish(WaitTimedOut(self.handle, round_, None)):  # else the report says it, and who
                        said = True
                        report(logging.WARNING, f"{self.handle.call_title(round_)}: {late}")
        except RoundFailed as error:
            raise self._gone(error, place) from None
        finally:
            self.handle.in_call = False
            self.waited += timedelta(seconds=time.monotonic() - began_at)
        round_.came_at, self._issued = time.monotonic(), None
        if not round_.gave_up_at:
            self.handle.in_time_at = round_.came_at
        if said:
            late_s = round_.came_at - round_.issued_at
            report(logging.WARNING, f"{self.title}: recovered: the missing word came {late_s:.2f} s late")
        return extremes

    def _gone(self, error: RoundFailed, place: Place | None) -> StopTogetherError:
        where = "at the set-up" if place is None else f"at batch {place.batch} of pass {place.pass_number}"
        lost = f"the ranks cannot end together any more: {error}; seen {where}, {time.strftime('%H:%M:%S')}"
        return self._error(f"{lost}. No batch was left out for it; go on from the last checkpoint")

    def _error(self, text: str) -> StopTogetherError:
        self.handle.ended = text
        self._rounds.close()
        return StopTogetherError(f"{self.title}: {text}")


class _LoaderHandle(SyncHandle):
    def call_title(self, round_: Round) -> str:
        return f"{self.title}: set-up" if round_.call == _SET_UP else f"{self.title}: batch {round_.call}"


class Agreements:
    """Makes them, under the present process group, and numbers loaders of a kind in the order in which they come."""

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
