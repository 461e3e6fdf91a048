"""Clients of the rank's socket: who may have an answer, and how it is sent."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import _socket
import contextlib
import os
import struct
import time

from ..channel.own_socket import Socket
from .job_socket import MOST_WAITING

_ROOT = 0  # the user
_TAKEN_S = 15.0  # a client that has not taken its answer by then gets no more


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


def answer(visitor: Socket, data: bytes) -> Sending | None:
    """Begin to send it; None: it is sent."""
    sending = Sending(visitor, data)
    return None if sending.go_on() else sending


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
