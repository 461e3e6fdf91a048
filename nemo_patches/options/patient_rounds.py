"""Rounds that wait for every rank without limit: those of data loaders and checkpoints."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from datetime import timedelta

from nemo_patches.channel.extremes import Extremes, ExtremesRounds
from nemo_patches.sync.encoder_rounds import Round, WatchedRounds, listeners
from nemo_patches.sync.length_sync import GroupSyncs, current


class PatientRounds(WatchedRounds):
    """At most one outstanding: `issue`, then `result`. Both raise RoundFailed.

    Only the training thread calls them. The watch reports a late one.
    """

    awaited = "word"

    def __init__(
        self,
        owner: object,
        group_syncs: GroupSyncs,
        title: str,
        key: str,
        late_text: str,
        place: Callable[[int], str],
    ) -> None:
        """owner: when it is deleted, this rank leaves. key, late_text: as in WatchedRounds.

        place: names a call.
        """
        self._extremes = ExtremesRounds(group_syncs.exchange, key)
        super().__init__(title, key, group_syncs.group, self._extremes.last, late_text)
        self._place = place
        self._outstanding: Round | None = None
        self.waited = timedelta(0)
        weakref.finalize(owner, self._extremes.leave).atexit = False
        listeners.notes.rounds_began(self)

    @property
    def is_outstanding(self) -> bool:
        return self._outstanding is not None

    def call_title(self, round_: Round) -> str:
        return f"{self.title}: {self._place(round_.call)}"

    def issue(self, value: int, call: int) -> None:
        number = self.rounds.latest.number + 1
        round_ = Round(
            number, call, training=True, length=0, in_time_at=self.in_time_at
        )
        self._extremes.issue(value)
        self._outstanding = round_
        self.was_issued(round_)

    def result(self) -> Extremes:
        """The outstanding round's result. Waits for a late rank, and reports it."""
        assert self._outstanding is not None
        round_ = self._outstanding
        began_at = time.monotonic()
        self.in_call = True
        try:
            while (extremes := self._extremes.wait(current().timeout)) is None:
                if not round_.gave_up_at:
                    self.was_late(round_)
        finally:
            self.in_call = False
            self.waited += timedelta(seconds=time.monotonic() - began_at)
        self._outstanding = None
        self.has_arrived(round_, in_time=not round_.gave_up_at)
        # Training stands still for each late round: each is worth a line.
        self._said = None
        return extremes

    def end(self, reason: str) -> None:
        """No rank can go on with them."""
        self._extremes.close(reason)

    def leave(self, reason: str) -> None:
        """This rank goes on without them: on the others they end, too, so that none waits for
        it.
        """
        self._extremes.close(reason)
        self._extremes.leave()
