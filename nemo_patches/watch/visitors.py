"""Clients of the rank's socket: who may have an answer, what it is, and how it is sent."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import _socket
import contextlib
import os
import struct
import time
from typing import TYPE_CHECKING, Any

from ..channel.own_socket import Socket
from .incidents import Incident, Incidents, Reason
from .job_socket import MOST_WAITING, JobSocket
from .looks import Told
from .stalls import Stalls

if TYPE_CHECKING:
    from .torch_knows import FlightRecording

_ROOT = 0  # the user
_TAKEN_S = 15.0  # a client that has not taken its answer by then gets no more


class Visitors(Reason):
    """Each is an incident, until it has its answer."""

    lead_s = (
        2.0  # ranks are asked at once; the answer waits for what torch has recorded
    )

    def __init__(self, incidents: Incidents, stalls: Stalls) -> None:
        super().__init__(incidents)
        self._stalls = stalls
        self.socket: JobSocket | None = None
        self.sending: list[Sending] = []
        self._waiting: dict[Socket, FlightRecording] = {}

    def find(self, now: float, is_last: bool) -> dict[Any, float]:
        self.sending = [one for one in self.sending if not one.go_on()]
        if is_last:
            self.close()
        elif self.socket is not None and self.socket.has_visitors():
            self.incidents.late.run()
            from .torch_knows import FlightRecording

            for visitor in visitors(self.socket.listener):
                self._waiting[visitor] = FlightRecording()
        return dict.fromkeys(self._waiting, now)

    def next_at(self, incident: Incident) -> float:
        is_ready = self._waiting[incident.subject].is_done
        return 0.0 if is_ready else time.monotonic() + self.lead_s / 2

    def say(self, incident: Incident, told: Told, now: float) -> None:
        from .report_file import as_json

        visitor: Socket = incident.subject
        recorded = self._waiting.pop(visitor).wait()
        if told.judgement is None:
            visitor.close()
            return
        content = self._stalls.answer(told.judgement, now)
        sending = Sending(visitor, as_json(content, recorded))
        if not sending.go_on():
            self.sending.append(sending)

    def close(self) -> None:
        for visitor in (*self._waiting, *(one.visitor for one in self.sending)):
            visitor.close()
        self._waiting = {}
        self.sending = []
        if self.socket is not None:
            self.socket.close()
            self.socket = None


def visitors(listener: Socket) -> list[Socket]:
    """Clients that wait for an answer, and are allowed to get one."""
    found = []
    with contextlib.suppress(OSError):  # no more clients, or no more files
        for _ in range(MOST_WAITING):
            visitor = listener.accept()
            visitor.setblocking(False)
            if _user_of(visitor) in (os.getuid(), _ROOT) and not _has_hung_up(visitor):
                found.append(visitor)
            else:
                visitor.close()
    return found


class Sending:
    """An answer on its way: the kernel holds less of it than a large job's has."""

    def __init__(self, visitor: Socket, data: bytes) -> None:
        self.visitor = visitor
        self._left = memoryview(data)
        self._ends_at = time.monotonic() + _TAKEN_S

    def go_on(self) -> bool:
        """Send what the client takes now, without waiting. Whether it has all, or gets no more."""
        try:
            while self._left:
                self._left = self._left[self.visitor.send(self._left) :]
        except BlockingIOError:
            if time.monotonic() < self._ends_at:
                return False
        except OSError:  # the client has disconnected
            pass
        self.visitor.close()
        return True


def _has_hung_up(visitor: Socket) -> bool:
    """As one that only wanted to know whether this rank is there."""
    with contextlib.suppress(BlockingIOError):
        return not visitor.recv(1, _socket.MSG_PEEK)
    return False


def _user_of(visitor: Socket) -> int:
    _, user, _ = struct.unpack(
        "iII", visitor.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    )
    return int(user)
