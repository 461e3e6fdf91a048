"""What is said of a stall; made when there is something to judge for the first time.

Until then the stall monitor imports none of it (late_modules.py).
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import time

from ..channel.exchange import Exchange
from ..channel.own_socket import Socket
from ..judging.found import Found
from ..judging.missing_rank import Stall
from ..sync.length_sync import current
from ..sync.rounds import Group, WatchedRounds
from ..sync.settings import Settings
from . import visitors
from .all_ranks import AllRanks
from .encoder_watch import EncoderWatch
from .job_stall import JobStallWatch
from .kernel_call import kernel_call
from .late_return import LateReturn
from .looks import Look, Looks
from .progress import Progress
from .report_file import ReportFile, as_json
from .roll_call import RollCall
from .sync_end_report import SyncEndReport
from .torch_knows import FlightRecording
from .training_notes import TrainingNotes


class Reports:
    """Of one process group. The stall monitor's thread calls the methods; any thread may call
    `stalls`.
    """

    def __init__(
        self,
        group: Group,
        exchange: Exchange,
        notes: TrainingNotes,
        progress: Progress,
        looks: Looks,
    ) -> None:
        self._group = group
        self._notes = notes
        self._looks = looks
        self._watches: dict[WatchedRounds, EncoderWatch] = {}
        self._late_return = LateReturn(group, notes)
        self.roll_call = RollCall(
            exchange, looks.begin, self.has_late_round, self.stalls
        )
        self._end_report = SyncEndReport(exchange, group.size, looks.begin)
        self._progress = progress
        report_file = ReportFile(group.rank, group.store_port, self._may_read_memory)
        self.job_stall = JobStallWatch(
            notes, group, progress, looks.begin, report_file, looks.ranks_here
        )
        self._visitors: list[tuple[Socket, Look, FlightRecording]] = []
        self.sending: list[visitors.Sending] = []

    def stalls(self) -> tuple[Stall, ...]:
        """The reported rounds that have not completed; the ranks that have died, if one failed; a
        stall of the job.
        """
        reports = [
            self._end_report.stall(),
            self.job_stall.stall(),
            *(watch.stall() for watch in list(self._watches.values())),
        ]
        return tuple(stall for stall in reports if stall is not None)

    def has_late_round(self) -> bool:
        """Whether a round is late enough to be looked into."""
        return any(watch.busy for watch in list(self._watches.values()))

    def heard(self, found: Found) -> None:
        """What a question has found, also one that another rank has asked."""
        self._late_return.heard(found)

    def look(
        self, settings: Settings, all_ranks: AllRanks, *, is_last: bool, is_over: bool
    ) -> None:
        """is_last: this process or its process group ends. is_over: and so does any stall of the
        job.
        """
        now = time.monotonic()
        self._late_return.look()
        self._watch_encoders(now, is_last)
        if not is_last:  # after the rounds: a late one is reported with the same ranks
            self.roll_call.look(now, all_ranks.first_call_at)
        self._end_report.look(now, is_last)
        self.job_stall.look(time.monotonic(), settings, is_over)

    def answer(self, listener: Socket) -> None:
        """Clients of this host that ask for what is known."""
        self.sending = [one for one in self.sending if not one.go_on()]
        for visitor in visitors.visitors(listener):
            self._visitors.append((visitor, self._looks.begin(), FlightRecording()))
        for visitor, look, recording in [
            one for one in self._visitors if one[1].is_done and one[2].is_done
        ]:
            answer = self.job_stall.answer(look.found, time.monotonic())
            sending = visitors.answer(visitor, as_json(answer, recording.wait()))
            self._visitors.remove((visitor, look, recording))
            if sending is not None:
                self.sending.append(sending)

    def close(self) -> None:
        for visitor, _, _ in self._visitors:
            visitor.close()
        for sending in self.sending:
            sending.visitor.close()

    def _may_read_memory(self) -> bool:
        """Not before an exit, nor where the training thread may wait for the GPU."""
        thread = self._progress.training_thread.known()
        return (
            not current().stall_exit
            and thread is not None
            and not kernel_call(thread.native).may_wait_for_a_device
        )

    def _watch_encoders(self, now: float, is_last: bool) -> None:
        group = self._group
        known = self._notes.syncs(group)
        for sync in known:
            if sync not in self._watches:
                uneven = self._notes.may_be_uneven
                self._watches[sync] = EncoderWatch(
                    sync, group.rank, group.size, self._looks.begin, uneven
                )
        forgotten = set(self._watches).difference(known)
        timeout_s = current().timeout.total_seconds()
        for sync, watch in list(self._watches.items()):
            if sync.has_failed() and not is_last:
                self._end_report.ended(sync)
            watch.look(now, timeout_s, is_last)
            if sync in forgotten and not watch.busy:
                del self._watches[sync]
